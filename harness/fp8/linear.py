"""A linear layer whose three products multiply 8-bit numbers, and how ordinary ones become such.

[Note: Three products] With x [tokens, in], w [out, in] and the gradient g [tokens, out] of y = x w^T, each product sums
over the last dimension of both operands:

    y  [tokens, out] = x        times w
    dx [tokens, in]  = g        times w^T quantized for it
    dw [out, in]     = g^T      times x^T, both quantized for it

Results are rounded once, from fp32 to the dtype of x; bias is added before. What backward needs of x is kept in 8 bits.

The product of two quantized matrices: `torch.nn.functional.scaled_mm` where a device has it, else in fp32.

Products of two 8-bit numbers are exact in fp32; sums are made in fp32, in the order of torch's own matrix product.
Where each operand has one scale, the sum of products of payloads is multiplied by the product of both; elsewhere
operands are dequantized first, which is exact under scales that are powers of two (unless the value leaves fp32's
range). cuBLASLt's order of sums is another one, and before Blackwell its accumulator keeps fewer bits.

The first product of two tiles on a device is tried with numbers whose product is exact: where it raises or is wrong, a
warning says so, and products of these tiles are emulated from then on.

Sources of the layouts of scales: torch's checks of its arguments (`aten/src/ATen/native/cuda/ScaledBlas.cpp`, and for
tensors without memory `torch/_meta_registrations.py`).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.functional import ScalingType

from harness.fp8.quantize import E4M3, WHOLE, Quantized, Recipe, Tile, is_8_bit, recipe_of

_LINE, _SQUARE = Tile(1, 128), Tile(128, 128)
PAIRS = ((WHOLE, WHOLE), (_LINE, _LINE), (_LINE, _SQUARE))
"""Tiles of a and of b in `a @ b.T` that some GPUs multiply."""


def multiply(a: Quantized, b: Quantized) -> Tensor:
    """`a @ b.T` of shape [m, n] in fp32, for a of shape [m, k] and b of shape [n, k].

    By the device itself where it multiplies these tiles, else emulated.
    """
    device = a.payload.device
    is_there = device.type == "cuda" and has_product(a.tile, b.tile, device)
    return scaled_mm(a, b) if is_there else emulate(a, b)


def emulate(a: Quantized, b: Quantized) -> Tensor:
    """As `multiply`, in fp32."""
    if a.tile == WHOLE == b.tile:
        return (a.payload.float() @ b.payload.float().t()) * (a.scale_inv * b.scale_inv)
    return a.dequantize() @ b.dequantize().t()


def scaled_mm(a: Quantized, b: Quantized) -> Tensor:
    """As `multiply`, of tiles that the device multiplies, without fast accumulation; zeros fill up sizes."""
    left, right = _filled(a), _filled(b)
    scales = *_scales(left), *_scales(right)
    product = functional.scaled_mm(left.payload, right.payload.t(), *scales, output_dtype=torch.float32)
    return product[: a.payload.shape[0], : b.payload.shape[0]]


def _filled(matrix: Quantized) -> Quantized:
    """A row-major matrix of sizes that the hardware takes; new tiles have a scale of 1."""
    multiple = 16 if matrix.tile == WHOLE else 128
    rows, columns = (-size % multiple for size in matrix.payload.shape)
    payload = matrix.payload.contiguous()
    if rows or columns:
        payload = functional.pad(payload.view(torch.uint8), (0, columns, 0, rows)).view(payload.dtype)
    grid, held = matrix.tile.grid(payload.shape), matrix.scale_inv.shape
    more = (0, grid[1] - held[1], 0, grid[0] - held[0])
    scale_inv = functional.pad(matrix.scale_inv, more, value=1.0) if any(more) else matrix.scale_inv
    return Quantized(payload, scale_inv, matrix.tile)


def _scales(matrix: Quantized) -> tuple[Tensor, ScalingType]:
    """Scales of lines lie as [rows, columns / 128], column by column; those of squares as [columns / 128, rows / 128],
    the first rounded up to a multiple of 4, column by column."""
    if matrix.tile == WHOLE:
        return matrix.scale_inv.reshape(1), ScalingType.TensorWise
    if matrix.tile == _LINE:
        return matrix.scale_inv.t().contiguous().t(), ScalingType.BlockWise1x128
    missing = -matrix.scale_inv.shape[1] % 4
    return functional.pad(matrix.scale_inv, (0, missing), value=1.0).contiguous().t(), ScalingType.BlockWise128x128


@cache
def has_product(a: Tile, b: Tile, device: torch.device) -> bool:
    """True if a device multiplies matrices of these tiles: a product of small integers, exact in any order of sums, is
    right. Warns where it is not, or raises."""
    if (a, b) not in PAIRS:
        return False
    left, right = (_small_integers(tile, device, seed) for seed, tile in enumerate((a, b)))
    try:
        if torch.equal(scaled_mm(left, right), emulate(left, right)):
            return True
        why = "gives other numbers"
    except (RuntimeError, ValueError, NotImplementedError) as error:
        why = f"raises {error}"
    warnings.warn(
        f"scaled_mm of tiles {a} by {b} on {device} {why}: FP8 products of these tiles are emulated in fp32, which is"
        " slower",
        stacklevel=2,
    )
    return False


def _small_integers(tile: Tile, device: torch.device, seed: int) -> Quantized:
    """A matrix of -1, 0 and 1, with a scale of 1, 2 or 4 for each tile: sums that any accumulator holds."""
    shape = (256, 256)
    generator = torch.Generator().manual_seed(seed)
    payload = torch.randint(-1, 2, shape, generator=generator).float().to(E4M3)
    scale_inv = 2.0 ** torch.randint(0, 3, tile.grid(shape), generator=generator)
    return Quantized(payload.to(device), scale_inv.to(device), tile)


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
