"""A small model, and programs that train it: on one process with all ranks' data, and on each of two ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.fsdp import ShardedModel, fully_shard
from tests.fsdp.checked import Check

Loss = Callable[[Any, Tensor], Tensor]
Optimize = Callable[[nn.Module], torch.optim.Optimizer]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.out(torch.tanh(self.linear(x)))
        return out


class Net(nn.Module):
    """Two units and a matrix.

    Args:
        hidden: what comes before the head, in place of the units one after the other.
        parts: what makes modules and parameters, by name, in place of the usual ones and beside them.
    """

    def __init__(
        self,
        units: Sequence[type[nn.Module]] = (Block,),
        hidden: Callable[[Any, Tensor], Tensor] = lambda net, x: net.second(net.first(x)),
        **parts: Callable[[], Any],
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.units, self._hidden = units, hidden
        self.first, self.second, self.head = Block(), Block(), nn.Linear(6, 6)
        for name, make in parts.items():
            setattr(self, name, make())

    def hidden(self, x: Tensor) -> Tensor:
        return self._hidden(self, x)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.hidden(x))


def data(ranks: Sequence[int], step: int) -> Tensor:
    rows = [torch.randn(4, 6, generator=torch.Generator().manual_seed(7 * step + rank)) for rank in ranks]
    return torch.cat(rows)


def mean_square(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().mean()
    return out


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)


def plain_sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.2)


@dataclass
class Run:
    """Where a program runs. ranks: whose data it sees; on one process, where `model` is `module`, all ranks'."""

    module: Any
    model: Any
    optimizer: torch.optim.Optimizer
    ranks: Sequence[int]

    @property
    def is_plain(self) -> bool:
        return self.model is self.module and not isinstance(self.model, ShardedModel)

    def data(self, step: int) -> Tensor:
        return data(self.ranks, step)

    def train(self, steps: int, loss: Loss = mean_square) -> None:
        """Data are those of step 0 and on, whatever has been trained already."""
        for step in range(steps):
            loss(self.model, self.data(step)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


Program = Callable[[Run], Any]


def training(steps: int = 3, loss: Loss = mean_square) -> Program:
    return lambda run: run.train(steps, loss)


def sharded(module: Any, strategy: str, optimize: Optimize = momentum) -> tuple[Any, torch.optim.Optimizer]:
    return fully_shard(module, optimize(module), zero_dp_strategy=strategy, fsdp_unit_modules=module.units)


def run_of(make: Callable[[], Any], rank: int, strategy: str, optimize: Optimize = momentum) -> Run:
    """A rank's."""
    module = make()
    return Run(module, *sharded(module, strategy, optimize), (rank,))


def differing(model: ShardedModel, plain: nn.Module) -> list[str]:
    found = dict(model.full_weights())
    return [f"{name} differs" for name, p in plain.named_parameters() if not torch.allclose(found[name], p, atol=1e-5)]


def alike(make: Callable[[], Any] = Net, program: Program | None = None, optimize: Optimize = momentum) -> Check:
    """A check: a program leaves the same weights on ranks as on one process, and gives the same."""
    runs = program or training()

    def check(rank: int, strategy: str) -> list[str]:
        plain = make()
        right = runs(Run(plain, plain, optimize(plain), (0, 1)))
        run = run_of(make, rank, strategy, optimize)
        seen = runs(run)
        return differing(run.model, plain) + ([] if seen == right else [f"it gives {seen}, not {right}"])

    return check


class Habits(dict[str, Check]):
    """Checks by name, declared by decorating them."""

    def right(self, make: Callable[[], Any] = Net, optimize: Optimize = momentum) -> Callable[[Program], Program]:
        """Declare a program that does on ranks what it does on one process."""

        def declare(program: Program) -> Program:
            self[program.__name__] = alike(make, program, optimize)
            return program

        return declare

    def check(self, function: Check) -> Check:
        """Declare a check that needs more than two runs of a program."""
        self[function.__name__] = function
        return function


def same_gradients(wrapped: ShardedModel, plain: nn.Module) -> None:
    """Assert that whole gradients are those of a plain module, or zeros where it has none."""
    found = dict(wrapped.full_gradients())
    for name, param in plain.named_parameters():
        expected = torch.zeros_like(param) if param.grad is None else param.grad
        torch.testing.assert_close(found[name], expected, msg=f"gradient of {name}")


class Boom(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("boom")
