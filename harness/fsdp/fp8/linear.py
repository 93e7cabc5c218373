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
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from harness.fsdp.fp8.delayed import LENGTH, Column, History, Reduce, update_all
from harness.fsdp.fp8.formats import is_8_bit
from harness.fsdp.fp8.matmul import multiply
from harness.fsdp.fp8.portions import adds_bias, gradient_of, input_here, output_of, portion_here, take_largest
from harness.fsdp.fp8.quantize import WHOLE, Quantized, amax_grid, quantize, scales_of
from harness.fsdp.fp8.recipes import RECIPES, Operand, Recipe
from harness.fsdp.vocabulary import Fp8

HISTORY, SCALE = "fp8_amax_history", "fp8_scale"
"""Buffers of a layer under delayed scaling."""
Chosen = Callable[[str, nn.Linear], bool]
"""Whether a linear layer, with its dotted name, is to multiply 8-bit numbers."""


class Fp8Linear(nn.Linear):
    """A linear layer of an FP8 recipe; made of an ordinary one by `convert`.

    Its weight is fp32, bf16 or fp16 and quantized at each use, or holds 8 bits already: then `weight_scale_inv` has the
    reciprocals of its scales (fp32 or e8m0, one a tile), as whoever quantized it has put them there; or
    `two_payloads`, where both directions take other bits, tells what to multiply.
    """

    recipe: Recipe
    margin: int
    ends_with_engine: bool
    """Whether an engine ends the steps of delayed scaling."""
    fp8_amax_history: Tensor
    fp8_scale: Tensor
    weight_scale_inv: Tensor | None
    two_payloads: Callable[..., Quantized] | None
    """Gives, by `turned`, the payload for a product with the weight or with its transpose."""

    @staticmethod
    def convert(
        module: nn.Module,
        recipe: Fp8 | str,
        chosen: Chosen | None = None,
        history: int = LENGTH,
        margin: int = 0,
        device: torch.device | None = None,
    ) -> list[str]:
        """Make linear layers of a module multiply 8-bit numbers, in place, before sharding. Parameters are kept.

        Args:
            module: the module whose layers are changed.
            recipe: current, delayed, block, mx or mx_32x32; see [Note: FP8].
            chosen: whether to convert a layer, by its name and module; None: all layers whose weight fits the recipe
                and belongs to no other module.
            history: number of past steps that delayed scaling uses.
            margin: powers of two that delayed scaling leaves free above the amax.
            device: device of the amax histories; None: that of the weights.

        Returns:
            The names of the converted layers, in definition order.

        Raises:
            ValueError: there is no layer to convert; or a chosen layer has sizes that the recipe cannot tile, or shares
                its weight with another module, which cannot read 8 bits.
        """
        found = RECIPES[Fp8.parse(recipe, "recipe")]
        if history < 1:
            raise ValueError(f"history={history}: delayed scaling looks back at least 1 step")
        owners = Counter(id(param) for _, param in module.named_parameters(remove_duplicate=False))
        names: list[str] = []
        for name, layer in module.named_modules():
            if not _is_ordinary(layer) or (chosen is not None and not chosen(name, layer)):
                continue
            problem = _problem(layer, found, owners)
            if problem and chosen is not None:
                raise ValueError(f"{name or 'the module'} was chosen for fp8={found.name.name}, but {problem}")
            if not problem:
                layer.__class__ = _class_for(type(layer))
                assert isinstance(layer, Fp8Linear)
                layer.become(found, history, margin, device or layer.weight.device)
                names.append(name)
        if not names:
            raise ValueError(
                f"fp8={found.name.name} found no linear layer in {type(module).__name__}: a weight of its own with both"
                f" sizes multiples of {found.multiple} is what it takes"
            )
        return names

    @staticmethod
    def delayed_state(module: nn.Module) -> dict[str, Tensor]:
        """The amax histories and scales of delayed scaling, by the names of a module's buffers, not copied.

        They belong into every checkpoint of such layers: neither follows from the weights.
        """
        found: dict[str, Tensor] = {}
        for name, layer in module.named_modules():
            if isinstance(layer, Fp8Linear) and layer.recipe.delayed:
                layer.keep_buffers_plain()
                found |= {f"{name}.{each}": layer.get_buffer(each) for each in (HISTORY, SCALE)}
        return found

    @staticmethod
    def update_scales(module: nn.Module, reduce: Reduce | None = None) -> None:
        """Update the scales of delayed scaling, once per step, after optimizer.step(). Other recipes need no call.

        Args:
            module: what has the layers, the same on all ranks.
            reduce: replaces a tensor in place by its maximum over all ranks that have other data or other portions;
                None with a single such rank.

        Raises:
            RuntimeError: the layers are in a sharded model, whose engine updates the scales itself.
        """
        layers = layers_of(module)
        if any(each.ends_with_engine for each in layers):
            raise RuntimeError(
                "optimizer.step() of a sharded model ends the step of its FP8 layers: drop update_scales()"
            )
        update_all([history for each in layers if (history := each.history) is not None], reduce)

    def become(self, recipe: Recipe, history: int, margin: int, device: torch.device) -> None:
        """Get what a recipe needs, an ordinary layer's weight and bias being there."""
        self.recipe, self.margin = recipe, margin
        self.weight_scale_inv = self.two_payloads = None
        self.ends_with_engine = False
        if recipe.delayed:
            self.register_buffer(HISTORY, torch.zeros(history, len(Column), dtype=torch.float32, device=device))
            self.register_buffer(SCALE, torch.ones(len(Column), dtype=torch.float32, device=device))

    def reset_parameters(self) -> None:
        """As an ordinary layer; delayed scaling begins anew."""
        super().reset_parameters()
        if SCALE in self._buffers:
            self.fp8_amax_history.zero_()
            self.fp8_scale.fill_(1.0)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Casts leave what delayed scaling knows in fp32, as `module.bfloat16()` would not."""
        before = {name: self._buffers[name] for name in (HISTORY, SCALE) if name in self._buffers}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call] # torch leaves it unannotated
        for name, held in before.items():
            moved = self._buffers[name]
            if held is not None and moved is not None and moved.dtype != held.dtype:
                self._buffers[name] = held.to(moved.device)
        return self

    def keep_buffers_plain(self) -> None:
        """Undo what torch's `parallelize_module` makes of buffers: DTensors, which are in the way of what is known of
        one rank's operands."""
        for name in (HISTORY, SCALE):
            held = self._buffers.get(name)
            if isinstance(held, DTensor):
                self._buffers[name] = portion_here(held)

    @property
    def is_held(self) -> bool:
        """Whether an engine may keep the weight in 8 bits: it is trained."""
        return self.weight.requires_grad

    @property
    def history(self) -> History | None:
        """Amaxes and scales of delayed scaling; None under recipes without."""
        if not self.recipe.delayed:
            return None
        self.keep_buffers_plain()
        recipe = self.recipe
        formats = recipe.activations.format, recipe.weights.format, recipe.gradients.format
        return History(self.fp8_amax_history, self.fp8_scale, formats, self.margin)

    def forward(self, input: Tensor) -> Tensor:
        """x w^T + bias: shape [..., in] to [..., out], in the dtype of x (of autocast where that is on).

        Where a plan of tensor parallelism has cut the weight, x may be plain or a DTensor, and the result is a DTensor;
        see [Note: FP8 and tensor parallelism].

        Raises:
            TypeError: x is neither fp32 nor bf16 nor fp16.
        """
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        if isinstance(self.weight, DTensor):
            return output_of(self._product(input_here(input, self.weight)), self.weight)
        return self._product(input)

    def _product(self, x: Tensor) -> Tensor:
        """x w^T + bias, of what this rank has of both."""
        rows = x.reshape(-1, x.shape[-1])
        trains = torch.is_grad_enabled()
        result: Tensor = _Product.apply(rows, self.weight, self.bias, self, trains)  # type: ignore[no-untyped-call] # torch leaves it unannotated
        return result.view(*x.shape[:-1], result.shape[-1])

    def extra_repr(self) -> str:
        """As of an ordinary layer, with the recipe."""
        return f"{super().extra_repr()}, fp8={self.recipe.name.name}"

    def weight_for(self, *, turned: bool) -> Quantized:
        """The weight [out, in], or its transpose [in, out], quantized for a product over its last dimension.

        Of a weight that is cut, this rank's portion: *collective* over the axis that cuts it, where it does not hold 8
        bits and its one scale is made now.

        Raises:
            RuntimeError: it holds 8 bits without scales, or of one direction alone.
        """
        operand = self.recipe.weights
        weight = portion_here(self.weight)
        if not is_8_bit(weight.dtype):
            return self._quantize(Column.weights, weight, operand, turned=turned)
        if self.two_payloads is not None:
            held = self.two_payloads(turned=turned)
            return held.t if turned else held
        if self.weight_scale_inv is None or not operand.is_one_for_both:
            raise RuntimeError(
                f"the weight holds {weight.dtype} and nothing says its scales under fp8={self.recipe.name.name}:"
                " weights are cast to 8 bits by the engine that shards them, never by module.to()"
            )
        held = Quantized(weight, self.weight_scale_inv.float(), operand.tile)
        return held.t if turned else held

    def quantize_weight(self, weight: Tensor, *, turned: bool = False) -> Quantized:
        """A whole weight [out, in] as the layer would multiply it now, or its transpose; as the weight lies. Nothing is
        noted of it."""
        operand, history = self.recipe.weights, self.history
        scale = None if history is None else history.scale[Column.weights].clone().view(1, 1)
        tile = operand.tile.turned if turned else operand.tile
        return quantize(weight, operand.format, tile, self.recipe.scaling, scale)

    def quantize_input(self, x: Tensor, *, trains: bool = True) -> tuple[Quantized, Quantized]:
        """An input [rows, columns], and its transpose, each quantized for a product over its last dimension.

        trains: the step's amax is to know of it.
        """
        return self._both(Column.activations, x, self.recipe.activations, trains=trains)

    def quantize_gradient(self, gradient: Tensor, *, trains: bool = True) -> tuple[Quantized, Quantized]:
        """A gradient of the output [rows, columns], and its transpose, quantized as `quantize_input` does."""
        return self._both(Column.gradients, gradient, self.recipe.gradients, trains=trains)

    def _both(self, column: Column, values: Tensor, operand: Operand, *, trains: bool) -> tuple[Quantized, Quantized]:
        first = self._quantize(column, values, operand, turned=False, trains=trains)
        if operand.is_one_for_both:
            return first, first.t
        return first, self._quantize(column, values, operand, turned=True, trains=trains)

    def _quantize(
        self, column: Column, values: Tensor, operand: Operand, *, turned: bool, trains: bool = True
    ) -> Quantized:
        history, scale = self.history, None
        if history is not None:
            if trains:
                history.record(column, amax_grid(values, operand.tile))
            scale = history.scale[column].clone().view(1, 1)
        elif column is Column.weights and operand.tile == WHOLE:
            scale, _ = scales_of(
                take_largest(amax_grid(values, WHOLE), self.weight), operand.format, self.recipe.scaling
            )
        tile = operand.tile.turned if turned else operand.tile
        found = quantize(values, operand.format, tile, self.recipe.scaling, scale)
        return found.t if turned else found


class _Product(torch.autograd.Function):
    """See [Note: Three products]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Fp8Linear, trains: bool) -> Tensor:
        """x [tokens, in], weight [out, in], bias [out]; y [tokens, out] in the dtype of x. trains: gradients are on; an
        evaluation leaves no trace in the scales of later steps."""
        for_y, for_dw = layer.quantize_input(x, trains=trains)
        y = multiply(for_y, layer.weight_for(turned=False))
        if bias is not None and adds_bias(weight):
            y = y + portion_here(bias).float()
        ctx.layer, ctx.tile, ctx.dtype, ctx.bias = layer, for_dw.tile, x.dtype, bias
        ctx.cut = _CutWeight(weight) if isinstance(weight, DTensor) and trains else None
        ctx.save_for_backward(for_dw.payload, for_dw.scale_inv, weight if ctx.cut is None else None)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """grad [tokens, out]; gradients of x and weight in the dtype of x, of bias in its own."""
        layer: Fp8Linear = ctx.layer
        payload, scale_inv, weight = ctx.saved_tensors  # unpacking the weight tells where it changed since
        if ctx.cut is not None:
            weight = ctx.cut.unedited()
        for_dx, for_dw = layer.quantize_gradient(grad)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = multiply(for_dx, layer.weight_for(turned=True)).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            dw = gradient_of(weight, multiply(for_dw, Quantized(payload, scale_inv, ctx.tile)).to(ctx.dtype))
        if ctx.needs_input_grad[2]:
            db = gradient_of(ctx.bias, grad.float().sum(dim=0).to(ctx.bias.dtype))
        return dx, dw, db, None, None


class _CutWeight:
    """A DTensor that a backward needs. Saved as others are it would say the dtype it came with, and its copy in a
    recomputation that of the 8 bits in it: `torch.utils.checkpoint` takes that for another forward."""

    def __init__(self, weight: DTensor) -> None:
        self._weight, self._version = weight, weight._version

    def unedited(self) -> DTensor:
        """The weight.

        Raises:
            RuntimeError: it was edited since, as torch says of what it has saved itself.
        """
        if self._weight._version != self._version:
            raise RuntimeError(
                "the weight of an FP8 layer has been modified by an inplace operation between its forward and its"
                " backward, which needs it as it was"
            )
        return self._weight


def layers_of(module: nn.Module) -> list[Fp8Linear]:
    """The FP8 layers of a module, in definition order."""
    return [each for each in module.modules() if isinstance(each, Fp8Linear)]


def _is_ordinary(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer, or of a class that changes nothing of its forward."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _class_for(ordinary: type[nn.Linear]) -> type[Fp8Linear]:
    """The class that a layer of an ordinary one becomes: that one's own methods stay."""
    if ordinary is nn.Linear:
        return Fp8Linear
    if ordinary not in _MADE:
        _MADE[ordinary] = type(f"Fp8{ordinary.__name__}", (Fp8Linear, ordinary), {})
    return _MADE[ordinary]


_MADE: dict[type[nn.Linear], type[Fp8Linear]] = {}
"""Classes that were made so, by the ordinary one."""


def _problem(layer: nn.Linear, recipe: Recipe, owners: Counter[int]) -> str:
    """Why a layer cannot have a recipe; "" where it can."""
    shape = list(portion_here(layer.weight).shape)
    if not recipe.fits(tuple(shape)):
        which = "a portion of its weight" if isinstance(layer.weight, DTensor) else "its weight"
        return f"{which} has shape {shape}: both sizes must be multiples of {recipe.multiple}"
    if owners[id(layer.weight)] > 1:
        return "its weight belongs to another module too (tied), which cannot read 8 bits: leave it out"
    return ""
