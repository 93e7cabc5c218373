"""What a rank does grows no faster than the number of units and parameters: hundreds, of a number each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from harness.fsdp import fully_shard, fully_shard_model
from harness.fsdp.runtime import units as runtime_units
from harness.fsdp.runtime.units import UnitPlan
from harness.fsdp.state import by_parameter, flat
from harness.fsdp.state.flat import SavedStretch
from harness.fsdp.storage.parameter_access import GRADIENT
from harness.fsdp.update.stretches import FlatStretch
from tests.fsdp.test_many_ranks import Lines, believing_in
from tests.support.mutants import each
from tests.support.spawn import run_ranks

FEW, MANY = 16, 128
"""Units. Every pair of hundreds is looked at where thousands are: 6,000 stretches took 69 s to load."""
RANKS = 4


class Name(str):
    """A parameter's name that counts with which others it is compared."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, str(other))

    __hash__ = str.__hash__


def work_of(units: int) -> dict[str, int]:
    """Lines run to plan units and to load what was saved; names that are compared to load an optimizer's state."""
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
        saved = model.local_state()
        with Lines() as lines:
            model.load_local_state(saved)
        found["its own state loaded"] = lines.count
        state, names_of = optimizer.state_dict(), by_parameter._names
        Name.compared = 0
        with mock.patch.object(by_parameter, "_names", lambda *args: map(Name, names_of(*args))):
            optimizer.load_state_dict(state)
        found["its optimizer's state loaded"] = Name.compared
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


def _every_pair(saved: Any, stretches: Any) -> list[tuple[SavedStretch, FlatStretch]]:
    every = list(stretches)
    return [(one, stretch) for one in saved for stretch in every if _overlap(one, stretch)]


def _overlap(saved: SavedStretch, stretch: FlatStretch) -> bool:
    place = stretch.stretch
    return saved.where == flat._where(stretch) and saved.begin < place.end and place.start < saved.end


MUTANTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "every rest": (
        "Elements of all units that follow are counted anew for each unit",
        lambda: mock.patch.object(runtime_units, "_joined", _every_rest),
    ),
    "every pair": (
        "Each stretch that was saved is compared with each of the optimizer's",
        lambda: mock.patch.object(flat, "overlapping", _every_pair),
    ),
    "every name": (
        "Each entry's name is looked for in the list of all names",
        lambda: mock.patch.object(by_parameter, "frozenset", list, create=True),
    ),
}


def _with_mistake(rank: int, name: str) -> list[str]:
    with MUTANTS[name][1]():
        return _growing(rank)


@pytest.mark.parametrize("name", each("What work costs with many units", [(n, m[0]) for n, m in MUTANTS.items()]))
def test_what_grows_faster_than_the_units_is_found(name: str) -> None:
    assert len(run_ranks(_with_mistake, 1, name, apart=True)[0]) == 1


def _sets_of_names(rank: int) -> int:
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(FEW)))
    with believing_in(RANKS):
        model = fully_shard_model(module, fsdp_unit_modules=[nn.Linear])
        found = len({id(getattr(param, GRADIENT).names) for param in model.module.parameters()})
        model.close()
    return found


def test_parameters_share_one_set_of_their_names() -> None:
    """One each is the square of thousands: gigabytes."""
    assert run_ranks(_sets_of_names, 1, apart=True) == [1]
