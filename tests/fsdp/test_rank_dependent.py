"""Ranks that use different units, in definition order: experts under a gate of the root, and dropped layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from harness.fsdp import Strategy, fully_shard_model
from harness.fsdp.runtime.backward_hooks import BackwardHooks
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.reduce import ReducePipeline
from harness.fsdp.runtime.units import Unit
from tests.support.covering import Cover
from tests.support.mutants import each
from tests.support.spawn import run_ranks

STRATEGIES = [strategy.name for strategy in Strategy]
DIM, EXPERTS = 8, 6
Choice = tuple[tuple[int, ...], tuple[int, ...]]
"""Experts used in the first and in the second layer."""

CHOICES: dict[str, tuple[Choice, ...]] = {
    "as reported": (((2, 3, 4), (0, 1, 3)), ((2, 3, 5), (0, 2, 3, 5))),
    "nothing shared": (((0, 1, 2), (3, 4, 5)), ((3, 4, 5), (0, 1, 2))),
    "all and one": (((0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5)), ((5,), (0,))),
    "one and all": (((0,), (5,)), ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5))),
    "none and some": (((), (2,)), ((1, 3), (0, 4))),
    "three ranks": (((0, 5), (2,)), ((1, 2, 3), (3,)), ((4,), (0, 1, 5))),
}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Layer(nn.Module):
    """Experts that are units, under a router that belongs to the root: its gradient is complete after theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        weights = self.router(x).softmax(-1)
        return sum((self.experts[each](x) * weights[:, each : each + 1] for each in chosen), x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor, choice: Choice) -> Tensor:
        for layer, chosen in zip(self.layers, choice, strict=True):
            x = layer(x, chosen)
        return x


def x_of(rank: int, microbatch: int) -> Tensor:
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(10 * rank + microbatch))


def gradients(
    rank: int, strategy: str, name: str, k: int, way: dict[str, Any], limit_s: float = 60.0
) -> dict[str, Tensor]:
    wrapped = fully_shard_model(
        Mixture(), fsdp_unit_modules=[Expert], zero_dp_strategy=strategy, watchdog_timeout_s=limit_s, **way
    )
    for microbatch in range(k):
        wrapped.set_model_auto_sync(microbatch == k - 1)
        wrapped(x_of(rank, microbatch), CHOICES[name][rank]).square().mean().backward()
    return dict(wrapped.full_gradients())


SENT: dict[str, Any] = {"transport": "backend"}
WAYS: tuple[dict[str, Any], ...] = ({}, {"prefetch": 0}, SENT, {"fsdp_double_buffer": True})
CASES = Cover(product(CHOICES, STRATEGIES, range(len(WAYS)), (1, 2)))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES.params())
def test_a_router_of_the_root_between_units_that_ranks_use_differently(case: tuple[str, str, int, int]) -> None:
    name, strategy, way, k = case
    ranks = len(CHOICES[name])
    found = run_ranks(gradients, ranks, strategy, name, k, WAYS[way])
    plain = Mixture()
    for rank, microbatch in product(range(ranks), range(k)):
        (plain(x_of(rank, microbatch), CHOICES[name][rank]).square().mean() / ranks).backward()
    for each_rank in found:
        for parameter, param in plain.named_parameters():
            expected = torch.zeros_like(param) if param.grad is None else param.grad
            torch.testing.assert_close(each_rank[parameter], expected, msg=lambda text, n=parameter: f"{n}: {text}")


def without_turns(self: ReducePipeline, unit: Unit) -> None:
    with mock.patch.object(self, "before_wait") if unit.is_root else nullcontext():
        _make_room(self, unit)


def wait_for_weights_first(self: BackwardHooks) -> None:
    self.gather.post_backward()
    _root_post_backward(self)


@contextmanager
def both(*patches: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


_make_room, _root_post_backward = ReducePipeline._make_room, BackwardHooks._root_post_backward
MUTANTS: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "root gives no turn": (
        "The root waits for a reduction that others cannot come to without the weights of the unit this rank uses next",
        "as reported",
        lambda: both(
            mock.patch.object(ReducePipeline, "_make_room", without_turns),
            mock.patch.object(GatherPipeline, "unshard_next"),  # which most often has given them already
        ),
    ),
    "weights before reductions": (
        "A backward ends with waiting for others to take weights, before it reduces what it did not use",
        "nothing shared",
        lambda: mock.patch.object(BackwardHooks, "_root_post_backward", wait_for_weights_first),
    ),
}


def hang(rank: int, mutant: str) -> str:
    _, name, patch = MUTANTS[mutant]
    with patch():
        try:
            gradients(rank, "optim_grads_params", name, 1, SENT | {"separate_gather_group": False}, limit_s=3.0)
        except RuntimeError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("mutant", each("Ranks that use different units", ((n, m[0]) for n, m in MUTANTS.items())))
def test_an_engine_that_hangs_says_where(mutant: str) -> None:
    for said in run_ranks(hang, 2, mutant):
        assert re.search(r"did not come about within 3 s.*layers\.\d\.experts\.\d", said, re.DOTALL), said
