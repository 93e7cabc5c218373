"""What a program keeps of gradients, and of functions of gathered weights: right as in one process, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.fsdp import ShardedModel, fully_shard
from harness.fsdp.storage import memory, parameter_access
from harness.fsdp.update import optimizer as update
from tests.fsdp.checked import RANKS, ZERO3, Mutant, holds, is_found, patched
from tests.fsdp.pairs import STRATEGIES
from tests.fsdp.test_habits import Block, Net, data, mean_square, said
from tests.support.mutants import each


class Extrapolating(torch.optim.Optimizer):
    """Adds half of the gradient before, which it keeps as it was handed over."""

    elementwise = True

    def __init__(self, params: Iterable[Tensor], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # torch overloads it
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    before = state.get("kept", [torch.zeros_like(p)])[0]
                    p.add_(p.grad + 0.5 * before, alpha=-group["lr"])
                    state["kept"] = [p.grad]


def sharded(strategy: str, kind: Callable[..., torch.optim.Optimizer]) -> tuple[ShardedModel, torch.optim.Optimizer]:
    module = Net()
    return fully_shard(module, kind(module.parameters()), zero_dp_strategy=strategy, fsdp_unit_modules=[Block])


def differs(model: ShardedModel, plain: nn.Module) -> list[str]:
    found = dict(model.full_weights())
    return [name for name, p in plain.named_parameters() if not torch.allclose(found[name], p, atol=1e-6)]


def in_state(rank: int, strategy: str) -> list[str]:
    """An optimizer of the program's own that keeps `p.grad` in its state."""
    model, optimizer = sharded(strategy, Extrapolating)
    plain = Net()
    own = Extrapolating(plain.parameters())
    for step in range(4):
        mean_square(model, data([rank], step)).backward()
        mean_square(plain, data(range(RANKS), step)).backward()
        for each_ in (optimizer, own):
            each_.step()
            each_.zero_grad()
    return differs(model, plain)


def in_hooks(rank: int, strategy: str) -> list[str]:
    """A hook that keeps `.grad`: there, or refused, and no address of what is gone."""
    model, optimizer = sharded(strategy, lambda p: torch.optim.SGD(p, lr=0.1))
    kept: list[Tensor] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    mean_square(model, data([rank], 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    told = []
    for gradient in kept:
        if not gradient.untyped_storage().nbytes():
            told += said(gradient.data_ptr, "invalid|released")
            told += [] if told else said(gradient.sum, "invalid|released")
    return told


def penalty(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


def penalties(rank: int, strategy: str) -> list[str]:
    """A penalty over weights, made while they are gathered: right where its backward runs there, too."""
    model, optimizer = sharded(strategy, lambda p: torch.optim.SGD(p, lr=0.1))
    plain = Net()
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        with model.gathered():
            (mean_square(model, data([rank], step)) + 0.1 * penalty(model)).backward()
        (mean_square(plain, data(range(RANKS), step)) + 0.1 * penalty(plain)).backward()
        for each_ in (optimizer, own):
            each_.step()
            each_.zero_grad()
    told = differs(model, plain)
    with model.gathered():
        loss = mean_square(model, data([rank], 5)) + 0.1 * penalty(model)
    if strategy == ZERO3:
        return told + said(loss.backward, "parameter .* was used by .*square inside .*gathered.*backward.. inside")
    loss.backward()
    return told


CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    check.__name__: check for check in (in_state, in_hooks, penalties)
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_kept_is_right_or_refused(strategy: str, check: str) -> None:
    holds(__name__, strategy, check)


MUTANTS = {
    "kept gradients change": Mutant(
        "A gradient in the state of an optimizer becomes the next step's",
        patched(update, "set_apart", lambda *_: None),
        "in_state",
        "optim",
    ),
    "freed gradients have an address": Mutant(
        "A gradient that a hook keeps is read at address zero once it is freed",
        patched(memory, "bar", lambda device: None),
        "in_hooks",
    ),
    "penalties end in torch's words": Mutant(
        "A backward through weights that are released again is not told whose they are",
        patched(parameter_access, "_watch_backward", lambda *_: None),
        "penalties",
    ),
}


@pytest.mark.parametrize(
    "name", each("The engine, by what programs keep", [(name, m.breaks) for name, m in MUTANTS.items()])
)
def test_a_wrong_engine_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    is_found(__name__, name, killed_in)
