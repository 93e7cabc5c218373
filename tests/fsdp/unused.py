"""A model of which every step leaves something unused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 6
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


class Branch(nn.Module):
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
        self.parts = nn.ModuleList(Branch() for _ in range(4))
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
