"""Random small models and ways to train them, each a function of one number; and what plain torch makes of them.

`draw(index)` gives a program: a model of odd widths with tied, frozen, unused, scalar and empty parameters in one or
two dtypes, in units of unequal size that may run twice or, on some ranks, not at all; and everything an engine may
choose. `train_plain` is the same training on one process: in fp64, or with the dtypes of the program, or with sums of
integers as numerics=exact defines them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.fsdp import MixedPrecisionPolicy
from harness.fsdp.comm import fixed_point
from harness.fsdp.options import Options
from harness.fsdp.vocabulary import Strategy

torch.set_num_threads(1)  # as on the ranks: some kernels' bits depend on the number of threads

STEPS = 3
MESHES = ((1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (2, 2), (2, 1))
"""Ranks, and how many of them the outer axis has: 1, 2, 3, 4, 2x2, 1x2 and 2x1 (an outer axis of one)."""
fp64, fp32, bf16, fp16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class DtypePolicy:
    """compute: of most parameters. other: of some. The rest as in `MixedPrecisionPolicy`, nothing left open."""

    compute: torch.dtype
    other: torch.dtype
    main: torch.dtype
    grads: torch.dtype
    wire: torch.dtype

    @property
    def policy(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(self.main, self.grads, self.wire)


POLICIES = {
    "fp64": DtypePolicy(fp64, fp64, fp64, fp64, fp64),
    "fp32": DtypePolicy(fp32, fp32, fp32, fp32, fp32),
    "fp32_main64": DtypePolicy(fp32, fp32, fp64, fp32, fp32),
    "mixed": DtypePolicy(fp32, bf16, fp32, fp32, fp32),
    "bf16": DtypePolicy(bf16, fp32, fp32, fp32, fp32),
    "bf16_comm": DtypePolicy(bf16, bf16, fp32, fp32, bf16),
    "fp16_comm": DtypePolicy(fp32, fp16, fp32, fp32, fp16),
}
EXACT_POLICIES = ("fp32", "fp32_main64", "mixed", "bf16")


@dataclass(frozen=True)
class UnitShape:
    """A unit of a model: sizes of its parameters, and which odd ones it has."""

    hidden: int
    bias: bool
    scalar: bool
    frozen: bool
    conv: bool
    unused: bool
    empty: bool
    borrows: bool
    """It uses a parameter of the root too."""
    other_dtype: bool


@dataclass(frozen=True)
class ModelShape:
    """A model; `path` names its units in the order they run."""

    seed: int
    width: int
    tokens: int
    units: tuple[UnitShape, ...]
    path: tuple[int, ...]
    skipped: int | None
    """A unit that every third microbatch leaves out, on whichever rank."""
    tied: bool


@dataclass(frozen=True)
class Program:
    """A model and how it is trained."""

    index: int
    model: ModelShape
    world: int
    outer: int
    has_outer: bool
    strategy: str
    outer_strategy: str
    dtype: str
    k: int
    optimizer: str
    clip: float | None
    scaling: str
    """Who divides: loop (loss / k, the engine by ranks), engine (grad_divisor), tokens (loss / M, nobody)."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def num_microbatches(self) -> int:
        return self.world * self.k

    @property
    def is_exact(self) -> bool:
        return self.options.get("numerics") == "exact"

    @property
    def arriving(self) -> torch.dtype:
        """The dtype autograd brings gradients in: where each microbatch is sent, that of the wire."""
        sent = self.strategy in ("optim_grads", "optim_grads_params")
        return POLICIES[self.dtype].wire if sent and not self.is_exact else POLICIES[self.dtype].grads

    @property
    def loss_scale(self) -> float:
        return {"loop": 1 / self.k, "engine": 1.0, "tokens": 1 / self.num_microbatches}[self.scaling]

    @property
    def divisor(self) -> float:
        return {"loop": float(self.world), "engine": float(self.num_microbatches), "tokens": 1.0}[self.scaling]


# -- drawing -----------------------------------------------------------------------------------------------------------


def _draw_model(source: random.Random, *, ordered_path: bool) -> ModelShape:
    def maybe(share: float = 0.3) -> bool:
        return source.random() < share

    units = tuple(
        UnitShape(source.choice((1, 2, 5, 11, 17, 23, 64)), maybe(), maybe(), maybe(), maybe(), maybe(), maybe(0.15),
                  maybe(0.2), maybe(0.4))
        for _ in range(source.randint(1, 5))
    )  # fmt: skip
    path = list(range(len(units)))
    if not ordered_path and maybe(0.5):
        path += [source.randrange(len(units)) for _ in range(source.randint(1, 2))]
        source.shuffle(path)
    in_order = sorted(path) == path and len(set(path)) == len(path)
    skipped = source.randrange(len(units)) if in_order and maybe(0.4) else None
    return ModelShape(
        source.randrange(1 << 20), source.choice((1, 3, 7, 13, 16)), source.randint(1, 3), units, tuple(path), skipped,
        maybe(0.5),
    )  # fmt: skip


def _draw_options(source: random.Random) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "double_buffer": source.random() < 0.4,
        "grad_buffer": source.choice(("flat", "flat", "concat")),
        "prefetch": source.choice((0, 1, 1, 2, 100)),
        "offload_optimizer": source.random() < 0.3,
        "transport": source.choice(("auto", "auto", "backend")),
        "separate_gather_group": source.choice((None, True)),
        "numerics": source.choice(("fast", "ordered", "exact", "exact")),
    }
    if chosen["double_buffer"]:
        chosen["prefetch"] = min(1, chosen["prefetch"])
    plain = Options()
    return {name: value for name, value in chosen.items() if value != getattr(plain, name)}


def draw(index: int) -> Program:
    """Program number `index`. Meshes, strategies and pairs take turns, everything else is drawn."""
    source = random.Random(7_919 * index + 1)
    place = index % len(MESHES)
    world, outer = MESHES[place]
    strategy = Strategy.parse(index // len(MESHES) % 4, "strategy")
    options = _draw_options(source)
    has_outer = outer > 1 or place == len(MESHES) - 1
    names = EXACT_POLICIES if options.get("numerics") == "exact" else tuple(POLICIES)
    return Program(
        index,
        _draw_model(source, ordered_path="double_buffer" in options),
        world,
        outer,
        has_outer,
        strategy.name,
        source.choice(("no_shard", "optim")) if has_outer else "no_shard",
        source.choice(names),
        source.randint(1, 3),
        source.choice(("sgd", "adamw")),
        source.choice((None, 0.02)),
        source.choice(("loop", "engine", "tokens")),
        options,
    )


# -- the model ---------------------------------------------------------------------------------------------------------


class Cell(nn.Module):
    """A unit: a residual step of width `width`."""

    def __init__(self, shape: UnitShape, width: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        super().__init__()
        dtype, other = dtypes if shape.other_dtype else (dtypes[0], dtypes[0])

        def matrix(*size: int, of: torch.dtype = dtype, trained: bool = True) -> nn.Parameter:
            return nn.Parameter((torch.randn(size) / math.sqrt(max(1, size[-1]))).to(of), requires_grad=trained)

        self.norm = nn.Parameter(torch.ones(width, dtype=other))
        self.up = matrix(shape.hidden, width)
        self.down = matrix(width, shape.hidden, of=other)
        self.bias = matrix(shape.hidden) if shape.bias else None
        self.scalar = nn.Parameter(torch.tensor(0.75, dtype=other)) if shape.scalar else None
        self.fixed = matrix(width, width, trained=False) if shape.frozen else None
        self.cube = matrix(width, 2, width) if shape.conv else None
        if shape.unused:
            self.unused = matrix(width, 3)
        if shape.empty:
            self.empty = matrix(0, 4)

    def forward(self, x: Tensor, borrowed: Tensor | None = None) -> Tensor:
        h = F.rms_norm(x, x.shape[-1:]) * self.norm.to(x.dtype)
        if self.fixed is not None:
            h = h + h @ self.fixed.to(x.dtype)
        if self.cube is not None:
            h = h + torch.einsum("bi,ikj->bkj", h, self.cube.to(x.dtype)).tanh().sum(1)
        if borrowed is not None:
            h = h * borrowed.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        h = F.linear(torch.tanh(F.linear(h, self.up.to(x.dtype), bias)), self.down.to(x.dtype))
        return x + (h if self.scalar is None else h * self.scalar.to(x.dtype))


class Stack(nn.Module):
    """Units between two matrices of the root, which may be one."""

    def __init__(self, shape: ModelShape, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        super().__init__()
        torch.manual_seed(shape.seed)
        self.shape = shape
        self.entry = nn.Linear(shape.width, shape.width, bias=False).to(dtypes[0])
        self.cells = nn.ModuleList(Cell(each, shape.width, dtypes) for each in shape.units)
        self.lent = nn.Parameter(torch.linspace(0.5, 1.5, shape.width).to(dtypes[1]))
        self.exit = nn.Linear(shape.width, shape.width).to(dtypes[0])
        self.never = nn.Parameter(torch.ones(3, dtype=dtypes[0]))
        if shape.tied:
            self.exit.weight = self.entry.weight

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        x = self.entry(x)
        for place in self.shape.path:
            if not (skip and place == self.shape.skipped):
                x = self.cells[place](x, self.lent if self.shape.units[place].borrows else None)
        y: Tensor = self.exit(x)
        return y


def build(program: Program) -> Stack:
    """The model with its first values, the same wherever it is built."""
    dtypes = POLICIES[program.dtype]
    return Stack(program.model, (dtypes.compute, dtypes.other))


def loss_of(model: nn.Module, program: Program, step: int, index: int, *, wide: bool = False) -> Tensor:
    """Loss of global microbatch `index` of a step, not scaled."""
    generator = torch.Generator().manual_seed(1_000 * step + index)
    shape = program.model
    x, y = torch.randn(2, shape.tokens, shape.width, generator=generator, dtype=fp64)
    dtype = fp64 if wide else POLICIES[program.dtype].compute
    out = model(x.to(POLICIES[program.dtype].compute).to(dtype), (step + index) % 3 == 1)
    return (out.to(torch.promote_types(fp32, out.dtype)) - y.to(torch.promote_types(fp32, out.dtype))).square().mean()


def make_optimizer(name: str, named: dict[str, nn.Parameter], **more: Any) -> torch.optim.Optimizer:
    """Two groups with their own rate and decay; unused and scalar parameters decay too."""
    trained = {n: p for n, p in named.items() if p.requires_grad}
    groups = [
        {"params": [p for p in trained.values() if p.dim() > 1], "weight_decay": 0.1, "lr": 0.05},
        {"params": [p for p in trained.values() if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.02},
    ]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=1.0, momentum=0.9, **more)
    return torch.optim.AdamW(groups, lr=1.0, eps=1e-3, **more)


# -- the same on one process -------------------------------------------------------------------------------------------


@dataclass
class Record:
    """By step: losses by global microbatch, gradients, norms, weights; at the end one more loss.

    sizes: of each element of the first step's gradient, the sum of absolute values over microbatches, scaled alike.
    """

    losses: list[list[float]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    last: float = 0.0
    sizes: dict[str, Tensor] = field(default_factory=dict)


Summing = Callable[[list[Tensor], float], Tensor]


def sum_wide(gradients: list[Tensor], divisor: float) -> Tensor:
    """In fp64."""
    return torch.stack([each.double() for each in gradients]).sum(0) / divisor


def sum_integers(gradients: list[Tensor], divisor: float) -> Tensor:
    """What numerics=exact defines: multiples of 2^-44, added as integers, divided and rounded once."""
    total = sum((each.double() * 2.0**44).round().to(torch.int64) for each in gradients)
    assert isinstance(total, Tensor)
    values = [element / 2**44 for element in total.flatten().tolist()]  # Python divides integers with one rounding
    return (torch.tensor(values, dtype=fp64).reshape(total.shape) / divisor).to(fp32)


def train_plain(program: Program, summing: Summing, *, wide: bool = False) -> Record:
    """Plain torch; `wide`: everything in fp64."""
    dtypes = POLICIES[program.dtype]
    module = build(program).double() if wide else build(program)
    named = dict(module.named_parameters())
    main_dtype, grad_dtype = (fp64, fp64) if wide else (dtypes.main, dtypes.grads)
    main = {n: nn.Parameter(p.detach().to(main_dtype), p.requires_grad) for n, p in named.items() if p.requires_grad}
    optimizer = make_optimizer(program.optimizer, main, foreach=False)
    record = Record()
    for step in range(STEPS):
        found: dict[str, list[Tensor]] = {name: [] for name in main}
        used: set[str] = set()
        record.losses.append([])
        for index in range(program.num_microbatches):
            loss = loss_of(module, program, step, index, wide=wide)
            record.losses[-1].append(loss.item())
            for name in main:  # several uses of one parameter are added up in the dtype its gradient arrives in
                named[name].grad, named[name].grad_dtype = None, grad_dtype if wide else program.arriving
            (loss * program.loss_scale).backward()
            for name, param in main.items():
                gradient = named[name].grad
                used |= set() if gradient is None else {name}
                found[name].append(torch.zeros_like(param, dtype=grad_dtype) if gradient is None else gradient)
        summed = {name: summing(each, program.divisor).to(grad_dtype) for name, each in found.items()}
        if step == 0:
            record.sizes = {n: sum_wide([g.abs() for g in each], program.divisor) for n, each in found.items()}
        record.gradients.append({name: each.clone() for name, each in summed.items()})
        norm = _norm(list(summed.values()), program)
        record.norms.append(norm)
        _update(program, optimizer, main, {name: each for name, each in summed.items() if name in used}, norm)
        with torch.no_grad():
            for name, param in main.items():
                named[name].copy_(param)
        record.weights.append({n: main.get(n, p).detach().clone() for n, p in named.items()})
    record.last = loss_of(module, program, STEPS, 0, wide=wide).item()
    return record


def _norm(gradients: list[Tensor], program: Program) -> float:
    if program.is_exact and gradients[0].dtype == fp32:
        return fixed_point.norm_from_counters(fixed_point.square_counters(gradients, torch.device("cpu")))
    return math.sqrt(sum(each.double().square().sum().item() for each in gradients))


def _update(
    program: Program,
    optimizer: torch.optim.Optimizer,
    main: dict[str, nn.Parameter],
    gradients: dict[str, Tensor],
    norm: float,
) -> None:
    coefficient = 1.0 if program.clip is None else program.clip / (norm + 1e-6)
    for name, param in main.items():
        param.grad = None  # of what no microbatch used
        if name in gradients:
            gradient = gradients[name].mul(coefficient) if coefficient < 1.0 else gradients[name]
            param.grad = gradient.to(param.dtype)
    optimizer.step()
