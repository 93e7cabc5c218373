"""megatron-fsdp's names for weights and dtypes: broadcast, initialised on the meta device, sent over another wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.fsdp import MegatronModel, MixedPrecisionPolicy, megatron
from harness.fsdp.build import Engine
from harness.fsdp.runtime import materialize
from harness.fsdp.storage.param_group import ParamGroup
from tests.fsdp.checked import RANKS, Mutant, holds, is_found
from tests.fsdp.megatron.models import adamw, differs, plainly, said, sharded, with_optimizer
from tests.fsdp.pairs import STRATEGIES, WIDTH, Model, data, loss_of, same
from tests.support.mutants import each


def broadcasting(rank: int, strategy: str) -> list[str]:
    """What the first rank typed into weights that all ranks keep is every rank's; shards that nobody else has stay."""
    told = []
    for dtype, policy in ((torch.float32, None), (torch.bfloat16, MixedPrecisionPolicy())):
        model = sharded(strategy, Model().to(dtype), mixed_precision_policy=policy)
        right = {name: value.clone() for name, value in model.full_weights()}
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1 + rank if strategy == "no_shard" else 1)
        right = {name: value + 1 for name, value in right.items()}
        model.broadcast_params()
        found = {name: value.float() for name, value in model.full_weights()}
        told += [f"{name} in {dtype}" for name in same(found, right)]
        everyone: list[Any] = [None] * RANKS
        dist.all_gather_object(everyone, model(data(0, 0).to(dtype)))
        told += [] if torch.equal(everyone[0], everyone[1]) else [f"the forward in {dtype}"]
    return told


class Attention(nn.Module):
    """torch's own, whose `_reset_parameters` sets a parameter of the module inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.attention(*[self.first(x)] * 3)[0])
        return y


def resetting(rank: int, strategy: str) -> list[str]:
    """A model on the meta device gets the numbers that an ordinary construction gives."""
    torch.manual_seed(5)
    right = dict(Attention().named_parameters())
    with torch.device("meta"):
        module = Attention()
    torch.manual_seed(5 + rank)
    where = {"init_model_with_meta_device": True, "device": torch.device("cpu")}
    model = sharded(strategy, module, fsdp_unit_modules=[nn.Linear, nn.MultiheadAttention], **where)
    return same(dict(model.full_weights()), {name: value.detach() for name, value in right.items()})


# -- dtypes ------------------------------------------------------------------------------------------------------------


class Partly(Model):
    """With a part that no forward uses, which decay must leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, WIDTH)


def rewiring(rank: int, strategy: str) -> list[str]:
    """Inside the context gradients are what another policy gives from the start, bit for bit; outside, as before."""

    def train(model: MegatronModel, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Tensor]:
        loss_of(model, data(step, rank)).backward()
        found = {name: value.clone() for name, value in model.full_gradients()}
        optimizer.step()
        optimizer.zero_grad()
        return found

    told = []
    for wire in (torch.bfloat16, torch.float16):
        policy = MixedPrecisionPolicy(grad_comm_dtype=wire)
        model, optimizer = with_optimizer(strategy, adamw, Partly())
        other, its = with_optimizer(strategy, adamw, Partly(), mixed_precision_policy=policy)
        usual, usuals = with_optimizer(strategy, adamw, Partly())
        with model.mixed_precision_context(policy):
            told += [] if model.policy == policy else ["the policy"]
            told += [f"{name} inside, {wire}" for name in same(train(model, optimizer, 0), train(other, its, 0))]
        told += [] if model.policy == usual.policy else ["the policy is kept"]
        told += [f"{name}, {wire}" for name in same(dict(model.full_weights()), dict(other.full_weights()))]
        usual.load_state_dict(model.state_dict())
        usuals.load_state_dict(optimizer.state_dict())
        told += [f"{name} outside, {wire}" for name in same(train(model, optimizer, 1), train(usual, usuals, 1))]
        told += [f"{n} after, {wire}" for n in same(dict(model.full_weights()), dict(usual.full_weights()))]
    return told


def rewired_wrongly(rank: int, strategy: str) -> list[str]:
    """In the middle of a step, for other dtypes, with fixed buffers: refused; an error inside leaves nothing behind."""
    model, optimizer = with_optimizer(strategy)
    half = MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)
    with model.no_sync():
        loss_of(model, data(0, rank)).backward()
    told = said(lambda: model.reset_mixed_precision_policy(half), RuntimeError, "after zero_grad()")
    model.zero_grad()
    wrong = MixedPrecisionPolicy(main_grads_dtype=torch.float64)
    told += said(lambda: model.reset_mixed_precision_policy(wrong), NotImplementedError, "main_grads_dtype=")
    fixed = sharded(strategy, fsdp_double_buffer=True)
    told += said(lambda: fixed.reset_mixed_precision_policy(half), NotImplementedError, "double_buffer")
    before = model.policy

    def broken() -> None:
        with model.mixed_precision_context(half):
            loss_of(model, data(0, rank)).backward()
            raise KeyError("the loop's own")

    told += said(broken, KeyError, "the loop's own") + ([] if model.policy == before else ["the policy is kept"])
    told += said(optimizer.step, RuntimeError, "zero_grad()")
    optimizer.zero_grad()
    loss_of(model, data(0, rank)).backward()
    optimizer.step()
    return told + differs(model, plainly(1))


CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    check.__name__: check for check in (broadcasting, resetting, rewiring, rewired_wrongly)
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_name_of_megatron_fsdp_does_what_it_says(strategy: str, check: str) -> None:
    holds(__name__, strategy, check)


# -- mutants -----------------------------------------------------------------------------------------------------------


def parents_first(part: nn.Module, seen: set[int]) -> Any:
    """Each module in definition order, by itself."""
    return ([each] for each in part.modules())


_set_policy = Engine.set_policy


def sets_once(self: Engine, policy: MixedPrecisionPolicy) -> None:
    if self.policy.grad_comm_dtype is None:
        _set_policy(self, policy)


MUTANTS = {
    "each its own": Mutant(
        "broadcast_params lets each rank keep what it has",
        lambda: mock.patch.object(megatron, "held_by_several", return_value=[]),
        "broadcasting",
        "no_shard",
    ),
    "parents are reset first": Mutant(
        "A module that resets what is inside it is reset before that",
        lambda: mock.patch.object(materialize, "_turns", parents_first),
        "resetting",
        "optim",  # released weights have no memory that could be written
    ),
    "the old wire": Mutant(
        "Buckets go on sending in the dtype from before the context",
        lambda: mock.patch.object(ParamGroup, "send_as"),
        "rewiring",
    ),
    "the old policy stays": Mutant(
        "A context that ends leaves its wire behind",
        lambda: mock.patch.object(Engine, "set_policy", sets_once),
        "rewiring",
        "optim",
    ),
}


@pytest.mark.parametrize("name", each("megatron-fsdp's names: weights", ((n, m.breaks) for n, m in MUTANTS.items())))
def test_a_wrong_name_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    is_found(__name__, name, killed_in)
