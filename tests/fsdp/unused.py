"""A model of which every step leaves something unused, and its training: on one process, and sharded."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harness.fsdp import MixedPrecisionPolicy, ShardedModel, fully_shard
from tests.fsdp.pairs import Pair, arguments_of

WIDTH, STEPS = 6, 5
LONG = 200
"""Elements of vectors that several ranks have a part of."""
SMALLEST = -(2.0**-149)
"""Of fp32: half of it is -0 there."""


class Given(torch.autograd.Function):
    """Identity; a parameter beside it gets a gradient that is `value` everywhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor, value: float) -> Tensor:
        ctx.like, ctx.value = param, value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], torch.full_like(ctx.like, ctx.value), None


class Part(nn.Module):
    """A unit: what is always used, and a side branch, of which some gradients are -0, and some vanish when scaled.

    Neighbours of one row length share a segment, so that stretches must be cut; the long vectors have several owners.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.side, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.muted, self.faint = (nn.Parameter(torch.ones(LONG)) for _ in range(2))

    def forward(self, x: Tensor, *, side: bool) -> Tensor:
        h = torch.tanh(self.up(x))
        if side:
            h = Given.apply(h + self.side(x), self.muted, -0.0)  # type: ignore[no-untyped-call]
            h = Given.apply(h, self.faint, SMALLEST)  # type: ignore[no-untyped-call]
        out: Tensor = x + self.down(h)
        return out


class Half(nn.Module):
    """Two heads used in turn, layers that are dropped, branches of one rank or one microbatch, and one never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(Part() for _ in range(4))
        self.never = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, step: int, index: int, last: int) -> Tensor:
        x = self.entry(x)
        for place in layers(step):
            x = self.parts[place](x, side=takes_side(place, step, index, last))
        out: Tensor = self.heads[step % 2](x)
        return out


def layers(step: int) -> list[int]:
    """The second layer is dropped in odd steps, the fourth is not used before the third step."""
    return [0] + ([1] if step % 2 == 0 else []) + [2] + ([3] if step >= 2 else [])


def takes_side(place: int, step: int, index: int, last: int) -> bool:
    """Whether microbatch `index` of 0 .. `last` takes a layer's side branch: of the first layer one of them in even
    steps, of the third the first one, of the fourth the last one, of the second none."""
    return (place == 0 and index == 1 and step % 2 == 0) or (place, index) in ((2, 0), (3, last))


@dataclass(frozen=True)
class Trial:
    """A training. more: further arguments of `fully_shard`. dtype: of the weights that are computed with."""

    pair: Pair
    k: int = 1
    optimizer: str = "adamw"
    numerics: str = "fast"
    dtype: torch.dtype = torch.float64
    policy: MixedPrecisionPolicy | None = None
    more: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.pair}-k{self.k}-{self.optimizer}-{self.numerics}-{self.dtype}".replace("torch.", "")


def make_optimizer(name: str, module: nn.Module) -> torch.optim.Optimizer:
    """Each with decay and, where it has one, momentum: both move what has a gradient of zero."""
    made: dict[str, Any] = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.3, eps=1e-3),
        "adam": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.3, eps=1e-3),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.3),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.02, momentum=0.5, weight_decay=0.3, eps=1e-2),
        "nadam": lambda p: torch.optim.NAdam(p, lr=0.02, weight_decay=0.3, eps=1e-3),
    }
    found: torch.optim.Optimizer = made[name](module.parameters())
    return found


def data(step: int, index: int) -> Tensor:
    """Microbatch `index` of a step, the same in every dtype."""
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + index), dtype=torch.float64)


def loss_of(model: nn.Module, step: int, index: int, count: int, dtype: torch.dtype) -> Tensor:
    """Of microbatch `index` of `count`, not scaled."""
    out: Tensor = model(data(step, index).to(dtype), step, index, count - 1)
    return out.to(torch.promote_types(torch.float32, dtype)).square().mean()


@dataclass
class Record:
    """weights: before the first step and after each. stateless: parameters the optimizer keeps nothing of."""

    weights: list[dict[str, Tensor]] = field(default_factory=list)
    stateless: set[str] = field(default_factory=set)
    norms: list[float] = field(default_factory=list)

    def moved(self) -> list[set[str]]:
        """Names of weights that each step changed."""
        pairs = zip(self.weights, self.weights[1:], strict=False)
        return [{name for name in old if not torch.equal(old[name], new[name])} for old, new in pairs]


def train_plain(optimizer: str, count: int, dtype: torch.dtype = torch.float64) -> Record:
    """All microbatches on one process."""
    module, record = Half().to(dtype), Record()
    stepped = make_optimizer(optimizer, module)
    record.weights.append(_kept(module))
    for step in range(STEPS):
        stepped.zero_grad()
        for index in range(count):
            (loss_of(module, step, index, count, dtype) / count).backward()
        record.norms.append(float(nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])))
        stepped.step()
        record.weights.append(_kept(module))
    record.stateless = {name for name, param in module.named_parameters() if not stepped.state.get(param)}
    return record


def _kept(module: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def build(trial: Trial, world: int) -> tuple[ShardedModel, torch.optim.Optimizer]:
    """The sharded model and its optimizer."""
    module = Half().to(trial.dtype)
    wide = MixedPrecisionPolicy(main_params_dtype=torch.promote_types(torch.float32, trial.dtype))
    return fully_shard(
        module,
        make_optimizer(trial.optimizer, module),
        fsdp_unit_modules=[Part],
        numerics=trial.numerics,
        mixed_precision_policy=trial.policy or wide,
        **arguments_of(trial.pair, world),
        **dict(trial.more),
    )


def backward(model: ShardedModel, trial: Trial, rank: int, world: int, step: int) -> None:
    """This rank's microbatches of a step."""
    for local in range(trial.k):
        index = rank * trial.k + local
        with nullcontext() if local == trial.k - 1 else model.no_sync():
            (loss_of(model, step, index, world * trial.k, trial.dtype) / trial.k).backward()


def train_sharded(rank: int, trial: Trial, world: int) -> Record:
    """One rank's part of the training; what is recorded is whole, and the same on all ranks."""
    model, optimizer = build(trial, world)
    record = Record()
    record.weights.append(dict(model.full_weights()))
    for step in range(STEPS):
        backward(model, trial, rank, world, step)
        record.norms.append(model.grad_norm())
        optimizer.step()
        optimizer.zero_grad()
        record.weights.append(dict(model.full_weights()))
    record.stateless = stateless(model, optimizer)
    model.close()
    return record


def stateless(model: ShardedModel, optimizer: torch.optim.Optimizer) -> set[str]:
    """Parameters with rows here of which the optimizer keeps nothing."""
    return {name for name, param in model.module.named_parameters() if not optimizer.state.get(param)}
