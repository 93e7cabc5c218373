"""A model whose projections multiply 8-bit numbers, in the double precision of the perturbed reference.

[Note: Casts as they are] The error of a cast to four significant bits is no small relative noise: it depends on the
largest value of a tile, and what lies below the format's smallest number is lost, always downwards. So operands are
quantized by the recipe itself, after the errors that wider roundings have put into them, and multiplied exactly. Under
delayed scaling the scales are those of a first step, 1. What a narrow pass errs by, the reference is then moved by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from harness.config.projections import NAMES
from harness.fp8.linear import Fp8Linear
from harness.fp8.quantize import Column

Rounded = Callable[[Tensor], Tensor]
"""Puts the error of one rounding to the compute dtype behind a result."""


@contextmanager
def quantizing(model: nn.Module, recipe: str, rounded: Rounded) -> Iterator[None]:
    """Let the projections of a model in fp64 multiply as a recipe's layers do, while the body runs.

    Args:
        recipe: name of one. rounded: of the three products' results.
    """
    layers = [each for name, each in model.named_modules() if name.rpartition(".")[2] in NAMES]
    for layer in layers:
        assert isinstance(layer, nn.Linear)
        layer.__dict__["forward"] = _Forward(layer, recipe, rounded)
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["forward"]


class _Forward:
    def __init__(self, layer: nn.Linear, recipe: str, rounded: Rounded) -> None:
        self.layer, self.rounded = layer, rounded
        baseline = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        Fp8Linear.convert(baseline, recipe, history=1, device=layer.weight.device)
        assert isinstance(baseline, Fp8Linear)
        self.recipe = baseline

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        found: Tensor = _Product.apply(rows, self.layer.weight, self)  # type: ignore[no-untyped-call] # torch's own
        return found.view(*x.shape[:-1], found.shape[-1])

    def input(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """An input [tokens, in] as it is when columns are summed over, and when rows are."""
        first, second = self.recipe.quantize_pair(Column.activations, x.detach().float(), trains=False)
        return first.dequantize().double(), second.t.dequantize().double()

    def weight(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A weight [out, in] in the forward, and in the backward."""
        held = (self.recipe.quantize_weight(weight.detach().float(), transposed=way) for way in (False, True))
        first, second = (each.dequantize().double() for each in held)
        return first, second

    def gradient(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """A gradient [tokens, out] as it is when columns are summed over, and when rows are."""
        first, second = self.recipe.quantize_pair(Column.gradients, grad.detach().float(), trains=False)
        return first.dequantize().double(), second.t.dequantize().double()


class _Product(torch.autograd.Function):
    """The products of [Note: Three products] in harness/fp8/linear.py; errors are put behind results alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: _Forward) -> Tensor:
        with _disable_current_modes():
            (x1, x2), (w1, w2) = layer.input(x), layer.weight(weight)
            ctx.layer = layer
            ctx.save_for_backward(x2, w2)
            return layer.rounded(x1 @ w1.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        layer: _Forward = ctx.layer
        with _disable_current_modes():
            x2, w2 = ctx.saved_tensors
            g1, g2 = layer.gradient(grad)
            return layer.rounded(g1 @ w2), layer.rounded(g2.t() @ x2), None
