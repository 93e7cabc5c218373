"""Ranks that use different units, beside forwards that the backward does not go through: evaluations, other losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.fsdp import MixedPrecisionPolicy, fully_shard
from harness.fsdp.runtime.forward import Forward
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.readiness import Readiness
from tests.support.covering import once
from tests.support.mutants import each
from tests.support.spawn import run_ranks

DIM, LAYERS = 4, 6
USED = ((4, 5), (0, 1, 2, 3))
"""By each rank in what it trains on; enough that one waits for a reduction, and the other for weights."""
ALL = tuple(range(LAYERS))
STRATEGIES = ("optim_grads", "optim_grads_params")
MUTANT_LIMIT_S = 3.0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(DIM, DIM, dtype=torch.float64)

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
        self.first = nn.Linear(DIM, DIM, dtype=torch.float64)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.last = nn.Linear(DIM, DIM, dtype=torch.float64)

    def forward(self, x: Tensor, used: tuple[int, ...], inside: tuple[int, ...] = ()) -> Tensor:
        x = self.first(x)
        for place in used:
            layer = self.layers[place]
            # torch declares no types of `Function.apply`
            x = Inside.apply(x, layer) if place in inside else layer(x)  # type: ignore[no-untyped-call]
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


OF_TWO = ("two forwards, then two backwards", "one rank uses no layer")
HABITS: dict[str, Callable[[Any, int], Iterable[Tensor]]] = {
    "after an evaluation": _after_evaluation,
    "an evaluation between forward and backward": _before_evaluation,
    "after generate()": _after_generating,
    "generate() with other layers on each rank": _generating_with_other_layers,
    "beside a loss that was given up": _beside_a_loss_given_up,
    "two forwards, then two backwards": _two_forwards_two_backwards,
    "one rank uses no layer": _without_a_layer,
    "layers that are differentiated inside the backward": _inside_a_backward,
}


def gradients(rank: int, strategy: str, habit: str, limit_s: float) -> dict[str, Tensor]:
    model = fully_shard(
        Net(),
        group=dist.new_group([0, 1]),  # an alarm ends it
        unit_modules=[Layer],
        strategy=strategy,
        mp_policy=MixedPrecisionPolicy(main_params_dtype=None),
        watchdog_timeout_s=limit_s,
        prefetch=0,
    )
    model.register_forward_methods("generate")
    try:
        for number, loss in enumerate(HABITS[habit](model, rank), 1):
            model.set_model_auto_sync(number == (2 if habit in OF_TWO else 1))
            loss.backward()
        return dict(model.full_gradients())
    finally:
        with suppress(RuntimeError):  # after an alarm
            model.close()


def train_all(rank: int) -> dict[tuple[str, str], dict[str, Tensor]]:
    return {(s, habit): gradients(rank, s, habit, 60.0) for s in STRATEGIES for habit in HABITS}


@once
def trained() -> list[dict[tuple[str, str], dict[str, Tensor]]]:
    return run_ranks(train_all, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("habit", HABITS)
def test_forwards_that_a_backward_does_not_go_through_hold_nobody_up(habit: str, strategy: str) -> None:
    plain = Net()
    for rank in range(2):
        for loss in HABITS[habit](plain, rank):
            (loss / 2).backward()
    for found in trained():
        for name, param in plain.named_parameters():
            expected = torch.zeros_like(param) if param.grad is None else param.grad
            torch.testing.assert_close(found[strategy, habit][name], expected, rtol=1e-10, atol=1e-14)


_note_forwards, _post_forward = Readiness.note_forwards, GatherPipeline.post_forward


def keeping(self: GatherPipeline, *, backward_follows: bool, inside: bool = False) -> None:
    _post_forward(self, backward_follows=backward_follows or inside, inside=inside)


MUTANTS: dict[str, tuple[str, str, Callable[[], Any], str]] = {
    "every forward counts": (
        "A rank waits for gradients of units that it called in an evaluation alone, and others wait for the rank",
        "after an evaluation",
        lambda: mock.patch.object(Readiness, "note_forwards", lambda self, _: _note_forwards(self, set())),
        "did not come about within 3 s",
    ),
    "one number for all forwards": (
        "A rank waits for gradients of units that only a forward with a backward of its own called",
        "two forwards, then two backwards",
        lambda: mock.patch.object(Forward, "number", property(lambda self: 1)),
        "did not come about within 3 s",
    ),
    "last unit kept": (
        "A unit that a rank did not use in a forward of generate() stays whole there, and is not in its next sweep",
        "generate() with other layers on each rank",
        lambda: mock.patch.object(GatherPipeline, "post_forward", keeping),
        "ranks issue different collectives",
    ),
    "no forward counts": (
        "A layer that is differentiated inside the backward is taken for one that is not used",
        "layers that are differentiated inside the backward",
        lambda: mock.patch.object(Readiness, "note_forwards"),
        "arrived after unit",
    ),
}


def broken(rank: int) -> dict[str, str]:
    said = {}
    for mutant, (_, habit, patch, _) in MUTANTS.items():
        with patch():
            try:
                gradients(rank, STRATEGIES[-1], habit, MUTANT_LIMIT_S)
            except RuntimeError as error:
                said[mutant] = str(error)
        dist.barrier()
    return said


@once
def said() -> list[dict[str, str]]:
    return run_ranks(broken, 2)


@pytest.mark.parametrize("mutant", each("Forwards of a backward", ((n, m[0]) for n, m in MUTANTS.items())))
def test_an_engine_that_takes_the_wrong_forwards_is_found(mutant: str) -> None:
    for of_rank in said():
        assert MUTANTS[mutant][3] in of_rank[mutant]
