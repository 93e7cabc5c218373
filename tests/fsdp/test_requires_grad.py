"""`requires_grad` may change between steps: what is frozen is left alone and what is unfrozen again is trained, as on
one process, under all strategies and hybrids. What was frozen when it was sharded stays so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from harness.fsdp import fully_shard_model
from harness.fsdp.runtime import backward_hooks
from tests.fsdp.checked import Mutant, each_holds, each_is_found, patched, said
from tests.fsdp.freezing import (
    FREEZING,
    WIDTH,
    Net,
    Part,
    Trial,
    data,
    difference,
    differences,
    fp32,
    fp64,
    run_plain,
    set_trained,
    sharded,
)
from tests.fsdp.pairs import PAIRS, Pair
from tests.support.covering import Cover

WORLD = 4
MANY = (
    "gan",
    "one frozen in turn",
    "adapters alone",
)
"""Programs that run with one microbatch a step and with two."""
TRIALS = Cover(
    (
        Trial(pair, program, k, fp32 if exact else fp64, (("numerics", "exact"),) if exact else more)
        for pair, program, k, exact, more in itertools.product(
            PAIRS,
            FREEZING,
            (1, 2),
            (False, True),
            ((), (("numerics", "ordered"),), (("grad_buffer", "concat"),), (("offload_optimizer", True),)),
        )
        if k == (2 if "between" in program else 1) or program in MANY
    ),
    values=lambda trial: (trial.pair.inner, trial.pair.outer, trial.program, trial.k, trial.more),
)


@pytest.mark.parametrize("trial", TRIALS.params())
def test_what_is_frozen_is_left_alone_and_what_is_unfrozen_is_trained(trial: Trial) -> None:
    trials = TRIALS.batch(trial)
    right = run_plain(trial.program, trial.k).references
    for ran in sharded(trials):
        found = ran[trials.index(trial)]
        assert difference(found, trial) == ""
        assert all(torch.allclose(a.double(), b, atol=1e-6) for a, b in zip(found.references[:1], right, strict=False))


# -- what cannot be ----------------------------------------------------------------------------------------------------


def refused(rank: int, strategy: str) -> list[str]:
    """What was frozen when it was sharded cannot be trained; the step after, with it frozen again, is as ever."""
    module = Net()
    set_trained([module.entry, module.parts], False)
    model = fully_shard_model(module, fsdp_unit_modules=[Part], zero_dp_strategy=strategy)

    def step() -> None:
        model(data(0, rank).float()).sum().backward()

    told = []
    for part in (module.entry, module.parts[1]):
        part.requires_grad_(True)
        told += said(step, RuntimeError, "was frozen when it was sharded", "freeze afterwards")
        part.requires_grad_(False)
        model.zero_grad()
        step()
        model.zero_grad()
    model.close()
    return told


def parted(rank: int, strategy: str) -> list[str]:
    """Ranks that begin with other flags, or other shapes, are told on every rank."""
    frozen = Net()
    frozen.parts[min(rank, 1)].requires_grad_(False)
    told = said(
        lambda: fully_shard_model(frozen, zero_dp_strategy=strategy),
        Exception,
        "parts.0.linear.weight is float32 [6, 6] frozen on rank 0, float32 [6, 6] trained",
    )
    other = nn.Linear(WIDTH, WIDTH + (rank > 0))
    words = "float32 [6, 6] trained on rank 0, float32 [7, 6] trained on rank"
    return told + said(lambda: fully_shard_model(other, zero_dp_strategy=strategy), Exception, words)


CHECKS: dict[str, Callable[[int, str], list[str]]] = {each.__name__: each for each in (refused, parted)}
test_what_cannot_be_is_said_on_every_rank = each_holds(__name__, CHECKS)


# -- mutants -----------------------------------------------------------------------------------------------------------

_arrived = backward_hooks.BackwardHooks._gradient_arrived


def _takes_all(self: Any, unit: Any, gradients: Any, index: int, name: str, param: nn.Parameter) -> None:
    frozen = not param.requires_grad
    param.requires_grad_(True)
    if frozen:
        param.grad = torch.zeros_like(param)
    _arrived(self, unit, gradients, index, name, param)
    param.requires_grad_(not frozen)


ZERO2 = Pair("optim_grads", "")
MUTANTS = {
    "frozen ones bring zeros": Mutant(
        "A parameter that was frozen between forward and backward got a gradient of zero",
        patched(backward_hooks.BackwardHooks, "_gradient_arrived", _takes_all),
        differences,
        Trial(ZERO2, "freezing after the forward"),
    ),
    "unfreezing is not seen": Mutant(
        "What was frozen when it was sharded brings a gradient that nobody takes",
        patched(backward_hooks, "unfrozen_too_late", lambda _: None),
        "refused",
    ),
}
test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "The engine, by what programs freeze")
