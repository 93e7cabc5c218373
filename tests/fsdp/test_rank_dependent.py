"""Ranks that use different units: experts under a gate of the root, and beside forwards without a backward."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.fsdp import MixedPrecisionPolicy, fully_shard
from harness.fsdp.runtime.backward_hooks import BackwardHooks
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.reduce import ReducePipeline
from harness.fsdp.runtime.units import Unit
from tests.fsdp.pairs import STRATEGIES
from tests.support.covering import Cover, once
from tests.support.mutants import Slip, each, slips
from tests.support.spawn import run_ranks

DIM, LAYERS, EXPERTS = 4, 6, 6
USED = ((4, 5), (0, 1, 2, 3))
"""By each rank in what it trains on; enough that one waits for a reduction, and the other for weights."""
ALL = tuple(range(LAYERS))
ZERO2, ZERO3 = STRATEGIES[2:]
MUTANT_LIMIT_S = 3.0

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
        return x.square().mean()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.map(x))


class Inside(torch.autograd.Function):
    """A layer that is differentiated inside the backward, as offloading and reversible layers are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = layer(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        torch.autograd.backward(ctx.y, gradients[0])
        return ctx.x.grad, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(Residual() for _ in range(LAYERS))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, used: tuple[int, ...], inside: tuple[int, ...] = ()) -> Tensor:
        x = self.first(x)
        for place in used:
            layer = self.layers[place]
            # torch declares no types of `Function.apply`
            x = Inside.apply(x, layer) if place in inside else layer(x)
        return self.last(x).square().mean()

    def generate(self, x: Tensor, used: tuple[int, ...] = ALL) -> Any:
        """A forward for each of two tokens."""
        with torch.no_grad():
            return self(x, used) + self(x, used)


def x_of(rank: int, salt: int = 0) -> Tensor:
    return torch.randn(3, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + salt))


def _plain(model: Any, rank: int) -> list[Tensor]:
    return [model(x_of(rank), USED[rank])]


def _after_evaluation(model: Any, rank: int) -> list[Tensor]:
    with torch.no_grad():
        model(x_of(rank, 1), ALL)
    return _plain(model, rank)


def _before_evaluation(model: Any, rank: int) -> list[Tensor]:
    losses = _plain(model, rank)
    with torch.inference_mode():
        model(x_of(rank, 1), ALL)
    return losses


def _after_generating(model: Any, rank: int) -> list[Tensor]:
    model.generate(x_of(rank, 1))
    return _plain(model, rank)


def _generating_with_other_layers(model: Any, rank: int) -> list[Tensor]:
    """The last layer is used by one rank, in a method that stands for a forward."""
    model.generate(x_of(rank, 1), USED[rank])
    return _plain(model, rank)


def _beside_a_loss_given_up(model: Any, rank: int) -> list[Tensor]:
    model.kept = model(x_of(rank, 1), USED[1 - rank])
    return _plain(model, rank)


def _two_forwards_two_backwards(model: Any, rank: int) -> list[Tensor]:
    return [*_plain(model, rank), model(x_of(rank, 1), USED[1 - rank])]


def _without_a_layer(model: Any, rank: int) -> Iterator[Tensor]:
    """One rank uses no layer at all, so that no call tells which forward the backward goes through."""
    yield model(x_of(rank, 1), USED[rank])
    model.kept = model(x_of(rank, 2), ALL)
    yield model(x_of(rank), ((5,), ())[rank])


def _inside_a_backward(model: Any, rank: int) -> list[Tensor]:
    """Layers of which autograd knows nothing, after one that it knows, which all ranks use."""
    _after_evaluation(model, rank)
    return [model(x_of(rank), (0, 2, 4, 5), inside=(2, 4))]


Run = Callable[[Any, int], Iterable[Tensor]]


def _experts(name: str, k: int) -> Run:
    return lambda model, rank: [model(x_of(rank, index), CHOICES[name][rank]) for index in range(k)]


class Habit(NamedTuple):
    """run: gives losses, `count` of them, each of which has its backward before the next one is asked for."""

    run: Run
    count: int = 1
    net: type[nn.Module] = Net
    ranks: int = 2


FORWARDS = {
    "after an evaluation": Habit(_after_evaluation),
    "an evaluation between forward and backward": Habit(_before_evaluation),
    "after generate()": Habit(_after_generating),
    "generate() with other layers on each rank": Habit(_generating_with_other_layers),
    "beside a loss that was given up": Habit(_beside_a_loss_given_up),
    "two forwards, then two backwards": Habit(_two_forwards_two_backwards, 2),
    "one rank uses no layer": Habit(_without_a_layer, 2),
    "layers that are differentiated inside the backward": Habit(_inside_a_backward),
}
HABITS = FORWARDS | {
    f"{name}, k={k}": Habit(_experts(name, k), k, Mixture, len(CHOICES[name])) for name in CHOICES for k in (1, 2)
}
SENT: dict[str, Any] = {"transport": "backend"}
WAYS: tuple[dict[str, Any], ...] = ({}, {"prefetch": 0}, SENT, {"double_buffer": True})
Case = tuple[str, str, int]
"""A habit, a strategy, and a way."""
CASES = Cover(
    [
        *product(FORWARDS, (ZERO2, ZERO3), (1,)),
        *((name, *others) for name, *others in product(HABITS, STRATEGIES, range(len(WAYS))) if name not in FORWARDS),
    ],
    key=lambda case: HABITS[case[0]].ranks,
)


def gradients(rank: int, name: str, strategy: str, limit_s: float = 60.0, **way: Any) -> dict[str, Tensor]:
    habit = HABITS[name]
    model = fully_shard(
        habit.net().double(),
        group=dist.new_group(list(range(habit.ranks))),  # an alarm ends it
        unit_modules=[Residual, Expert],
        strategy=strategy,
        mp_policy=MixedPrecisionPolicy(main_params_dtype=None),
        watchdog_timeout_s=limit_s,
        **way,
    )
    if habit.net is Net:
        model.register_forward_methods("generate")
    try:
        for number, loss in enumerate(habit.run(model, rank), 1):
            model.set_model_auto_sync(number == habit.count)
            loss.backward()
        return dict(model.full_gradients())
    finally:
        with suppress(RuntimeError):  # after an alarm
            model.close()


def train_all(rank: int, cases: tuple[Case, ...]) -> dict[Case, dict[str, Tensor]]:
    return {case: gradients(rank, *case[:2], **WAYS[case[2]]) for case in cases}


@once
def trained(cases: tuple[Case, ...]) -> list[dict[Case, dict[str, Tensor]]]:
    return run_ranks(train_all, HABITS[cases[0][0]].ranks, cases)


@pytest.mark.parametrize("case", CASES.params())
def test_gradients_are_those_of_one_process(case: Case) -> None:
    habit = HABITS[case[0]]
    plain = habit.net().double()
    for rank in range(habit.ranks):
        for loss in habit.run(plain, rank):
            (loss / habit.ranks).backward()
    for found in trained(CASES.batch(case)):
        for name, param in plain.named_parameters():
            expected = torch.zeros_like(param) if param.grad is None else param.grad
            torch.testing.assert_close(found[case][name], expected, rtol=1e-10, atol=1e-14)


# -- mutants -----------------------------------------------------------------------------------------------------------


_make_room = ReducePipeline._make_room


def without_turns(self: ReducePipeline, unit: Unit) -> None:
    with mock.patch.object(self, "before_wait") if unit.is_root else nullcontext():
        _make_room(self, unit)


@contextmanager
def no_turn_of_the_root() -> Iterator[None]:
    with (
        mock.patch.object(ReducePipeline, "_make_room", without_turns),
        mock.patch.object(GatherPipeline, "unshard_next"),  # which most often has given them already
    ):
        yield


WEIGHTS_FIRST = Slip(
    BackwardHooks,
    "_root_post_backward",
    "self._end = NoneType",
    "self._end = NoneType\n    self.gather.post_backward()",
)
APART = {
    "root gives no turn": (
        "The root waits for a reduction that others cannot come to without the weights of the unit this rank uses next",
        no_turn_of_the_root,
        "as reported, k=1",
        r"did not come about within 3 s.*layers\.\d\.experts\.\d",
    ),
    "weights before reductions": (
        "A backward ends with waiting for others to take weights, before it reduces what it did not use",
        WEIGHTS_FIRST.patched,
        "nothing shared, k=1",
        r"did not come about within 3 s.*layers\.\d\.experts\.\d",
    ),
}
FORWARD = {
    name: (slip.breaks, slip.patched, *more)
    for name, (slip, *more) in slips(
        """
    every forward counts: A rank waits for gradients of units that an evaluation alone called, and others wait for it
        fsdp.runtime.units.Readiness.note_forwards: if numbers else => if False else
        after an evaluation
        did not come about within 3 s
    one number for all forwards: A rank waits for gradients of units that only a forward with its own backward called
        fsdp.runtime.step.Step.pre_forward: self.num_forwards += 1 => self.num_forwards = 1
        two forwards, then two backwards
        did not come about within 3 s
    last unit kept: A unit that a rank did not use in generate() stays whole there, and is not in its next sweep
        fsdp.runtime.gather.GatherPipeline.post_forward: if backward_follows else => if backward_follows or inside else
        generate() with other layers on each rank
        ranks issue different collectives
    no forward counts: A layer that is differentiated inside the backward is taken for one that is not used
        fsdp.runtime.units.Readiness.note_forwards: bool( => False and bool(
        layers that are differentiated inside the backward
        arrived after unit
    """
    ).items()
}
MUTANTS: dict[str, Any] = APART | FORWARD


def broken(rank: int) -> dict[str, str]:
    said = {}
    for mutant, (_, patch, habit, _) in MUTANTS.items():
        way: dict[str, Any] = {**SENT, "separate_gather_group": False} if mutant in APART else {"prefetch": 0}
        with patch():
            try:
                gradients(rank, habit, ZERO3, MUTANT_LIMIT_S, **way)
            except RuntimeError as error:
                said[mutant] = str(error)
        dist.barrier()
    return said


@once
def said() -> list[dict[str, str]]:
    return run_ranks(broken, 2)


@pytest.mark.parametrize(
    "mutant",
    [
        *each("Ranks that use different units", ((name, mutant[0]) for name, mutant in APART.items())),
        *each("Forwards of a backward", ((name, mutant[0]) for name, mutant in FORWARD.items())),
    ],
)
def test_an_engine_that_hangs_or_takes_the_wrong_forwards_says_where(mutant: str) -> None:
    for of_rank in said():
        assert re.search(MUTANTS[mutant][3], of_rank[mutant], re.DOTALL), of_rank[mutant]
