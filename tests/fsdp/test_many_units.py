"""What a rank does grows no faster than the number of units and parameters: hundreds, of a number each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from harness.fsdp import fully_shard
from harness.fsdp.runtime import units as runtime_units
from harness.fsdp.runtime.units import UnitPlan
from tests.fsdp.test_many_ranks import Lines, believing_in
from tests.support.mutants import each
from tests.support.spawn import run_ranks

FEW, MANY = 16, 128
"""Units."""
RANKS = 4


def work_of(units: int) -> dict[str, int]:
    """Lines run to plan units, in a step, and to load what was saved."""
    module = nn.Sequential(*(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2, bias=False)) for _ in range(units)))
    optimizer = torch.optim.AdamW(module.parameters())
    found = {}
    with believing_in(RANKS):
        with Lines() as lines:
            runtime_units.plan_units(module, [nn.Sequential], 0)
        found["planned"] = lines.count
        model, optimizer = fully_shard(module, optimizer, fsdp_unit_modules=[nn.Sequential])
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        with Lines() as lines:
            optimizer.step()
        found["stepped"] = lines.count
        saved = model.state_dict()
        with Lines() as lines:
            model.load_state_dict(saved)
        found["its own state loaded"] = lines.count
        model.close()
    return found


def _growing(_: int) -> list[str]:
    """What takes more than so many times the work with so many times the units."""
    few, many = work_of(FEW), work_of(MANY)
    return [
        f"{what}: {few[what]} with {FEW} units, {many[what]} with {MANY}"
        for what in few
        if many[what] > 1.2 * few[what] * MANY / FEW
    ]


def test_work_grows_no_faster_than_the_units() -> None:
    assert run_ranks(_growing, 1, apart=True)[0] == []


def _every_rest(plans: Any, min_elements: int) -> list[UnitPlan]:
    found: list[UnitPlan] = []
    for index, unit in enumerate(plans):
        left = sum(each.numel for each in plans[index:])
        if found and (found[-1].numel < min_elements or left < min_elements):
            runtime_units._join(found[-1], unit)
        else:
            found.append(unit)
    return found


MUTANTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "every rest": (
        "Elements of all units that follow are counted anew for each unit",
        lambda: mock.patch.object(runtime_units, "_joined", _every_rest),
    ),
}


def _with_mistake(rank: int, name: str) -> list[str]:
    with MUTANTS[name][1]():
        return _growing(rank)


@pytest.mark.parametrize("name", each("What work costs with many units", [(n, m[0]) for n, m in MUTANTS.items()]))
def test_what_grows_faster_than_the_units_is_found(name: str) -> None:
    assert len(run_ranks(_with_mistake, 1, name, apart=True)[0]) == 1
