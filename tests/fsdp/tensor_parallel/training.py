"""Trains a small decoder on a mesh of data-parallel by tensor-parallel ranks, and plainly in one process.

Its sizes divide nothing evenly but heads. Biases are everywhere, and one norm is frozen. `B` sequences, `S` positions,
`D` width, `H` heads, `V` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from harness.fsdp import MegatronModel, MixedPrecisionPolicy, fully_shard


@dataclass(frozen=True)
class Shape:
    """What is built, and how it is cut."""

    vocab: int = 37
    dim: int = 12
    heads: int = 4
    hidden: int = 24
    layers: int = 2
    tied: bool = False
    sequence_parallel: bool = False
    pixels: bool = False
    """Not tokens, but `vocab` numbers of each position come in."""


class Attention(nn.Module):
    """Causal self-attention; how many heads this rank has is seen from what a projection gives."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.dim // shape.heads
        self.q, self.k, self.v = (nn.Linear(shape.dim, shape.dim) for _ in range(3))
        self.o = nn.Linear(shape.dim, shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.dim), nn.LayerNorm(shape.dim)
        self.attention = Attention(shape)
        self.up, self.down = nn.Linear(shape.dim, shape.hidden), nn.Linear(shape.hidden, shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = (
            nn.Linear(shape.vocab, shape.dim, bias=False) if shape.pixels else nn.Embedding(shape.vocab, shape.dim)
        )
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=not shape.tied)
        self.scale = nn.Parameter(torch.ones(()))
        if shape.tied:
            self.head.weight = self.embed.weight
        self.blocks[0].norm2.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x)) * self.scale
        return out


def built(shape: Shape, dtype: torch.dtype = torch.float64, seed: int = 0) -> Decoder:
    """The model, of equal values everywhere."""
    torch.manual_seed(seed)
    model = Decoder(shape).to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return model


def cut(model: Decoder, shape: Shape, mesh: DeviceMesh) -> Decoder:
    """Cut it over one mesh dimension by torch's own styles."""
    along = Shard(1) if shape.sequence_parallel else Replicate()
    block: dict[str, ParallelStyle] = {
        "attention": PrepareModuleInput(input_layouts=(along,), desired_input_layouts=(Replicate(),)),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.o": RowwiseParallel(output_layouts=along),
        "up": ColwiseParallel(input_layouts=along),
        "down": RowwiseParallel(output_layouts=along),
    }
    ends: dict[str, ParallelStyle] = {
        "embed": ColwiseParallel(output_layouts=along)
        if shape.pixels
        else RowwiseParallel(input_layouts=Replicate(), output_layouts=along),
        "head": ColwiseParallel(input_layouts=along, output_layouts=Replicate()),
    }
    if shape.sequence_parallel:
        block |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        ends |= {"norm": SequenceParallel()}
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    for each in model.blocks:
        parallelize_module(each, mesh, block)
    parallelize_module(model, mesh, ends)
    if shape.tied:
        model.head.weight = model.embed.weight
    for name, param in model.named_parameters():
        param.requires_grad_(name not in frozen)
    return model


def in_fsdp2(model: Decoder, shape: Shape, mesh: DeviceMesh) -> Decoder:
    """The model over the same plan in FSDP2."""
    model.scale = nn.Parameter(model.scale.detach().reshape(1))  # it splits no scalar
    cut(model, shape, mesh["tp"])
    for block in (part for part in model.modules() if isinstance(part, Block)):
        fsdp2(block, mesh=mesh["inner"])
    return fsdp2(model, mesh=mesh["inner"])


def tokens_of(step: int, sequence: int, shape: Shape, length: int = 8) -> Tensor:
    """One sequence of a step: int64, shape [length + 1]."""
    generator = torch.Generator().manual_seed(1000 * step + sequence)
    return torch.randint(shape.vocab, (length + 1,), generator=generator)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean cross entropy of rows [B, S + 1]."""
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


PLAIN = Shape()
SEQUENCES = 2
"""Sequences of a microbatch."""


@dataclass(frozen=True)
class Case:
    """One training. inner, outer, tp: sizes of the axes. k: microbatches a step."""

    inner: int
    tp: int
    outer: int = 1
    strategy: str = "optim_grads_params"
    outer_strategy: str = "no_shard"
    k: int = 1
    shape: Shape = PLAIN
    optimizer: str = "adamw"
    clip: float | None = None
    steps: int = 3
    dtype: torch.dtype = torch.float64
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def data_parallel(self) -> int:
        """Ranks with data of their own."""
        return self.inner * self.outer

    @property
    def world(self) -> int:
        """All ranks."""
        return self.data_parallel * self.tp


@dataclass
class Record:
    """What a training was: of each step the loss of this rank's data and the norm; whole tensors by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step, before clipping."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """After the last step."""


def optimizer_of(name: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Settings that leave a mark: decay and momentum."""
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def rows_of(case: Case, step: int, microbatch: int, place: int) -> Tensor:
    """Sequences that a data-parallel rank sees."""
    first = (microbatch * case.data_parallel + place) * SEQUENCES
    return torch.stack([tokens_of(step, first + number, case.shape) for number in range(SEQUENCES)])


def mesh_of(case: Case) -> DeviceMesh:
    """Three axes, the tensor-parallel one last; one mesh of its sizes in a visit, as in a program: to connect its
    groups takes longer than a step."""
    return _mesh(case.outer, case.inner, case.tp)


@cache
def _mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner", "tp"))


def sharded(case: Case, mesh: DeviceMesh) -> tuple[MegatronModel, torch.optim.Optimizer]:
    """The decoder, cut and then sharded."""
    model = built(case.shape, case.dtype)
    if case.tp > 1:
        cut(model, case.shape, mesh["tp"])
    optimizer = optimizer_of(case.optimizer, [param for param in model.parameters() if param.requires_grad])
    outer = {"dp_outer_dim": "outer"} if case.outer > 1 else {}
    return fully_shard(
        model,
        optimizer,
        device_mesh=mesh,
        dp_shard_dim="inner",
        tp_dim="tp",
        fsdp_unit_modules=[Block],
        zero_dp_strategy=case.strategy,
        outer_dp_sharding_strategy=case.outer_strategy if case.outer > 1 else "no_shard",
        **{"mixed_precision_policy": MixedPrecisionPolicy(main_params_dtype=None), **outer, **dict(case.options)},
    )


def step_of(case: Case, model: MegatronModel, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Update once, by this rank's data of a step."""
    mesh = mesh_of(case)
    place = mesh.get_local_rank("outer") * case.inner + mesh.get_local_rank("inner")
    loss_of(model, rows_of(case, step, 0, place)).backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_of(tensor: Tensor) -> Tensor:
    """Put together from all ranks where it is cut. *Collective* there."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(rank: int, case: Case) -> Record:
    """Train on this rank."""
    mesh = mesh_of(case)
    model, optimizer = sharded(case, mesh)
    place = mesh.get_local_rank("outer") * case.inner + mesh.get_local_rank("inner")
    found = Record()
    for step in range(case.steps):
        total = 0.0
        for microbatch in range(case.k):
            model.set_model_auto_sync(microbatch == case.k - 1)
            loss = loss_of(model, rows_of(case, step, microbatch, place))
            (loss / case.k).backward()
            total += loss.item() / case.k
        if step == 0:
            found.gradients = dict(model.full_gradients())
        norm = float(model.grad_norm() if case.clip is None else model.clip_grad_norm_(case.clip))
        found.losses.append(total)
        found.norms.append(norm)
        optimizer.step()
        optimizer.zero_grad()
    found.weights = dict(model.full_weights())
    model.close()
    return found


def train_all(rank: int, cases: list[Case]) -> list[Record]:
    """One after the other."""
    return [train(rank, case) for case in cases]


def alone(case: Case) -> Record:
    """The same in one process, whole, in plain torch and fp64. Losses are means over the data-parallel ranks."""
    model = built(case.shape)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = optimizer_of(case.optimizer, params)
    found = Record()
    for step in range(case.steps):
        parts = [
            loss_of(model, rows_of(case, step, microbatch, place))
            for microbatch in range(case.k)
            for place in range(case.data_parallel)
        ]
        loss = torch.stack(parts).mean()
        loss.backward()
        found.losses.append(loss.item())
        if step == 0:
            found.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(params, case.clip if case.clip is not None else float("inf"))
        found.norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    found.weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return found
