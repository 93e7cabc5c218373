"""A study on a real SLURM: submitted, preempted, failed, asked again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.config.compose import Cell
from harness.launch.slurm.scheduler import Scheduler
from harness.launch.submit import cancel, submit
from harness.launch.terminal import Terminal
from harness.launch.watch import rows
from harness.store import provenance, status
from harness.store.errors import StoreError
from harness.store.metrics import read_metrics
from harness.store.rundir import RunDir, Store
from harness.store.status import State
from tests.launch.cells import SMALL, make_cell
from tests.launch.test_kills import final_weights, numbers, state_of as state
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 80
REQUEST = [
    sys.executable,
    str(REPOSITORY / "run.py"),
    "data=synthetic",
    "cluster=slurm",
    "cluster.nodes=2",
    f"train.steps={STEPS}",
    *(text for text in SMALL if text.startswith(("model", "train"))),
    "data.seq_len=128",  # some ten milliseconds a step: time enough to be preempted in
]


def request(root: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Ask run.py for something on the cluster."""
    command = [*REQUEST, f"launch.root={root}", *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=REPOSITORY)


@pytest.fixture(autouse=True)
def clear(cluster: Cluster) -> Iterator[None]:
    """No test sees another's jobs."""
    yield
    cluster.clear()


def until(cluster: Cluster, condition: Callable[[], object], timeout_s: float = 240, pause_s: float = 0.2) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited too long\n{cluster.describe()}"
        time.sleep(pause_s)  # to ask SLURM takes a process


def job(run: RunDir) -> str:
    found = run.status()
    assert found is not None
    return found.job


def test_three_runs_over_two_nodes(cluster: Cluster, tmp_path):
    """Two are preempted, the array's last among them, and resume to the bits of the third; that one raises at first,
    is FAILED, and alone runs when asked again."""
    root = tmp_path / "the runs"
    study = ["-m", "study.name=three", "train.replicate=0,1,2"]
    cluster.hold()
    shown = request(root, *study, "launch.dry_run=true").stdout
    asked = request(root, *study)
    assert asked.returncode == 0, asked.stderr
    assert "submitted 3 cells" in asked.stdout
    runs = Store(root).runs("three")
    (script,) = root.glob("three/.submit/*/submission.sh")
    assert script.read_text() in shown, "a dry run shows what is submitted, to the letter"
    table = "\n".join(row.reason for row in rows(Store(root), "three", Scheduler()))
    assert f"SLURM job {job(runs[0])} is PENDING (PartitionDown)" in table
    assert {state(run) for run in runs} == {State.queued}
    assert len({job(run).partition("_")[0] for run in runs}) == 1, "one shape is one array"
    preempted, raising, last = runs
    assert last.path.name.rpartition("-")[0].endswith("-r2")
    raising.capture.write_text("a file where the run needs a folder")
    cluster.go()

    until(cluster, lambda: len(read_metrics(preempted.metrics)) >= 2)
    number = provenance.read(preempted.path)["environment"]["SLURM_JOB_ID"]
    signalling = threading.Thread(target=cluster.preempt, args=(number,))
    signalling.start()
    # The last element has the array's number as its JobId: its siblings' fates must not be taken for its own. It is
    # asked as soon as it listens: beside a request of ours, all of its steps may be done before we look again.
    until(cluster, lambda: state(last) is State.running)
    os.kill((last.status() or pytest.fail("no status")).pid, signal.SIGUSR2)

    signalling.join()
    until(cluster, lambda: state(preempted) is State.preempted)
    cut = len(read_metrics(preempted.metrics))
    assert cut < STEPS
    until(cluster, lambda: cluster.job_states()[job(preempted)] == "PENDING")
    waiting = status.effective(preempted.path, Scheduler())
    assert waiting is not None
    assert waiting.state is State.preempted
    plan = request(root, *study, "launch.dry_run=true").stdout
    assert f"{preempted.path}\n    leave: preempted" in plan
    cluster.start_now(job(preempted))

    until(cluster, lambda: state(last) is State.preempted)
    facts = provenance.read(last.path)["environment"]
    assert facts["SLURM_JOB_ID"] == facts["SLURM_ARRAY_JOB_ID"]
    until(cluster, lambda: cluster.job_states()[job(last)] == "PENDING")
    cluster.start_now(job(last))
    until(cluster, lambda: all(state(run) is State.done for run in (preempted, last)))

    for run in (preempted, last):
        assert [line["step"] for line in read_metrics(run.metrics)] == list(range(1, STEPS + 1))
        assert run.attempts() == [0], "a requeue is the same attempt"

    assert state(raising) is State.failed
    until(cluster, lambda: cluster.job_states()[job(raising)] == "FAILED", 60)
    until(cluster, lambda: cluster.job_states()[job(last)] == "COMPLETED", 60)
    found = raising.status()
    assert found is not None
    assert found.reason.startswith("rank 0: FileExistsError")
    report = (raising.attempt_dir(0) / "error.txt").read_text()
    assert report.startswith("rank 0 failed first:\n\nTraceback")

    raising.capture.unlink()
    asked = request(root, *study)
    assert "submitted 1 cell as SLURM job" in asked.stdout
    assert asked.stdout.count(": done") == 2
    until(cluster, lambda: state(raising) is State.done)
    assert raising.attempts() == [0, 1]
    for run in (preempted, last):
        assert numbers(run) == numbers(raising)
        assert final_weights(run) == final_weights(raising)
        assert run.attempts() == [0]


def test_cancelled_while_it_waits_and_while_it_runs(cluster: Cluster, tmp_path):
    store = Store(tmp_path)
    cluster.hold()
    assert submit([slurm_cell(tmp_path, "train.replicate=0")], Terminal()) == 0
    (waiting,) = store.runs()
    assert cancel(store, waiting.path.name.rpartition("-")[2]) == 0
    assert state(waiting) is State.cancelled
    assert cluster.job_states()[job(waiting)] == "CANCELLED"
    cluster.go()
    assert submit([slurm_cell(tmp_path, "train.replicate=1", "train.steps=100000")], Terminal()) == 0
    running = next(run for run in store.runs() if run != waiting)
    until(cluster, lambda: len(read_metrics(running.metrics)) >= 3)
    cluster.ask("scancel", job(running))  # by hand: the same signal as a preemption, and yet no requeue
    until(cluster, lambda: cluster.job_states()[job(running)] == "CANCELLED", 20)
    until(cluster, lambda: state(running) is State.cancelled, 20)
    assert "SIGTERM received" in (running.status() or pytest.fail("no status")).reason


def test_a_crash_between_sbatch_and_bookkeeping_loses_no_job(cluster: Cluster, tmp_path, monkeypatch):
    """The submitter dies as soon as sbatch has answered; the next request finds the job by its name."""
    cluster.hold()
    before = set(cluster.job_states())

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(status, "note_job", die)
        with pytest.raises(KeyboardInterrupt):
            submit([slurm_cell(tmp_path)], Terminal())
    (run,) = Store(tmp_path).runs()
    (number,) = set(cluster.job_states()) - before
    assert job(run) == ""
    found = status.effective(run.path, Scheduler())
    assert found is not None
    assert (found.state, found.reason.split(" (")[0]) == (State.queued, f"SLURM job {number} is PENDING")
    assert submit([slurm_cell(tmp_path)], Terminal()) == 0
    assert set(cluster.job_states()) - before == {number}
    assert cancel(Store(tmp_path), str(run.path)) == 0
    assert cluster.job_states()[number] == "CANCELLED"
    cluster.go()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("cluster.additional.reservation=nowhere", "reservation is invalid"),
        ("cluster.partition=nowhere", "nvalid partition"),
        ("cluster.gpus_per_node=1", "sbatch refused: "),
    ],
)
def test_what_sbatch_refuses_is_failed_with_its_words(cluster: Cluster, tmp_path, words: str, told: str):
    with pytest.raises(StoreError, match=told):
        submit([slurm_cell(tmp_path, words)], Terminal())
    (run,) = Store(tmp_path).runs()
    assert state(run) is State.failed


def slurm_cell(root: Path, *overrides: str) -> Cell:
    return make_cell(root, "cluster.backend=slurm", "cluster.nodes=2", *overrides)
