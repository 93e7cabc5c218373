"""What sbatch is given and what becomes of its answer; commands that print what they were given stand for SLURM's."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
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
from tests.support.mutants import finds

Submit = Callable[..., list[str]]
TAKEN = "Submitted batch job 7"
TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    """Submits two cells to a `sbatch` that runs `answer`."""
    commands = tmp_path / "bin"
    commands.mkdir()
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setattr(submission, "code_copy", lambda root, take: tmp_path)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(name)

    def answering(answer: str, code: str = "x", told: list[str] | None = None) -> list[str]:
        for name, text in {"sbatch": answer, "squeue": "", "scontrol": "exit 1", "sinfo": "exit 1"}.items():
            (commands / name).write_text(f"#!/bin/sh\n{text}\n")
            (commands / name).chmod(0o755)
        cells = [make_cell(tmp_path, "cluster.backend=slurm", f"train.replicate={n}") for n in (0, 1)]
        sources = Sources({"sources_digest": code}, "")
        hear = [].append if told is None else told.append
        return submission.submit_cells(
            Store(tmp_path), cells, sources, None, on_decision=lambda _, decision: hear(decision.why)
        )

    return answering


def states(root: Path) -> list[tuple[State, str]]:
    found = [run.status() for run in Store(root).runs()]
    return [(status.state, status.job) for status in found if status is not None]


@pytest.mark.parametrize("answer", [f"echo '{TIMED_OUT}' >&2; exit 1", "echo 'the site greets you'"])
def test_without_an_answer_nothing_is_called_failed(submit: Submit, tmp_path: Path, answer: str) -> None:
    """The controller may still take it: the next look finds the job by its name, or knows that there is none."""
    with pytest.raises(StoreError, match="sbatch had no answer"):
        submit(answer)
    assert states(tmp_path) == [(State.queued, "")] * 2


def test_a_refusal_is_a_failure_in_the_words_of_sbatch(
    submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Said once, by whoever catches the error; a full disk is no refusal."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StoreError, match="Invalid account"):
        submit("echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1")
    assert states(tmp_path) == [(State.failed, "")] * 2
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(submission, "write_tasks", full)
    with pytest.raises(StoreError, match=r"not submitted: .*No space left on device"):
        submit(f"echo {TAKEN}")
    assert states(tmp_path) == [(State.failed, "")] * 2


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


test_a_mutant_is_found = finds(
    "slurm",
    test_steps_that_are_not_gone_on_with_are_told="""
        from step 0 without a word: Lost steps are not told of
            launch.slurm.submission.submit_cells: decision.action is not Action.start => not decision.starts
    """,
    test_without_an_answer_nothing_is_called_failed="""
        answer lost: Jobs that SLURM may have taken are called failed
            launch.slurm.submission._not_submitted: isinstance(error, NoAnswer) or =>
            (answer="echo hello")
    """,
)
