"""States, the moves between them, and the truth about a state whose keeper is gone."""

from __future__ import annotations

import json

import pytest

from harness.store import status
from harness.store.errors import StoreError
from harness.store.files import Lock
from harness.store.status import MOVES, Keeper, State, Status


def put(run, state, attempt=0, **fields):
    """As if it had been written: past every check."""
    run.mkdir(exist_ok=True)
    (run / "status.json").unlink(missing_ok=True)
    return status.write(run, Status(state, "because", attempt, **fields))


@pytest.mark.parametrize("old", State)
def test_exactly_the_moves_of_the_table_are_made_and_a_newer_attempt_starts_from_any_state(tmp_path, old):
    for new in State:
        put(tmp_path, old)
        if new in MOVES[old]:
            assert status.write(tmp_path, Status(new, "r", 0)).state is new
        else:
            with pytest.raises(StoreError, match=f"is {old.value} and cannot become {new.value}"):
                status.write(tmp_path, Status(new, "r", 0))
            assert status.read(tmp_path).state is old
    assert status.write(tmp_path, Status(State.running, "r", 1)).attempt == 1


def test_a_late_word_of_an_older_attempt_changes_nothing(tmp_path):
    put(tmp_path, State.running, attempt=2)
    assert status.write(tmp_path, Status(State.failed, "late", 1)).attempt == 2
    assert status.read(tmp_path).state is State.running


def test_a_run_that_was_never_started_has_none(tmp_path):
    assert status.read(tmp_path) is None
    assert status.effective(tmp_path) is None
    with pytest.raises(StoreError, match="never started"):
        status.move(tmp_path, 0, State.failed, "r")


WHOLE = {"state": "done", "reason": "", "attempt": 0, "keeper": "process"}


@pytest.mark.parametrize(
    "change", [{"attempt": "one"}, {"state": "walking"}, {"updated": "yesterday"}, {"reason": None}]
)
def test_a_damaged_file_is_named(tmp_path, change):
    (tmp_path / "status.json").write_text(json.dumps(WHOLE | change))
    with pytest.raises(StoreError, match="is damaged"):
        status.read(tmp_path)


@pytest.mark.parametrize("state", [State.queued, State.running])
def test_what_needs_a_living_process_is_lost_without_one(tmp_path, state):
    put(tmp_path, state, host="here", pid=1)  # process 1 lives, and is not ours: ids prove nothing
    found = status.effective(tmp_path)
    assert (found.state, found.reason) == (State.lost, "its process on here is gone")
    assert status.read(tmp_path).state is state, "looking writes nothing"
    lock = Lock.acquire(tmp_path / ".lock")
    assert status.effective(tmp_path).state is state
    lock.release()


@pytest.mark.parametrize("state", [State.preempted, State.done, State.failed, State.cancelled, State.lost])
def test_what_has_ended_is_believed(tmp_path, state):
    put(tmp_path, state)
    assert status.effective(tmp_path).state is state


def test_it_ended_while_we_looked(tmp_path, monkeypatch):
    """The owner writes `done` and lets go of its lock between our read of the one and of the other; or SLURM does."""
    put(tmp_path, State.running)
    monkeypatch.setattr(status, "is_held", lambda _: bool(put(tmp_path, State.done)) and False)
    assert status.effective(tmp_path).state is State.done
    put(tmp_path, State.running, keeper=Keeper.slurm, job="7")

    def gone(_):
        put(tmp_path, State.done, keeper=Keeper.slurm, job="7")
        return State.lost, "SLURM no longer knows job 7"

    assert status.effective(tmp_path, gone).state is State.done


def test_jobs_are_asked_of_the_scheduler_and_believed_without_one(tmp_path):
    put(tmp_path, State.running, keeper=Keeper.slurm, job="7_1")
    assert status.effective(tmp_path).state is State.running
    assert status.effective(tmp_path, lambda _: None).state is State.running
    found = status.effective(tmp_path, lambda known: (State.failed, f"job {known.job} OUT_OF_MEMORY"))
    assert (found.state, found.reason) == (State.failed, "job 7_1 OUT_OF_MEMORY")


def test_the_jobs_number_is_added_without_touching_what_the_job_did_meanwhile(tmp_path):
    put(tmp_path, State.queued, keeper=Keeper.slurm, submission="ab")
    status.note_job(tmp_path, 0, "7_1")
    assert (status.read(tmp_path).job, status.read(tmp_path).reason) == ("7_1", "in SLURM's queue as job 7_1")
    put(tmp_path, State.failed, keeper=Keeper.slurm)
    status.note_job(tmp_path, 0, "7_2")
    assert (status.read(tmp_path).job, status.read(tmp_path).reason) == ("7_2", "because")
    put(tmp_path, State.running, attempt=1)
    status.note_job(tmp_path, 0, "7_3")
    assert status.read(tmp_path).job == ""
