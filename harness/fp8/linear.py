"""A linear layer whose three products multiply 8-bit numbers, and how ordinary ones become such.

[Note: Three products] With x [tokens, in], w [out, in] and the gradient g [tokens, out] of y = x w^T, each product sums
over the last dimension of both operands:

    y  [tokens, out] = x        times w
    dx [tokens, in]  = g        times w^T quantized for it
    dw [out, in]     = g^T      times x^T, both quantized for it

Results are rounded once, from fp32 to the dtype of x; bias is added before. What backward needs of x is kept in 8 bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from harness.fp8.matmul import multiply
from harness.fp8.quantize import Quantized, is_8_bit
from harness.fp8.recipes import Recipe, recipe_of

CUT = "tensor parallelism cuts its weight, which 8-bit products take whole: leave it out of FP8, or out of the plan"


class Fp8Linear(nn.Linear):
    """A linear layer of an FP8 recipe; made of an ordinary one by `convert`.

    Its weight is fp32, bf16 or fp16 and quantized at each use, or holds 8 bits already. Then whoever quantized it has
    set `encoded_weight`, which gives what products take, as the weight [out, in] lies.
    """

    recipe: Recipe
    encoded_weight: Callable[[], Quantized] | None = None

    @staticmethod
    def convert(
        module: nn.Module,
        recipe: str | Enum,
        chosen: Callable[[str, nn.Linear], bool] | None = None,
    ) -> list[str]:
        """Make linear layers of a module multiply 8-bit numbers, in place, before sharding. Parameters are kept.

        Args:
            module: the module whose layers are changed.
            recipe: current, block, mx or mx_32x32; see [Note: FP8].
            chosen: whether to convert a layer, by its name and module; None: all layers whose weight fits the recipe
                and belongs to no other module.

        Returns:
            The names of the converted layers, in definition order.

        Raises:
            ValueError: there is no layer to convert; or a chosen one has sizes that the recipe cannot tile, or a weight
                that another module shares.
        """
        found = recipe_of(recipe)
        owners = Counter(id(param) for _, param in module.named_parameters(remove_duplicate=False))
        names: list[str] = []
        for name, layer in module.named_modules():
            is_ordinary = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
            if not is_ordinary or (chosen is not None and not chosen(name, layer)):
                continue
            made: Any = layer  # its weight and bias are kept
            kind: Any = type(layer)
            if not (problem := _problem(layer, found, owners)):
                made.__class__, made.recipe = _made_of(kind), found
                names.append(name)
            elif chosen is not None:
                raise ValueError(f"{name or 'the module'} was chosen for fp8={found.name}, but {problem}")
        if not names:
            raise ValueError(
                f"fp8={found.name} found no linear layer in {type(module).__name__}: a weight of its own with both"
                f" sizes multiples of {found.multiple} is what it takes"
            )
        return names

    @property
    def is_held(self) -> bool:
        """An engine may keep the weight in 8 bits: it is trained, and both directions take the same tiles of it."""
        return self.weight.requires_grad and self.recipe.weights.is_symmetric

    def forward(self, input: Tensor) -> Tensor:
        """x w^T + bias: shape [..., in] to [..., out], in the dtype of x (of autocast where that is on).

        TypeError: x is neither fp32 nor bf16 nor fp16, or tensor parallelism has cut the weight.
        """
        if isinstance(self.weight, DTensor):
            raise TypeError(CUT)
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        rows = input.reshape(-1, input.shape[-1])
        y: Tensor = _Product.apply(rows, self.weight, self.bias, self)  # type: ignore[no-untyped-call] # torch leaves it unannotated
        return y.view(*input.shape[:-1], y.shape[-1])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.recipe.name}"

    def weight_for(self, *, transposed: bool) -> Quantized:
        """The weight [out, in], or its transpose [in, out], quantized for a product over its last dimension.
        RuntimeError if it holds 8 bits without scales."""
        weight = self.weight.detach()
        if not is_8_bit(weight.dtype):
            held = self.recipe.quantize(self.recipe.weights, weight, transposed=transposed)
        elif self.encoded_weight is not None:
            held = self.encoded_weight()
        else:
            raise RuntimeError(
                f"the weight holds {weight.dtype} and nothing says its scales under fp8={self.recipe.name}:"
                " weights are cast to 8 bits by the engine that shards them, never by module.to()"
            )
        return held.t if transposed else held


class _Product(torch.autograd.Function):
    """See [Note: Three products]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Fp8Linear) -> Tensor:
        """x [tokens, in], weight [out, in], bias [out]; y [tokens, out] in the dtype of x."""
        for_y, for_dw = layer.recipe.quantize_pair(layer.recipe.activations, x)
        y = multiply(for_y, layer.weight_for(transposed=False))
        if bias is not None:
            y = y + bias.float()
        ctx.layer, ctx.tile, ctx.dtype = layer, for_dw.tile, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(for_dw.payload, for_dw.scale_inv, weight)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """grad [tokens, out]; gradients of x and weight in the dtype of x, of bias in its own."""
        payload, scale_inv, _ = ctx.saved_tensors  # torch raises here where the weight was edited since
        recipe = ctx.layer.recipe
        for_dx, for_dw = recipe.quantize_pair(recipe.gradients, grad)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = multiply(for_dx, ctx.layer.weight_for(transposed=True)).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            dw = multiply(for_dw, Quantized(payload, scale_inv, ctx.tile)).to(ctx.dtype)
        if ctx.needs_input_grad[2]:
            db = grad.float().sum(dim=0).to(ctx.bias_dtype)
        return dx, dw, db, None


def layers_of(module: nn.Module) -> list[Fp8Linear]:
    return [each for each in module.modules() if isinstance(each, Fp8Linear)]


@cache
def _made_of(ordinary: type) -> type:
    """A layer's own methods stay."""
    return Fp8Linear if ordinary is nn.Linear else type(f"Fp8{ordinary.__name__}", (Fp8Linear, ordinary), {})


def _problem(layer: nn.Linear, recipe: Recipe, owners: Counter[int]) -> str:
    """The reason why a layer cannot have a recipe; "" where it can."""
    if isinstance(layer.weight, DTensor):
        return CUT
    if any(size == 0 or size % recipe.multiple for size in layer.weight.shape):
        return f"its weight has shape {list(layer.weight.shape)}: both sizes must be multiples of {recipe.multiple}"
    if owners[id(layer.weight)] > 1:
        return "its weight belongs to another module too (tied), which cannot read 8 bits: leave it out"
    return ""
