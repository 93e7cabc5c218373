"""What the engine computes where work is queued, on a CPU that it takes for a device with streams."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from harness.fsdp.runtime.units import Readiness
from tests.fsdp.ordinary.judging import judge
from tests.fsdp.ordinary.program import Program, covering_seeds, draw
from tests.fsdp.ordinary.running import attempt, reference, run
from tests.fsdp.ordinary.source import text_of
from tests.streams.recorder import Recorder, believing_in
from tests.support.covering import once
from tests.support.mutants import kills

SEEDS = [seed for seed in covering_seeds() if "DroppedApart" not in draw(seed).pieces]
"""Ranks that are recorded cannot use different units: [Note: Apart, then together] of `meetings.py`."""
IN_SHORT = 6
"""`make test` runs one program of so many."""
REUSED = Program(pieces=("Looped",), units="linear", dtype="bf16", optimizer="sgd", strategy="optim_grads")
"""With units that are called several times."""


def on_streams(rank: int, program: Program, *, mutant: bool = False) -> Any:
    once_each = mock.patch.object(Readiness, "is_due_once", property(lambda _: True, lambda *_: None), create=True)
    with believing_in(Recorder().cuda), once_each if mutant else nullcontext():
        return attempt(rank, program)


@once
def outcomes(in_short: bool) -> dict[int, list[Any]]:
    """Seed -> outcome by rank."""
    seeds = SEEDS[::IN_SHORT] if in_short else SEEDS
    return dict(zip(seeds, run(on_streams, [draw(seed) for seed in seeds]), strict=True))


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=() if s in SEEDS[::IN_SHORT] else pytest.mark.full) for s in SEEDS]
)
def test_ordinary_programs_end_right_where_work_is_queued(seed: int) -> None:
    program = draw(seed)
    verdict = judge(program, outcomes(seed in SEEDS[::IN_SHORT])[seed], lambda: reference(program))
    assert verdict.kind in ("right", "refused"), f"{verdict.sentence}\n{text_of(program)}"


def apart(rank: int, mutant: bool) -> list[str]:
    """Weights that have other bits where work is queued."""
    plain, queued = attempt(rank, REUSED), on_streams(rank, REUSED, mutant=mutant)
    return [name for name, weight in plain.weights.items() if not torch.equal(weight, queued.weights[name])]


@kills("The engine where work is queued", "all units wait", "Gradients of units called several times wait, too")
def test_a_mutant_is_found() -> None:
    (right, *_), (wrong, *_) = run(apart, [False, True])
    assert not right
    assert wrong
