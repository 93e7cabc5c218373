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
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from harness.fp8.matmul import multiply
from harness.fp8.quantize import WHOLE, Column, Quantized, amax_grid, is_8_bit, quantize, scales_of
from harness.fp8.recipes import Recipe, recipe_of
from harness.fp8.tp_shards import adds_bias, gradient_of, input_here, output_of, take_largest, tp_shard_here
from harness.private_torch import version_of


class Fp8Linear(nn.Linear):
    """A linear layer of an FP8 recipe; made of an ordinary one by `convert`.

    Its weight is fp32, bf16 or fp16 and quantized at each use, or holds 8 bits already. Then whoever quantized it has
    set `encoded_weight`, which gives what products take, as the weight [out, in] lies.
    """

    recipe: Recipe
    encoded_weight: Callable[[], Quantized] | None

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
            problem = _problem(layer, found, owners)
            if not problem:
                _become(layer, found)
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

        Where a plan of tensor parallelism has cut the weight, x may be plain or a DTensor, and the result is a DTensor;
        see [Note: FP8 and tensor parallelism]. TypeError if x is neither fp32 nor bf16 nor fp16.
        """
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        weight, trains = self.weight, torch.is_grad_enabled()
        x = input_here(input, weight) if isinstance(weight, DTensor) else input
        rows = x.reshape(-1, x.shape[-1])
        y: Tensor = _Product.apply(rows, weight, self.bias, self, trains)  # type: ignore[no-untyped-call] # torch leaves it unannotated
        y = y.view(*x.shape[:-1], y.shape[-1])
        return output_of(y, weight) if isinstance(weight, DTensor) else y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.recipe.name}"

    def weight_for(self, *, transposed: bool) -> Quantized:
        """The weight [out, in], or its transpose [in, out], quantized for a product over its last dimension.

        Of a weight that is cut, this rank's tp_shard: *collective* over the axis that cuts it, where it does not hold 8
        bits and its one scale is made now. RuntimeError if it holds 8 bits without scales.
        """
        weight = tp_shard_here(self.weight)
        if not is_8_bit(weight.dtype):
            held = self._quantize(Column.weights, weight, self.weight, transposed=transposed)
        elif self.encoded_weight is not None:
            held = self.encoded_weight()
        else:
            raise RuntimeError(
                f"the weight holds {weight.dtype} and nothing says its scales under fp8={self.recipe.name}:"
                " weights are cast to 8 bits by the engine that shards them, never by module.to()"
            )
        return held.t if transposed else held

    def quantize_weight(self, weight: Tensor) -> Quantized:
        """An unsharded weight [out, in] as it would be multiplied; as it lies."""
        return self._quantize(Column.weights, weight, weight, transposed=False)

    def quantize_pair(self, column: Column, values: Tensor) -> tuple[Quantized, Quantized]:
        """An input, or a gradient of the output, [rows, columns], and its transpose, each for a product over its last
        dimension."""
        first = self._quantize(column, values, values, transposed=False)
        if self.recipe.operands[column].is_symmetric:
            return first, first.t
        return first, self._quantize(column, values, values, transposed=True).t

    def _quantize(self, column: Column, values: Tensor, cut: Tensor, *, transposed: bool) -> Quantized:
        """The values as they lie, in tiles for a product with them or with their transpose.

        cut: the tensor of which they are this rank's TP shard.
        """
        operand, scaling = self.recipe.operands[column], self.recipe.scaling
        scale = None
        if column is Column.weights and operand.tile == WHOLE:
            scale, _ = scales_of(take_largest(amax_grid(values, WHOLE), cut), operand.format, scaling)
        return quantize(values, operand.format, operand.tile.t if transposed else operand.tile, scaling, scale)


class _Product(torch.autograd.Function):
    """See [Note: Three products]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Fp8Linear, trains: bool) -> Tensor:
        """x [tokens, in], weight [out, in], bias [out]; y [tokens, out] in the dtype of x.

        trains: gradients are on.
        """
        for_y, for_dw = layer.quantize_pair(Column.activations, x)
        y = multiply(for_y, layer.weight_for(transposed=False))
        if bias is not None and adds_bias(weight):
            y = y + tp_shard_here(bias).float()
        ctx.layer, ctx.tile, ctx.dtype, ctx.bias = layer, for_dw.tile, x.dtype, bias
        ctx.cut = _CutWeight(weight) if isinstance(weight, DTensor) and trains else None
        ctx.save_for_backward(for_dw.payload, for_dw.scale_inv, weight if ctx.cut is None else None)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """grad [tokens, out]; gradients of x and weight in the dtype of x, of bias in its own."""
        payload, scale_inv, weight = ctx.saved_tensors  # torch raises here where the weight was edited since
        if ctx.cut is not None:
            weight = ctx.cut.unedited()
        for_dx, for_dw = ctx.layer.quantize_pair(Column.gradients, grad)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = multiply(for_dx, ctx.layer.weight_for(transposed=True)).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            dw = gradient_of(weight, multiply(for_dw, Quantized(payload, scale_inv, ctx.tile)).to(ctx.dtype))
        if ctx.needs_input_grad[2]:
            db = gradient_of(ctx.bias, grad.float().sum(dim=0).to(ctx.bias.dtype))
        return dx, dw, db, None, None


class _CutWeight:
    """A DTensor that a backward needs. `save_for_backward` would note the dtype it came with, and in a recomputation
    that of the 8 bits in it: `torch.utils.checkpoint` takes that for another forward."""

    def __init__(self, weight: DTensor) -> None:
        self._weight, self._edits = weight, version_of(weight)

    def unedited(self) -> DTensor:
        if version_of(self._weight) != self._edits:
            raise RuntimeError(
                "the weight of an FP8 layer has been modified by an inplace operation between its forward and its"
                " backward, which needs it as it was"
            )
        return self._weight


def layers_of(module: nn.Module) -> list[Fp8Linear]:
    return [each for each in module.modules() if isinstance(each, Fp8Linear)]


def _become(layer: Any, recipe: Recipe) -> None:
    """Make an ordinary layer one of a recipe, its weight and bias being kept."""
    ordinary = type(layer)
    if ordinary not in _MADE:  # its own methods stay
        _MADE[ordinary] = type(f"Fp8{ordinary.__name__}", (Fp8Linear, ordinary), {})
    layer.__class__ = _MADE[ordinary]
    layer.recipe = recipe
    layer.encoded_weight = None


_MADE: dict[Any, type] = {nn.Linear: Fp8Linear}


def _problem(layer: nn.Linear, recipe: Recipe, owners: Counter[int]) -> str:
    """The reason why a layer cannot have a recipe; "" where it can."""
    shape = tp_shard_here(layer.weight).shape
    if not recipe.fits(shape):
        which = "a TP shard of its weight" if isinstance(layer.weight, DTensor) else "its weight"
        return f"{which} has shape {list(shape)}: both sizes must be multiples of {recipe.multiple}"
    if owners[id(layer.weight)] > 1:
        return "its weight belongs to another module too (tied), which cannot read 8 bits: leave it out"
    return ""
