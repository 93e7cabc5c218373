"""Habits of programs that were once silently wrong, or were refused with words that point elsewhere.

Each check trains a model on both ranks and one process over the data of both, and returns what differs, or what the
engine should have said and did not.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from harness.fsdp import ShardedModel, fully_shard, preconditions
from harness.fsdp.ragged import RaggedTensor
from harness.fsdp.runtime import backward_hooks, forward_hooks
from harness.fsdp.runtime.backward_hooks import BackwardHooks
from harness.fsdp.runtime.forward_hooks import ForwardHooks
from harness.fsdp.runtime.handed_on import without_weights
from harness.fsdp.storage.parameter_access import ParameterViews
from tests.fsdp.checked import Mutant, holds, is_found
from tests.fsdp.pairs import STRATEGIES
from tests.support.mutants import each


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.out(torch.tanh(self.linear(x)))
        return out


class Net(nn.Module):
    units: Sequence[type[nn.Module]] = (Block,)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = Block(), Block(), nn.Linear(6, 6)

    def hidden(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out

    def forward(self, x: Tensor) -> Any:
        return self.head(self.hidden(x))


def data(ranks: Sequence[int], step: int) -> Tensor:
    rows = [torch.randn(4, 6, generator=torch.Generator().manual_seed(7 * step + rank)) for rank in ranks]
    return torch.cat(rows)


Loss = Callable[[nn.Module, Tensor], Tensor]


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().mean()
    return out


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Sequence[int], loss: Loss, steps: int) -> None:
    for step in range(steps):
        loss(model, data(ranks, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(module: Net, strategy: str) -> tuple[ShardedModel, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)
    return fully_shard(module, optimizer, zero_dp_strategy=strategy, fsdp_unit_modules=module.units)


def trained_alike(
    make: Callable[[], Net], rank: int, strategy: str, loss: Loss = mean_square, steps: int = 3
) -> list[str]:
    """What differs after some steps of a model on two ranks and on one process."""
    plain = make()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9), (0, 1), loss, steps)
    model, optimizer = sharded(make(), strategy)
    train(model, optimizer, (rank,), loss, steps)
    return differing(model, plain)


def differing(model: ShardedModel, plain: nn.Module) -> list[str]:
    found = dict(model.full_weights())
    return [f"{name} differs" for name, p in plain.named_parameters() if not torch.allclose(found[name], p, atol=1e-5)]


def said(action: Callable[[], Any], words: str) -> list[str]:
    """What is wrong with what an action raises."""
    try:
        action()
    except Exception as error:
        return [] if re.search(words, str(error), re.S) else [f"{type(error).__name__}: {error}"]
    return [f"nothing was said of {words}"]


# -- weights that a forward hands on, or edits -------------------------------------------------------------------------


class Positions(nn.Module):
    """Gives a part of its table: a view of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gain = nn.Parameter(torch.randn(9, 6)), nn.Parameter(torch.tensor(1.5))

    def forward(self, rows: int) -> tuple[Tensor, dict[str, Tensor]]:
        return self.table[:rows], {"transposed": self.table.t(), "gain": self.gain}


class Positioned(Net):
    units = (Block, Positions)

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()

    def hidden(self, x: Tensor) -> Tensor:
        rows, more = self.positions(1)
        x = self.first(x)
        out: Tensor = self.second((x + rows) * more["gain"] + (x @ more["transposed"]).sum(1, keepdim=True))
        return out


def handing_on(rank: int, strategy: str) -> list[str]:
    return trained_alike(Positioned, rank, strategy, steps=2)  # a third diverges, and rounding with it


class Telling(Net):
    """Returns a parameter and an input as they are."""

    def forward(self, x: Tensor) -> Any:
        return {"out": super().forward(x), "weight": self.head.weight, "input": x}


def returning_leaves(rank: int, strategy: str) -> list[str]:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        given: dict[str, Tensor] = model(x)
        return given["out"].square().mean() + 0.1 * given["weight"].square().sum()

    return trained_alike(Telling, rank, strategy, loss)


class Tree(Block):
    """A unit that calls itself."""

    depth = 2

    def forward(self, x: Tensor, level: int = 0) -> Tensor:
        x = self(x, level + 1) + self(-x, level + 1) if level < self.depth else x
        return super().forward(torch.tanh(x))


class Forest(Net):
    units = (Block,)

    def __init__(self) -> None:
        super().__init__()
        self.first = Tree()


def recursing(rank: int, strategy: str) -> list[str]:
    return trained_alike(Forest, rank, strategy)


class Constrained(nn.Linear):
    """Keeps rows of its weight short, as EEGNet does: it assigns to `data` in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        return super().forward(x)


class Constraining(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second = Block()
        self.second.out = Constrained(6, 6)


def editing_in_a_forward(rank: int, strategy: str) -> list[str]:
    def run() -> list[str]:
        return trained_alike(Constraining, rank, strategy)

    return said(run, "second.out.weight was changed after sharding")


# -- what programs keep -----------------------------------------------------------------------------------------------


def keeping_the_best(rank: int, strategy: str) -> list[str]:
    """`copy.deepcopy` of states, and back, as whoever looks for a learning rate does."""
    plain = Net()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9), (0, 1), mean_square, 1)
    model, optimizer = sharded(Net(), strategy)
    train(model, optimizer, [rank], mean_square, 1)
    best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, [rank], mean_square, 2)
    model.load_state_dict(best[0])
    optimizer.load_state_dict(best[1])
    return differing(model, plain)


# -- loops -------------------------------------------------------------------------------------------------------------


def attacking(rank: int, strategy: str) -> list[str]:
    """Gradients of inputs while all parameters are frozen, several in a step, are no backwards of it."""

    counted: list[bool] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        before = getattr(model, "has_gradients", None)
        model.requires_grad_(False)
        for _ in range(2):
            (change,) = torch.autograd.grad(mean_square(model, x.requires_grad_()), x)
            x = (x + 0.1 * change.sign()).detach()
        model.requires_grad_(True)
        counted.append(getattr(model, "has_gradients", None) is not before)
        return mean_square(model, x)

    return trained_alike(Net, rank, strategy, loss) + ["they are counted"] * any(counted)


class Interrupted(Net):
    steps = 0

    def hidden(self, x: Tensor) -> Tensor:
        self.steps += 1
        x = self.first(x)
        if self.steps == 2:
            raise KeyboardInterrupt
        out: Tensor = self.second(x)
        return out


def interrupting(rank: int, strategy: str) -> list[str]:
    """Ctrl-C in a notebook, and on with the next cell."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        try:
            return mean_square(model, x)
        except KeyboardInterrupt:
            return mean_square(model, x)

    return trained_alike(Interrupted, rank, strategy, loss)


def evaluating_under_one_autocast(rank: int, strategy: str) -> list[str]:
    """Autocast keeps the copies of weights that an evaluation made for the forward after it."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                model(x)
            return F.mse_loss(model(x).float(), x)

    plain = Net()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9), (0, 1), loss, 2)
    model, optimizer = sharded(Net(), strategy)
    train(model, optimizer, [rank], loss, 2)
    found, start = dict(model.full_weights()), dict(Net().named_parameters())
    moved = {name: (p - start[name]).norm() for name, p in plain.named_parameters()}
    return [f"{name} differs" for name, p in plain.named_parameters() if (found[name] - p).norm() > 0.1 * moved[name]]


# -- before anything is sharded ----------------------------------------------------------------------------------------


def scaling_rows(rank: int, strategy: str) -> list[str]:
    told = []
    for trained in (True, False):
        module = nn.Sequential(nn.Embedding(9, 6, max_norm=1.0), nn.Linear(6, 6))
        module[0].weight.requires_grad_(trained)
        optimizer = torch.optim.SGD(module[1].parameters())
        told += said(
            lambda module=module, optimizer=optimizer: fully_shard(module, optimizer, zero_dp_strategy=strategy),  # type: ignore[misc] # defaults
            r"0 \(Embedding\) has max_norm=1.0.*max_norm=None.*renorm\(weight, 2, 0, 1\)",
        )
    return told


def sharing_memory(rank: int, strategy: str) -> list[str]:
    """As parameters, as a buffer, or in an attribute; what is made anew before each forward is none."""
    apart, buffered, held, normed = Net(), Net(), Net(), Net()
    apart.part = nn.Parameter(apart.head.weight.detach()[:2])
    buffered.first.register_buffer("seen", buffered.head.weight.detach())
    held.second.turned = [held.head.weight.t()]
    nn.utils.spectral_norm(normed.head)
    words = {
        "parameters (part and head.weight|head.weight and part) share memory": apart,
        r"first.seen shares memory with parameter head.weight.*clone\(\)": buffered,
        r"second.turned shares memory with parameter head.weight.*clone\(\)": held,
    }
    told = [each for says, module in words.items() for each in said(lambda m=module: sharded(m, strategy), says)]  # type: ignore[misc] # a default
    sharded(normed, strategy)
    return told


CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    each.__name__: each
    for each in (
        handing_on,
        returning_leaves,
        recursing,
        editing_in_a_forward,
        keeping_the_best,
        attacking,
        interrupting,
        evaluating_under_one_autocast,
        scaling_rows,
        sharing_memory,
    )
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_habit_is_right_or_refused(strategy: str, check: str) -> None:
    holds(__name__, strategy, check)


MUTANTS = {
    "views of weights": Mutant(
        "The copy of a weight that a unit hands on brings no gradient back",
        lambda: mock.patch.object(forward_hooks, "without_weights", _cut_off),
        "handing_on",
    ),
    "hooks on leaves": Mutant(
        "A parameter among a model's outputs is watched for ever",
        lambda: mock.patch.object(BackwardHooks, "watch_outputs", _watches_leaves),
        "returning_leaves",
        "no_shard",
    ),
    "edits through data": Mutant(
        "What a forward assigns to `weight.data` is dropped with the gathered weights",
        lambda: mock.patch.object(ParameterViews, "check_untouched"),
        "editing_in_a_forward",
    ),
    "copies of shards": Mutant(
        "A copy of a state dictionary follows every update",
        lambda: mock.patch.object(RaggedTensor, "__deepcopy__", lambda self, memo: self),
        "keeping_the_best",
    ),
    "inputs alone": Mutant(
        "A backward of a frozen model counts as one of the step",
        lambda: mock.patch.object(BackwardHooks, "_is_all_frozen", False),
        "attacking",
        "no_shard",
    ),
    "interrupts": Mutant(
        "Nobody notices that a forward was interrupted",
        lambda: mock.patch.object(ForwardHooks, "break_off"),
        "interrupting",
    ),
    "shared memory": Mutant(
        "Parameters that overlap are sharded apart",
        lambda: mock.patch.object(preconditions, "_check_apart"),
        "sharing_memory",
    ),
    "views of parameters": Mutant(
        "What a module keeps of a parameter stays behind when that is sharded",
        lambda: mock.patch.object(preconditions, "_check_views"),
        "sharing_memory",
    ),
}


def _cut_off(output: Any, weights: Sequence[Tensor], unit: str) -> Any:
    """Without the copy a program reads memory that is gone, and may end there."""
    found = without_weights(output, weights, unit)
    return found if found is output else tree_map_only(Tensor, Tensor.detach, found)


def _watches_leaves(self: BackwardHooks, unit: Any, leaves: list[Tensor], call: Any = None, forward: int = 0) -> None:
    newest, updates = backward_hooks.ABOVE_ALL, self.step.num_updates
    hook = backward_hooks.WeakHook(self._pre_backward, unit, call, forward, newest, updates)
    if leaves:
        torch.autograd.graph.register_multi_grad_hook(leaves, hook, mode="any")


@pytest.mark.parametrize("name", each("The engine, by habits of programs", [(n, m.breaks) for n, m in MUTANTS.items()]))
def test_a_mutant_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    is_found(__name__, name, killed_in)
