"""Habits of loops that were once silently wrong, grew, or were refused with words that point elsewhere: gradients of
inputs, tensors where no hook sees them, methods that train, several optimizers and what hangs on them.

Checks as in `tests.fsdp.test_habits`, whose models and data these are.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from harness.fsdp import fully_shard
from harness.fsdp.runtime.forward_hooks import ForwardHooks
from harness.fsdp.runtime.gradient_sync import GradientSync
from harness.fsdp.runtime.readiness import Readiness
from tests.fsdp.checked import Mutant, holds, is_found
from tests.fsdp.pairs import STRATEGIES
from tests.fsdp.test_habits import Block, Net, data, differing, mean_square, said, sharded, train, trained_alike
from tests.support.mutants import each


class Stopping(Net):
    """Takes no gradients of its first unit."""

    def hidden(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            stopped = self.first(x)
        out: Tensor = self.second(stopped + x)
        return out


def attacking_past_a_stop(rank: int, strategy: str) -> list[str]:
    """A gradient of an input is no backward of the step, whatever part of the model ran without gradients."""

    counted: list[bool] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        before = getattr(model, "has_gradients", None)
        (change,) = torch.autograd.grad(mean_square(model, x.requires_grad_()), x)
        counted.append(getattr(model, "has_gradients", None) is not before)
        return mean_square(model, (x + 0.1 * change.sign()).detach())

    return trained_alike(Stopping, rank, strategy, loss) + ["it is counted"] * any(counted)


class Box:
    """Of a kind that nobody knows."""

    def __init__(self, held: Tensor) -> None:
        self.held = held


class Boxed(Block):
    def forward(self, box: Any) -> Any:
        return Box(super().forward(box.held))


class Boxing(Net):
    units = (Boxed,)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Boxed(), Boxed()

    def hidden(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(Box(x))).held
        return out


def boxing(rank: int, strategy: str) -> list[str]:
    """What is noted of calls that no hook sees is forgotten with their step."""
    model, optimizer = sharded(Boxing(), strategy)
    train(model, optimizer, [rank], mean_square, 4)
    noted = max(len(unit.readiness._unseen) for unit in model._parts.units)
    return trained_alike(Boxing, rank, strategy) + ([] if noted == 1 else [f"{noted} calls are noted"])


class Thawing(Net):
    """Trained by a method of its own, in part at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)

    def objective(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.hidden(x)).square().mean()
        return out


def training_by_a_method(rank: int, strategy: str) -> list[str]:
    """It is a forward also to what is frozen and unfrozen between steps."""
    objective: Any = lambda model, x: model.objective(x)  # noqa: E731 # two programs

    def thaw(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Sequence[int]) -> None:
        train(model, optimizer, ranks, objective, 1)
        model.requires_grad_(True)
        train(model, optimizer, ranks, objective, 2)

    plain = Thawing()
    thaw(plain, torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9), (0, 1))
    model, optimizer = sharded(Thawing(), strategy)
    model.register_forward_methods("objective")
    thaw(model, optimizer, [rank])
    through = torch.func.grad(lambda x: model.objective(x))
    return differing(model, plain) + said(lambda: through(data([rank], 0)), r"torch\.func transforms")


def stepping_on_zeros(rank: int, strategy: str) -> list[str]:
    """A step without a backward does nothing, but where `set_to_none=False` has left gradients of zeros."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Sequence[int]) -> None:
        optimizer.step()
        for set_to_none in (False, True):
            mean_square(model, data(ranks, 0)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    plain = Net()
    run(plain, torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9), (0, 1))
    model, optimizer = sharded(Net(), strategy)
    run(model, optimizer, [rank])
    return differing(model, plain)


def looking_before_a_step(rank: int, strategy: str) -> list[str]:
    """A rank that steps after a forward waits for those that are in it yet, and read the weights that it updates."""

    def look(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Sequence[int], clip: Any) -> Tensor:
        mean_square(model, data(ranks, 0)).backward()
        clip(0.1)
        seen: Tensor = model(data([rank], 1))
        optimizer.step()
        return seen

    plain, module = Net(), Net()
    module.first.register_forward_hook(lambda *_: time.sleep(0.2 * rank))
    right = look(
        plain, torch.optim.SGD(plain.parameters(), lr=0.2), (0, 1), partial(clip_grad_norm_, plain.parameters())
    )
    model, optimizer = fully_shard(
        module,
        torch.optim.SGD(module.parameters(), lr=0.2),
        zero_dp_strategy=strategy,
        fsdp_unit_modules=module.units,
    )
    seen = look(model, optimizer, [rank], model.clip_grad_norm_)
    return differing(model, plain) + (
        [] if torch.allclose(seen, right, atol=1e-5) else ["a forward with updated weights"]
    )


# -- several optimizers, and what hangs on one -------------------------------------------------------------------------


def naming_what_is_added(rank: int, strategy: str) -> list[str]:
    """Groups with names of parameters, and hooks on the optimizer's state."""

    def run(module: nn.Module, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Sequence[int]) -> Any:
        train(model, optimizer, ranks, mean_square, 1)
        model.zero_grad()  # in plain torch, what no optimizer has keeps its gradients
        optimizer.add_param_group({"params": list(module.named_parameters())[-2:], "lr": 0.1})
        optimizer.register_state_dict_post_hook(lambda _, found: found | {"note": 1})
        optimizer.register_load_state_dict_pre_hook(lambda _, given: heard.append(given.pop("note")))
        optimizer.register_load_state_dict_post_hook(lambda _: heard.append(2))
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        train(model, optimizer, ranks, mean_square, 1)
        return [group["param_names"] for group in saved["param_groups"]]

    def begun(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(list(module.named_parameters())[:-2], lr=0.2, momentum=0.9)

    heard: list[int] = []
    plain, module = Net(), Net()
    optimizer = begun(module)
    right = run(plain, plain, begun(plain), (0, 1))
    model, optimizer = fully_shard(module, optimizer, zero_dp_strategy=strategy, fsdp_unit_modules=module.units)
    told = [] if run(module, model, optimizer, [rank]) == right else ["other names"]
    return told + differing(model, plain) + ([] if heard == [1, 2, 1, 2] else [f"hooks heard {heard}"])


class CountingSGD(torch.optim.Optimizer):
    """One's own, whose state counts steps by an int."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(param)).mul_(0.9).add_(param.grad)
                param.add_(mean, alpha=-group["lr"] / state["step"])


def counting_by_an_int(rank: int, strategy: str) -> list[str]:
    """State of a plain optimizer is loaded, and its count goes on."""
    plain, module, other = Net(), Net(), Net()
    before = CountingSGD(plain.parameters())
    train(plain, before, (0, 1), mean_square, 2)
    model, optimizer = fully_shard(
        module, CountingSGD(module.parameters()), zero_dp_strategy=strategy, fsdp_unit_modules=module.units
    )
    train(model, optimizer, [rank], mean_square, 1)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
    train(plain, before, (0, 1), mean_square, 2)
    train(model, optimizer, [rank], mean_square, 2)
    other.load_state_dict(plain.state_dict())
    return differing(model, other)


CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    each.__name__: each
    for each in (
        attacking_past_a_stop,
        boxing,
        training_by_a_method,
        stepping_on_zeros,
        looking_before_a_step,
        naming_what_is_added,
        counting_by_an_int,
    )
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_habit_is_right_or_refused(strategy: str, check: str) -> None:
    holds(__name__, strategy, check)


_run_as_forward = ForwardHooks.run_as_forward


def _does_not_follow(self: ForwardHooks, method: Any, *args: Any) -> Any:
    with mock.patch.object(self, "before_gradients"):
        return _run_as_forward(self, method, *args)


def _forgets_zeros(self: GradientSync) -> None:
    self.forget()


MUTANTS = {
    "stops": Mutant(
        "A part that ran without gradients makes a backward of a gradient of an input",
        lambda: mock.patch.object(
            Readiness, "is_due", property(lambda self: bool(self._due_params) or self.has_hidden_calls)
        ),
        "attacking_past_a_stop",
        "no_shard",
    ),
    "unseen calls": Mutant(
        "Calls that no hook sees are noted for ever",
        lambda: mock.patch.object(Readiness, "forget_unseen"),
        "boxing",
    ),
    "methods that train": Mutant(
        "A method that runs as a forward does not follow what is frozen and unfrozen",
        lambda: mock.patch.object(ForwardHooks, "run_as_forward", _does_not_follow),
        "training_by_a_method",
    ),
    "zeros": Mutant(
        "Gradients of zeros that zero_grad has left are forgotten",
        lambda: mock.patch.object(GradientSync, "let_go", _forgets_zeros),
        "stepping_on_zeros",
        "optim_grads",
    ),
}


@pytest.mark.parametrize("name", each("The engine, by habits of loops", [(n, m.breaks) for n, m in MUTANTS.items()]))
def test_a_mutant_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    is_found(__name__, name, killed_in)
