"""Plans against what the meters count in real steps: bytes kept and sent to the byte, the peak within 5 %."""

from __future__ import annotations

import statistics
from collections import Counter
from functools import cache
from typing import Any

import pytest

from harness.plan import kept, wire
from harness.plan.peak import Step
from harness.plan.planned import plan, planned
from tests.plan.cells import ALONE, CELLS, FP8, HYBRID, OTHERS, TENSOR, Cell
from tests.plan.measured import Measured, measure
from tests.support.composing import compose
from tests.support.mutants import Slip, each as each_mutant
from tests.support.spawn import run_ranks

OFF = 0.05
VISIT = 10
"""Cells that the same ranks run one after another."""
FEW = {*ALONE[:3], *HYBRID[:2], *TENSOR[:2], *FP8[:1], *OTHERS[:1], *OTHERS[-1:]}
"""For `make test`."""


@cache
def visit(cells: tuple[Cell, ...]) -> dict[Cell, list[Measured]]:
    rows = run_ranks(measure, cells[0].ranks, [cell.overrides for cell in cells])
    return dict(zip(cells, (list(row) for row in zip(*rows, strict=True)), strict=True))


def measured(cell: Cell) -> list[Measured]:
    alike = [each for each in CELLS if each.ranks == cell.ranks and (each in FEW) == (cell in FEW)]
    place = alike.index(cell) // VISIT * VISIT
    return visit(tuple(alike[place : place + VISIT]))[cell]


@cache
def plan_of(cell: Cell) -> dict[str, Any]:
    return plan(compose(cell.overrides).typed)


def kept_as_accounted(made: dict[str, Any]) -> dict[str, int]:
    kept = dict(made["kept"])
    kept["buffers"] += kept.pop("fp8_scales")
    return {role: num_bytes for role, num_bytes in kept.items() if num_bytes}


def sent_by_kind(made: dict[str, Any]) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {}
    for kinds in made["wire"].values():
        for kind, amounts in kinds.items():
            found.setdefault(kind, Counter()).update(amounts)
    return {kind: dict(amounts) for kind, amounts in found.items()}


PARAMS = [pytest.param(cell, id=str(cell), marks=() if cell in FEW else pytest.mark.full) for cell in CELLS]


def test_there_are_forty_cells() -> None:
    assert len(set(CELLS)) >= 40


@pytest.mark.parametrize("cell", PARAMS)
def test_bytes_kept_and_sent_are_those_of_a_real_step(cell: Cell) -> None:
    first, made = measured(cell)[0], plan_of(cell)
    assert kept_as_accounted(made) == {role: num_bytes for role, num_bytes in first.kept.items() if num_bytes}
    assert sent_by_kind(made) == first.sent


@pytest.mark.parametrize("cell", [each for each in PARAMS if each.values[0] not in FP8])
def test_the_peak_is_that_of_a_real_step(cell: Cell) -> None:
    peak = plan_of(cell)["peak"]
    held = statistics.median(each.peak for each in measured(cell))
    assert sum(peak["parts"].values()) == peak["total"]
    assert peak["total"] == pytest.approx(held, rel=OFF), peak


def test_what_would_be_a_guess_is_left_out() -> None:
    made = plan_of(FP8[0])
    assert made["peak"] is None
    assert "dtype.fp8=current" in made["left_out"]["peak"]
    odd = plan(compose(("model=odd", "data=synthetic", "launch.dry_run=true")).typed)
    assert (odd["peak"], odd["wire"], sum(odd["kept"].values()) > 0) == (None, None, True)


def test_an_engine_without_a_plan_is_refused() -> None:
    cell = compose(("engine=fsdp2", "data=synthetic", "launch.dry_run=true"))
    assert planned(cell.config) == {"refused": "engine=fsdp2 is not planned; valid: engine=native"}


AREA = "Plans of memory and traffic"
SLIPS = {
    "padding counted as weights": Slip(
        kept, "tensors", "cuts.param_numel(on) *", "cuts.numel(on) *", "Padding is counted with the buffer that has it"
    ),
    "runs of moments": Slip(
        kept, "_moments", "layout.param_numel_on(rank)", "layout.shard_numel", "Moments are counted with their padding"
    ),
    "the last unit gathered twice": Slip(
        wire.Gathers,
        "of",
        "return 1 if unit is self.last",
        "return 2 if unit is self.last",
        "The unit that a forward ends with is gathered again for the backward",
    ),
    "own chunk is sent": Slip(
        wire.Traffic,
        "_contributed",
        "return (total - sum(part.cut.sizes[0] for part in parts))",
        "return (total)",
        "A reduction sends a rank's own chunk to itself",
    ),
    "gathers to itself": Slip(
        wire.Traffic, "_gathered", "(size - 1)", "size", "An all-gather sends a shard to its owner, too"
    ),
    "all units ahead": Slip(
        Step, "_unshard", "len(self.on_way) < self.prefetch", "True", "Every unit is gathered ahead of the first"
    ),
    "gradients of every unit": Slip(
        Step,
        "_make_room",
        "len(self.in_flight) >= MAX_UNITS",
        "len(self.in_flight) > 99",
        "Unreduced gradients of more than two units wait",
    ),
}


WEIGHTY = Cell(3, 1, ("model.num_layers=8", "data.seq_len=8", "model.vocab_size=32"))
"""Of whose peak weights and gradients are most."""


@pytest.mark.parametrize("name", each_mutant(AREA, ((name, slip.breaks) for name, slip in SLIPS.items())))
def test_a_wrong_formula_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = visit((WEIGHTY,))[WEIGHTY]

    def agrees() -> bool:
        made, first = plan(compose(WEIGHTY.overrides).typed), found[0]
        kept_alike = kept_as_accounted(made) == {role: held for role, held in first.kept.items() if held}
        held = statistics.median(each.peak for each in found)
        return kept_alike and sent_by_kind(made) == first.sent and made["peak"]["total"] == pytest.approx(held, rel=OFF)

    assert agrees()
    SLIPS[name].put(monkeypatch)
    assert not agrees()
