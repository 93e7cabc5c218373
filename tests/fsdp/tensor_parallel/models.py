"""A small decoder that tensor parallelism cuts by a plan: sizes that divide nothing evenly but heads.

`B` sequences, `S` positions, `D` width, `H` heads, `V` tokens. Biases everywhere; one frozen norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


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
        self.embed = nn.Embedding(shape.vocab, shape.dim)
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
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=along),
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


def tokens_of(step: int, sequence: int, shape: Shape, length: int = 8) -> Tensor:
    """One sequence of a step: int64, shape [length + 1]."""
    generator = torch.Generator().manual_seed(1000 * step + sequence)
    return torch.randint(shape.vocab, (length + 1,), generator=generator)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean cross entropy of rows [B, S + 1]."""
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
