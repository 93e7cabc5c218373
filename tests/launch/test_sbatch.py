"""What sbatch is given and what becomes of its answer; commands that print what they were given stand for SLURM's."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from harness.launch.opening import Sources, open_here
from harness.launch.slurm import submission
from harness.launch.submit import _Request
from harness.launch.terminal import Terminal
from harness.store import status
from harness.store.errors import StoreError
from harness.store.rundir import Store
from harness.store.status import State
from tests.launch.cells import make_cell
from tests.support.mutants import Slip, each

Submit = Callable[..., list[submission.Array]]
TAKEN = "Submitted batch job 7"
TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    """Submits two cells to a `sbatch` that runs `answer`; to a queue that holds both jobs if `queued`."""
    commands = tmp_path / "bin"
    commands.mkdir()
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setattr(submission, "code_copy", lambda root, take: tmp_path)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(name)

    def answering(
        answer: str, *overrides: str, queued: Sequence[int] = (), code: str = "x", told: list[str] | None = None
    ) -> list[submission.Array]:
        lines = "".join(f"7|{index}|PENDING|None||s-$1\\n" for index in queued)
        here = shlex.quote(str(tmp_path))
        texts = {
            "sbatch": f'env > {here}/environment\nbasename "$(dirname "$1")" > {here}/token\n{answer}',
            "squeue": f'set -- $(cat {here}/token 2>/dev/null)\nprintf "{lines}"',
            "scontrol": "exit 1",
            "sinfo": "exit 1",
        }
        for name, text in texts.items():
            (commands / name).write_text(f"#!/bin/sh\n{text}\n")
            (commands / name).chmod(0o755)
        cells = [make_cell(tmp_path, "cluster.backend=slurm", f"train.replicate={n}", *overrides) for n in (0, 1)]
        sources = Sources({"sources_digest": code}, "")
        hear = [].append if told is None else told.append
        return submission.submit_cells(
            Store(tmp_path), cells, sources, None, on_decision=lambda _, decision: hear(decision.why)
        )

    return answering


def states(root: Path) -> list[tuple[State, str]]:
    found = [run.status() for run in Store(root).runs()]
    return [(status.state, status.job) for status in found if status is not None]


def test_the_script_is_not_outvoted_by_variables(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch takes its variables before the lines of a script: a limit, an account, the name that a job is found by."""
    outvoting = ("JOB_NAME", "TIMELIMIT", "SIGNAL", "NO_REQUEUE", "ARRAY_INX", "WAIT", "ACCOUNT", "MEM_PER_NODE")
    for name in (*outvoting, "PARTITION", "CONSTRAINT"):
        monkeypatch.setenv(f"SBATCH_{name}", "mine")
    submit(f"echo {TAKEN}", "cluster.account=me", "cluster.mem_gb=1")
    given = (tmp_path / "environment").read_text()
    assert [name for name in outvoting if f"SBATCH_{name}=" in given] == []
    assert "SBATCH_PARTITION=mine" in given, "what no setting says, the site's variable may"
    assert "SBATCH_CONSTRAINT=mine" in given
    assert os.environ["SBATCH_JOB_NAME"] == "mine"
    script = next(tmp_path.rglob("submit.sh")).read_text()
    assert "--export=ALL" in next(line for line in script.splitlines() if line.startswith("srun"))


@pytest.mark.parametrize("queued", [(0, 1), (1,)], ids=["both", "one has ended"])
@pytest.mark.parametrize("answer", [f"echo '{TIMED_OUT}' >&2; exit 1", "echo 'the site greets you'"])
def test_jobs_that_slurm_took_without_saying_so_are_submitted(
    submit: Submit, tmp_path: Path, answer: str, queued: tuple[int, ...]
) -> None:
    (array,) = submit(answer, queued=queued)
    assert array.jobs == ("7_0", "7_1")
    assert {job for _, job in states(tmp_path)} == {"7_0", "7_1"}
    assert {state for state, _ in states(tmp_path)} == {State.queued}


def test_without_an_answer_nothing_is_called_failed(submit: Submit, tmp_path: Path) -> None:
    """The controller may still take it: the next look finds the job by its name, or knows that there is none."""
    with pytest.raises(StoreError, match="sbatch had no answer"):
        submit(f"echo '{TIMED_OUT}' >&2; exit 1")
    assert states(tmp_path) == [(State.queued, "")] * 2


def test_a_refusal_is_a_failure_in_the_words_of_sbatch(submit: Submit, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="Invalid account"):
        submit("echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1")
    assert states(tmp_path) == [(State.failed, "")] * 2


def test_a_refusal_is_said_once(submit: Submit, capfd: pytest.CaptureFixture[str]) -> None:
    """By whoever catches the error."""
    with pytest.raises(StoreError, match="Invalid account"):
        submit("echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1")
    assert capfd.readouterr() == ("", "")


def test_steps_that_are_not_gone_on_with_are_told(
    submit: Submit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After an edit a preempted run began at step 1 again, and nothing said so."""
    why = "lost before: x; the sources changed since, so from step 0"
    told: list[str] = []
    for code in ("x", "x", "y"):
        assert told == []
        submit(f"echo {TAKEN}", code=code, told=told)
        for run in Store(tmp_path).runs():
            status.note(run.path, state=State.lost, reason="x", job="")
            run.metrics.write_text("")
    assert told == [why, why]
    found = open_here(
        Store(tmp_path), make_cell(tmp_path, "train.replicate=1"), Sources({"sources_digest": "z"}, ""), None
    )
    assert isinstance(found, tuple)
    opened, lock = found
    lock.release()
    _Request([opened.cell], Terminal())._on_start(opened)
    assert capsys.readouterr().out == f"{opened.run.path}: {why}\n{opened.run.path}: 2 ranks, attempt 3\n"


def test_a_disk_error_is_not_called_a_refusal(submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(submission, "write_tasks", full)
    with pytest.raises(StoreError, match=r"not submitted: .*No space left on device"):
        submit(f"echo {TAKEN}")
    assert states(tmp_path) == [(State.failed, "")] * 2


MUTANTS = {
    "outvoted": (
        lambda submit, root, monkeypatch, _: test_the_script_is_not_outvoted_by_variables(submit, root, monkeypatch),
        Slip(
            submission, "sbatch_environment", " and _option(name) not in said", "", "Variables come before the script"
        ),
    ),
    "from step 0 without a word": (
        lambda submit, root, _, capfd: test_steps_that_are_not_gone_on_with_are_told(submit, root, capfd),
        Slip(
            submission,
            "submit_cells",
            "decision.action is not Action.start",
            "not decision.starts",
            "Lost steps are not told of",
        ),
    ),
    "answer lost": (
        lambda submit, root, *_: test_jobs_that_slurm_took_without_saying_so_are_submitted(
            submit, root, "exit 1", (0, 1)
        ),
        Slip(
            submission,
            "_taken",
            "[] if number is None else _numbers(number, count)",
            "[]",
            "Jobs that SLURM took are called failed",
        ),
    ),
    "some have ended": (
        lambda submit, root, *_: test_jobs_that_slurm_took_without_saying_so_are_submitted(
            submit, root, "exit 1", (1,)
        ),
        Slip(
            submission,
            "_taken",
            "if number is None",
            "if None in found",
            "An array of which an element has ended is called failed",
        ),
    ),
}


@pytest.mark.parametrize("name", each("slurm", [(name, slip.breaks) for name, (_, slip) in MUTANTS.items()]))
def test_mutants_are_found(
    name: str, submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    claim, slip = MUTANTS[name]
    slip.put(monkeypatch)
    with pytest.raises((AssertionError, StoreError)):
        claim(submit, tmp_path, monkeypatch, capfd)
