"""`requires_grad` may change between steps: what is frozen is left alone and what is unfrozen is trained, as on one
process, under all strategies and hybrids; ranks that disagree are told.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from harness.fsdp import ShardedModel, fully_shard_model, fully_shard_optimizer
from harness.fsdp.runtime import backward_hooks, trainability
from harness.fsdp.runtime.reduce import ReducePipeline
from harness.fsdp.runtime.trainability import Trainability
from harness.fsdp.storage.gradients import Gradients
from tests.fsdp.checked import Mutant, each_is_found, patched
from tests.fsdp.freezing import (
    FREEZING,
    WIDTH,
    Net,
    Part,
    Trial,
    all_but_head,
    data,
    difference,
    differences,
    fp32,
    fp64,
    run_plain,
    sharded,
)
from tests.fsdp.pairs import PAIRS, STRATEGIES, Pair
from tests.support.covering import Cover
from tests.support.spawn import run_ranks

WORLD = 4
MANY = ("gan", "one frozen in turn", "adapters alone", "unfreezing", "unfreezing by groups")
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


def sharded_net(strategy: str, **more: Any) -> tuple[ShardedModel, Net]:
    module = Net()
    all_but_head(module)
    return fully_shard_model(module, fsdp_unit_modules=[Part], zero_dp_strategy=strategy, **more), module


def told_by(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def step_of(model: ShardedModel, rank: int) -> None:
    model(data(0, rank).float()).sum().backward()


def refused(rank: int, strategy: str) -> dict[str, str]:
    found = {}
    model, module = sharded_net(strategy, double_buffer=True)
    module.entry.requires_grad_(True)
    found["double buffer"] = told_by(lambda: step_of(model, rank))
    module.entry.requires_grad_(False)
    found["frozen again"] = told_by(lambda: step_of(model, rank))
    model.close()
    model, module = sharded_net(strategy)
    module.parts[0].register_forward_pre_hook(lambda m, _: (m.requires_grad_(True), None)[1])
    found["inside"] = told_by(lambda: step_of(model, rank))
    model.zero_grad()
    found["afterwards"] = told_by(lambda: step_of(model, rank))
    model.zero_grad()
    out = model(data(0, rank).float())
    module.entry.requires_grad_(True)
    model(data(0, rank).float())
    found["an earlier graph"] = told_by(out.sum().backward)
    model.zero_grad()
    with model.unsharded():
        module.parts[1].requires_grad_(True)
        found["gathered"] = told_by(lambda: model(data(0, rank).float()))
    model.close()
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_cannot_get_storage_any_more_is_named(strategy: str) -> None:
    for found in run_ranks(refused, 2, strategy):
        assert found["frozen again"] == found["afterwards"] == ""
        assert "parameter entry.weight was frozen when it was sharded" in found["double buffer"]
        assert "under double_buffer" in found["double buffer"]
        assert "parts.0." in found["inside"]
        assert "Unfreeze before the model's forward" in found["inside"]
        assert "given other storage" in found["an earlier graph"]
        assert "parameter parts.1.linear.weight" in found["gathered"]
        assert "inside unsharded()" in found["gathered"]


def parted(rank: int, strategy: str) -> dict[str, str]:
    found = {}
    frozen = Net()
    frozen.parts[rank].requires_grad_(False)
    found["from the start"] = told_by(lambda: fully_shard_model(frozen, zero_dp_strategy=strategy))
    other = nn.Linear(WIDTH, WIDTH + rank)
    found["other shapes"] = told_by(lambda: fully_shard_model(other, zero_dp_strategy=strategy))
    model, module = sharded_net(strategy)
    step_of(model, rank)
    model.zero_grad()
    (module.entry if rank else module.parts[0]).requires_grad_(True)
    found["otherwise"] = told_by(lambda: step_of(model, rank))
    model.close()
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_freeze_otherwise_are_told_on_every_rank(strategy: str) -> None:
    ranks = run_ranks(parted, 2, strategy)
    assert ranks[0] == ranks[1]
    assert (
        "parts.0.linear.weight is float32 [6, 6] frozen on rank 0, float32 [6, 6] trained" in ranks[0]["from the start"]
    )
    assert "float32 [6, 6] trained on rank 0, float32 [7, 6] trained on rank 1" in ranks[0]["other shapes"]
    assert (
        "requires_grad differs between ranks: parameter entry.weight is frozen on rank 0, trained on rank 1"
        in (ranks[0]["otherwise"])
    )


def one_alone(rank: int, strategy: str) -> str:
    model, module = sharded_net(strategy, watchdog_timeout_s=1.0)
    step_of(model, rank)
    model.zero_grad()
    if rank == 0:
        module.head.bias.requires_grad_(False)

    def step() -> None:
        step_of(model, rank)
        model.finish_grad_sync()

    told = told_by(step)
    told_by(model.close)
    return told


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_that_freezes_alone_ends_in_an_error_on_every_rank(strategy: str) -> None:
    ranks = run_ranks(one_alone, 2, strategy)
    assert ranks[0] == ranks[1]
    assert ranks[0].startswith("CollectiveError")
    assert "requires_grad, which the program changed (head.bias is frozen now)" in ranks[0]


def narrow(rank: int, strategy: str) -> dict[str, Any]:
    """Weights of 16 bits that are unfrozen: what 30 small updates make of them, and what is sent without a change."""
    model, module = sharded_net(strategy)
    module = Net().bfloat16()
    all_but_head(module)
    model = fully_shard_model(module, fsdp_unit_modules=[Part], zero_dp_strategy=strategy)
    optimizer = fully_shard_optimizer(model, torch.optim.SGD(module.parameters(), lr=1e-5))
    before = dict(model.full_weights())
    module.requires_grad_(True)
    for _ in range(30):
        model(data(0, rank).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = dict(model.full_weights())
    kept = model.engine.persistent_bytes()
    model.close()
    return {"before": before, "after": after, "kept": kept}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unfrozen_16_bit_weights_get_main_weights(strategy: str) -> None:
    for found in run_ranks(narrow, 2, strategy):
        for name, weight in found["after"].items():
            assert weight.dtype is torch.float32
            assert not torch.equal(weight.bfloat16().float(), weight), name
            assert torch.allclose(weight, found["before"][name].float(), atol=0.02)
        assert found["kept"]["main_grads"] > 0


# -- mutants -----------------------------------------------------------------------------------------------------------

_arrived = backward_hooks.BackwardHooks._gradient_arrived


def _forgets_values(self: Any, dtypes: Any) -> None:
    self.dtypes, self.trainable = dtypes, True
    self._build(lambda name, shape: torch.zeros(shape))


def _together(*patches: Any) -> ExitStack:
    stack = ExitStack()
    for patch in patches:
        stack.enter_context(patch)
    return stack


def _takes_all(self: Any, unit: Any, gradients: Any, index: int, name: str, param: nn.Parameter) -> None:
    frozen = not param.requires_grad
    param.requires_grad_(True)
    if frozen:
        param.grad = torch.zeros_like(param)
    _arrived(self, unit, gradients, index, name, param)
    param.requires_grad_(not frozen)


def _fills(self: Gradients) -> None:
    self.allocate_sums()
    self.sums.fill_(1.0)


ZERO2, ZERO3 = Pair("optim_grads", ""), Pair("optim_grads_params", "")
MUTANTS = {
    "frozen ones bring zeros": Mutant(
        "A parameter that was frozen between forward and backward got a gradient of zero",
        patched(backward_hooks.BackwardHooks, "_gradient_arrived", _takes_all),
        differences,
        Trial(ZERO2, "freezing after the forward"),
    ),
    "unfreezing is not seen": Mutant(
        "What was frozen when it was sharded stays so",
        lambda: _together(
            mock.patch.object(Trainability, "_train"),
            mock.patch.object(backward_hooks, "unfrozen_too_late", return_value=None),
        ),
        differences,
        Trial(ZERO2, "unfreezing"),
    ),
    "unfrozen ones begin anew": Mutant(
        "What is unfrozen has the values of nobody",
        patched(trainability.ParamGroup, "train", _forgets_values),
        differences,
        Trial(ZERO3, "unfreezing and freezing"),
    ),
    "sums from nowhere": Mutant(
        "A bucket that comes late into a step adds to what its memory held",
        patched(Gradients, "begin_late", _fills),
        differences,
        Trial(ZERO2, "unfreezing between microbatches", 2),
    ),
    "late ones are not reduced": Mutant(
        "What is unfrozen is trained on each rank's own gradient",
        patched(ReducePipeline, "take_in"),
        differences,
        Trial(Pair("no_shard", ""), "unfreezing and freezing"),
    ),
}
test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "The engine, by what programs freeze")
