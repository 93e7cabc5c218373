"""Runs that are long, that are interrupted, or whose ranks see other parts of a model."""

from __future__ import annotations

import logging
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from harness.capture import parts, run as runs
from harness.capture.parts import FOLDER
from harness.parity.compare import compare
from harness.parity.outcome import Outcome
from harness.parity.record import Record, load
from harness.store.check_stream import BYTES
from harness.store.metrics import read_metrics
from tests.capture import loops
from tests.capture.loops import made
from tests.support.mutants import finds
from tests.support.spawn import run_ranks

# -- cadence -----------------------------------------------------------------------------------------------------------


def looks_seldom(folder: Path) -> None:
    """Neighbours are looked at where each step is too dear, and the verdict claims no more."""
    cadence: dict[str, Any] = {"steps": 20, "share": 0.0}
    paths = [made(folder / "study" / layout, layout, **cadence) for layout in ("fsdp2", "ddp", "single")]
    for path in paths:
        stream = load(path).stream
        assert stream is not None
        assert [step for step, looked in enumerate(stream.looked, start=1) if looked] == [*range(1, 11), 16, 17]
        assert len(read_metrics(path / "metrics.jsonl")) == 20
    equal, equivalent = (compare(paths[0], other) for other in paths[1:])
    assert equal.outcome is Outcome.EQUAL, equal.sentence
    assert equivalent.outcome is Outcome.EQUIVALENT, equivalent.sentence
    assert "every step" not in equivalent.sentence


def sees_what_moved_between(folder: Path) -> None:
    """A weight that is moved in a step that nobody looked at is seen by the next loss, and not called right."""
    arm = made(
        folder / "study" / "arm", steps=20, share=0.0, after_update=partial(loops.moved, "blocks.1.down.weight", 12)
    )
    verdict = compare(arm, made(folder / "study" / "control", steps=20, share=0.0))
    assert verdict.outcome is Outcome.UNDECIDED, verdict.sentence
    assert "at step 13, " in verdict.sentence


def stays_below_its_limit(folder: Path) -> None:
    """The cadence doubles each time that a rank's rows have taken so much disk."""
    folder.joinpath("study").mkdir(parents=True)
    run_ranks(limited, 1, folder / "study" / "limited")
    record = load(folder / "study" / "limited")
    assert record.problems == ()
    assert record.length == 40
    assert record.stream is not None
    looked = [step for step, seen in enumerate(record.stream.looked, start=1) if seen]
    assert 14 < len(looked) < 26
    assert looked[-1] - looked[-2] > 3 or looked[-2] - looked[-3] > 3


def limited(rank: int, path: Path) -> None:
    with mock.patch.object(runs, "ROWS_BYTES", 12 * 10 * BYTES * sum(parts.WIDTHS.values())):
        loops.train(rank, "single", path, steps=40)


def rotates(folder: Path) -> None:
    """The first captured step and the last two are on disk, and what they hold is what a run without a limit holds."""
    rotated, whole = (captured(folder / "study" / f"keep {keep}", keep) for keep in (2, 0))
    assert rotated.captures.keys() == {1, 21, 25}
    assert whole.captures.keys() == {*range(1, 26, 4)}
    assert compare(rotated.path, whole.path).outcome is Outcome.EQUAL
    for step, capture in rotated.captures.items():
        assert capture.tensors.keys() == whole.captures[step].tensors.keys()


def captured(path: Path, keep: int) -> Record:
    lying: list[int] = []
    count: loops.Event = lambda *_: lying.append(len(parts.captures_of(parts.folder_of(path, 0))))  # noqa: E731
    loops.train(0, "single", path, steps=27, captures=range(1, 100, 4), keep_last=keep, after_update=count)
    assert not keep or max(lying) <= 2 + keep, "one is being written"
    record = load(path)
    assert record.problems == ()
    return record


# -- attempts ----------------------------------------------------------------------------------------------------------


def interrupted(folder: Path, layout: str = "fsdp2", **keywords: Any) -> Path:
    """A run that was killed after step 9, and went on from its checkpoint of step 6."""
    path, ranks = folder / "study" / "interrupted", loops.LAYOUTS[layout].ranks
    run_ranks(partial(loops.train, steps=9, kept=folder), ranks, layout, path)
    assert not (path / "summary.json").exists()
    run_ranks(partial(loops.train, begin=6, kept=folder, **keywords), ranks, layout, path)
    return path


@pytest.mark.parametrize("layout", ["fsdp2"])
def test_one_run_over_two_attempts_is_the_run_that_nobody_interrupted(layout: str, tmp_path: Path) -> None:
    path = interrupted(tmp_path, layout)
    assert load(path).problems == ()
    assert [line["step"] for line in read_metrics(path / "metrics.jsonl")] == [*range(1, loops.STEPS + 1)]
    assert not (path / FOLDER).exists()
    verdict = compare(path, made(tmp_path / "study" / "through", layout))
    assert verdict.outcome is Outcome.EQUAL, verdict.sentence


def sees_a_wrong_resume(folder: Path) -> None:
    verdict = compare(interrupted(folder, forgets=True), made(folder / "study" / "through", "ddp"))
    assert verdict.outcome is Outcome.DIFFERENT, verdict.sentence
    assert "at step 7, " in verdict.sentence


# -- hot training ------------------------------------------------------------------------------------------------------


def hot(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=60 * lr)


def clean_and_hot(folder: Path) -> None:
    """Of ten batches those of a seed by which one element's first update takes part of another sign."""
    paths = [made(folder / "study" / name, name, optimizer=hot, seed=10) for name in ("single", "ddp", "fsdp2_tp")]
    for arm, control in combinations(paths, 2):
        verdict = compare(arm, control)
        assert verdict.outcome in (Outcome.EQUAL, Outcome.EQUIVALENT), verdict.sentence


test_a_mutant_is_found = finds(
    "Capture of another program",
    looks_seldom="""
        neighbours: Neighbours are not seen
            probe.step_checks.cadence.Cadence.looks: step % self.every < 2 => step % self.every < 1
        rows: A step has the row of the one before
            capture.merge.Rank.seen: self.rows[row, => self.rows[row - 1,
        share: A run looks for the usual share of time, whatever it was given
            capture.run.Run._cadence: self._share => 0.02
    """,
    stays_below_its_limit="""
        disk: Sketches grow without a limit
            probe.step_checks.cadence.Cadence.thin: max(4, 2 * self.every) => self.every
    """,
    rotates="""
        rotation: The first step's tensors go, too
            capture.parts.Part._write: [1 : -self._keep_last] => [: -self._keep_last]
        rotation of many: Whole tensors of every captured step stay
            capture.parts.Part._write: [1 : -self._keep_last] => [1:1]
    """,
    sees_what_moved_between="",
    sees_a_wrong_resume="",
    test_one_run_over_two_attempts_is_the_run_that_nobody_interrupted="""
        attempts: Steps behind the checkpoint stay in the record
            capture.merge.cut: part.lines[:done] => part.lines
            (layout="single")
    """,
    clean_and_hot="""
        first update: One sign of Adam's is a fault
            parity.tiers.divergence.first_update: float(slope[0]) => 0.0 * float(slope[0])
    """,
)


@pytest.mark.parametrize(
    ("steps", "done", "told"),
    [
        (9, 10, "holds 9 steps: it cannot go on behind 10"),
        (0, 6, "holds no run that can go on"),
        (loops.STEPS, 0, "holds a run already"),
    ],
    ids=["too late", "nothing there", "whole"],
)
def test_a_record_that_cannot_go_on_is_left_alone(
    steps: int, done: int, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "study" / "run"
    if steps:
        made(path, steps=steps, kept=tmp_path)
    kept = {each: each.read_bytes() for each in path.rglob("*") if each.is_file()}
    with caplog.at_level(logging.WARNING, "harness.capture"):
        made(path, done=done, steps=3)
    assert told in caplog.text
    assert {each: each.read_bytes() for each in path.rglob("*") if each.is_file()} == kept


def test_another_torch_in_a_later_attempt_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "study" / "run"
    made(path, steps=9, kept=tmp_path)
    monkeypatch.setattr("harness.store.provenance.versions", lambda: {"torch": "1.0"})
    made(path, begin=6, kept=tmp_path)
    assert any("goes on with other versions" in problem for problem in load(path).problems)


# -- traffic, and writing beside the training --------------------------------------------------------------------------


def test_collectives_are_counted_by_kind(tmp_path: Path) -> None:
    """Bytes of a step, by the formulas of the meter; none of them are this package's own."""
    size = 4 * sum(param.numel() for param in loops.Net().parameters())
    for layout, kinds in {"ddp": {"all_reduce": size}, "fsdp2": {"reduce_scatter": size // 2}}.items():
        line = read_metrics(made(tmp_path / "study" / layout, layout, steps=3) / "metrics.jsonl")[-1]
        for kind, num_bytes in kinds.items():
            assert num_bytes <= line["comm"][kind]["bytes"] < 1.1 * num_bytes
    assert line["comm"]["all_gather"]["count"] == 5, "three units, two of them twice"


# -- pipelines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_stages_of_a_pipeline_are_one_run(schedule: str, tmp_path: Path) -> None:
    path = tmp_path / "study" / schedule
    watched, alone = (run_ranks(loops.piped, 2, schedule, each) for each in (path, None))
    assert watched == alone
    record = load(path)
    assert record.problems == ()
    assert record.captures[1].tensors.keys() == load(made(tmp_path / "study" / "one")).captures[1].tensors.keys()
    verdict = compare(path, tmp_path / "study" / "one")
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.sentence
