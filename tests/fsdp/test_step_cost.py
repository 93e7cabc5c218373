"""What a step costs the host beside its arithmetic: Python calls grow with units and not with their square."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn

from harness.fsdp import fully_shard
from harness.fsdp.storage import gradients
from harness.fsdp.storage.parameter_access import by_engine
from tests.fsdp.checked import Mutant, each_holds, each_is_found, of_slips

FEW, MANY = 6, 24
"""Units."""
MOST = {"no_shard": 250, "optim": 272, "optim_grads": 303, "optim_grads_params": 372}
"""Calls of the engine's functions, for each further unit of two parameters, on one of two ranks. Only under `no_shard`
are they the same each time: elsewhere sums are made early where others have come already."""


STEPS = 6
"""After the first. The fewest calls of one of them count: a peer that is early or late adds some."""


def calls_of_step(rank: int, strategy: str, units: int) -> int:
    """Calls of the engine's Python functions in a step of a model of so many units."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(units)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = fully_shard(module, optimizer, fsdp_unit_modules=[nn.Sequential], zero_dp_strategy=strategy)
    count = waits = 0
    counts = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count, waits
        count += event == "call" and "/harness/fsdp/" in frame.f_code.co_filename

    for step in range(1 + STEPS):
        count = 0
        sys.setprofile(note if step else None)
        try:
            model(torch.full((2, 4), 1.0 + rank)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            sys.setprofile(None)
        counts.append(count)
    model.close()
    return min(counts[1:])


def growing(rank: int, strategy: str) -> list[str]:
    """Four times the units are at most four times the calls, and some more; and a unit more is no more than it was."""
    few, many = (calls_of_step(rank, strategy, units) for units in (FEW, MANY))
    found = [] if many <= 1.1 * few * MANY / FEW else [f"{few} calls with {FEW} units, {many} with {MANY}"]
    a_unit = (many - few) / (MANY - FEW)
    return found if a_unit <= MOST[strategy] else [*found, f"{a_unit:.1f} calls a unit, above {MOST[strategy]}"]


CHECKS: dict[str, Callable[[int, str], list[str]]] = {"growing": growing}


test_calls_of_a_step_grow_with_its_units = each_holds(__name__, CHECKS)


def _gradients_by_functions() -> ExitStack:
    """`.grad` is read and set by functions of Python."""
    patches = ExitStack()
    for name in ("grad_of", "put_grad"):
        patches.enter_context(mock.patch.object(gradients, name, by_engine(getattr(gradients, name))))
    return patches


MUTANTS = of_slips(
    r"""
    all units are asked: Each gather of a unit looks at all others
        fsdp.runtime.gather.GatherPipeline._has_room: return not
            => sum(map(self.is_whole, self.order))\n    return not
        growing
    """
) | {
    "gradients by functions": Mutant(
        "`.grad` of each parameter is read and set by functions of Python",
        _gradients_by_functions,
        "growing",
        "no_shard",
    ),
}


test_what_costs_too_much_is_found = each_is_found(__name__, MUTANTS, "What a step costs the host")
