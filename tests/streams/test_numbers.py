"""What the engine computes where work is queued, on a CPU that it takes for a device with streams."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest

from harness.fsdp.runtime.readiness import Readiness
from tests.fsdp.random_programs import MESHES, Program, Record, draw
from tests.fsdp.test_properties import IN_CI, train_all, wrong
from tests.streams.recorder import Recorder, believing_in
from tests.support.covering import once
from tests.support.mutants import kills
from tests.support.spawn import run_ranks

IN_SHORT = 5
"""Place of the mesh whose programs `make test` runs."""


REUSED = 17
"""Number of a program in bf16 with a unit that is called several times."""


def on_streams(rank: int, programs: list[Program], *, mutant: bool = False) -> list[Record]:
    once_each = mock.patch.object(Readiness, "is_due_once", property(lambda _: True, lambda *_: None), create=True)
    with believing_in(Recorder().cuda), once_each if mutant else nullcontext():
        return train_all(rank, programs)


@once
def records(place: int) -> dict[int, list[Record]]:
    """Number -> record by rank, of all programs of one mesh."""
    programs = [draw(index) for index in range(place, IN_CI, len(MESHES))]
    per_rank = run_ranks(on_streams, programs[0].world, programs)
    return {program.index: [of_rank[i] for of_rank in per_rank] for i, program in enumerate(programs)}


@pytest.mark.parametrize(
    "index",
    [pytest.param(i, marks=() if i % len(MESHES) == IN_SHORT else pytest.mark.full) for i in range(IN_CI)],
)
def test_random_programs_train_as_plain_torch_does_where_work_is_queued(index: int) -> None:
    """Models with weights of several dtypes, tied, lent to other units, and called several times, among others."""
    program = draw(index)
    assert not wrong(program, records(index % len(MESHES))[index]), program


@kills("The engine where work is queued", "all units wait", "Gradients of units called several times wait, too")
def test_a_mutant_is_found() -> None:
    program = draw(REUSED)
    per_rank = run_ranks(partial(on_streams, mutant=True), program.world, [program])
    assert "gradient" in wrong(program, [of_rank[0] for of_rank in per_rank])
