"""A model whose weights are not whole between uses, and programs that use parts of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.fsdp import MixedPrecisionPolicy, ShardedModel, fully_shard

BF16 = MixedPrecisionPolicy(main_params_dtype=torch.float32)


class Marked(nn.Parameter):
    """A parameter class of the program's own."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale = Marked(torch.full((6,), 0.7))
        self.seen: set[type] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen |= {type(self.linear.weight), type(self.scale)}
        return x + torch.tanh(self.linear(x)) * self.scale


class Net(nn.Module):
    """An encoder and a decoder of which methods besides forward run parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.blocks = nn.Embedding(10, 6), nn.Sequential(Block(), Block(), Block())
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.blocks(self.embed(tokens)) * self.frozen
        return F.linear(x, self.embed.weight)

    def encode(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.blocks[1](self.blocks[0](self.embed(tokens)))
        return x @ self.embed.weight.T

    @torch.no_grad()
    def generate(self, tokens: Tensor, length: int = 4) -> Tensor:
        """Greedy: the model once a token, and parts of it before and after."""
        found = []
        for _ in range(length):
            tokens = (self.encode(tokens) + self(tokens) @ self.embed.weight.mean(1)[:, None]).argmax(-1)
            found.append(tokens)
        return torch.stack(found)


def built(strategy: str, *, narrow: bool = False, **more: Any) -> tuple[ShardedModel, torch.optim.Optimizer]:
    module = Net().bfloat16() if narrow else Net()
    more |= {"mixed_precision_policy": BF16} if narrow else {}
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    return fully_shard(module, optimizer, **{"fsdp_unit_modules": [Block], "zero_dp_strategy": strategy} | more)


def tokens_of(rank: int) -> Tensor:
    return (torch.arange(5) + 2 * rank) % 10


def released(model: ShardedModel) -> bool:
    return not any(bucket.is_whole for bucket in model._parts.buckets)
