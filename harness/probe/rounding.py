"""Effect of a dtype's rounding on gradients: an fp64 pass with an error after every operation.

[Note: Perturbed reference] A bound on rounding is a fact of a model and its data, and can be observed: run the
reference's forward and backward again, and multiply the result of every arithmetic operation by 1 + e, e drawn with the
size of one rounding of the dtype. Tensors with cancelling sums move far, others little, so each has its own bound.
Weights are perturbed too for dtypes narrower than fp32, in which all runs begin alike. Sums, also inside matrix
products, are made in fp32 one term after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from harness.config.roundoff import RMS, UNIT

Loss = Callable[[nn.Module, Any], Tensor]

EXACT = frozenset(
    {
        *("embedding", "index", "index_select", "gather", "cat", "stack", "clone", "copy", "_to_copy", "where"),
        *("neg", "abs", "relu", "maximum", "minimum", "max", "min", "sort", "topk", "argmax", "scatter"),
        *("masked_fill", "flip", "zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like"),
        *("empty_like", "new_zeros", "roll", "new_empty", "new_full", "arange", "select_backward", "slice_backward"),
        *("index_put", "repeat", "tril", "triu", "nll_loss_backward", "threshold_backward", "_unsafe_view"),
        *("one_hot", "constant_pad_nd"),
    }
)
"""Operations that move or choose numbers, and round none."""

PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm"})

SUMS = frozenset({"sum", "mean"})

SUMS_INSIDE = frozenset(
    {
        "embedding_dense_backward",
        "_embedding_bag_backward",
        "convolution_backward",
        "native_layer_norm_backward",
    }
)
"""Operations with long sums inside, run in the dtype itself, on the CPU.

Weight gradients of an embedding, an index and a LayerNorm are added row by row in 16 bits: 1 % off after a hundred
rows, 7 % after four thousand, more where rows cancel; a frequent token's row stagnates. No walk of roundings imitates
that.
"""

TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

COMPUTED = ("bf16", "fp16", "fp32")


class Roundings(TorchDispatchMode):
    """Adds an error to every operation inside.

    Args: dtype: name in the configuration. generator: of the draws.
    """

    def __init__(self, dtype: str, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves the mode's constructor unannotated
        self.dtype = dtype
        self.unit = UNIT[dtype]
        self.inner = UNIT["fp32"]
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name in SUMS_INSIDE or (name == "index_put" and True in args[3:]):  # accumulates
            return self._in_the_dtype(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if name in EXACT or any(each.alias_info is not None for each in func._schema.returns):
            return result
        if name in PRODUCTS:
            left, right = args[-2:]
            return self._sum(result, torch.matmul(left * left, right * right), left.shape[-1])
        if name in SUMS and isinstance(result, Tensor) and result.is_floating_point():
            terms = args[0].numel() // max(1, result.numel())
            squares = func(args[0] * args[0], *args[1:], **(kwargs or {}))
            return self._sum(result, squares / terms if name == "mean" else squares, terms)
        if isinstance(result, tuple | list):
            return type(result)(self.rounded(each) for each in result)
        return self.rounded(result)

    def rounded(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            return value
        return value * (1.0 + self.unit * RMS * self._normal(value))  # a mask's infinity stays what it is

    def _in_the_dtype(self, func: Any, args: Any, kwargs: Any) -> Any:
        dtype = getattr(torch, TORCH_NAMES[self.dtype])
        is_float = [isinstance(each, Tensor) and each.is_floating_point() for each in args]
        result = func(*(each.to(dtype) if cast else each for each, cast in zip(args, is_float, strict=True)), **kwargs)
        if isinstance(result, Tensor):
            return result.to(torch.float64)
        return type(result)(None if each is None else each.to(torch.float64) for each in result)

    def _sum(self, result: Tensor, squares: Tensor, terms: int) -> Tensor:
        """A sum of K terms made one after the other, then rounded.

        After j terms the partial sum is about j / K of the result, and a walk of length sqrt(j) about it. Each is
        rounded once: the squares of all errors are u^2 times K / 3 of the result's square and K / 2 of the sum of the
        terms'.
        """
        size = (squares * (terms / 2) + result * result * (terms / 3)).sqrt()
        moved: Tensor = self.rounded(result) + self.inner * RMS * size * self._normal(size)
        return moved

    def _normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator, dtype=torch.float64)


def moves(
    loss: Loss,
    model: nn.Module,
    batches: Sequence[Any],
    dtypes: Sequence[str],
    draws: int,
    seed: int,
) -> dict[str, dict[str, dict[str, float]]]:
    """Root-mean-square effect of rounding on each gradient of one step, by dtype and parameter.

    `distance` is relative to the gradient's norm, `scale` the spread of b in g' = (1 + b) g + r; parameter "" stands
    for all gradients, with `loss` of the mean loss. The model is not changed. Args: model: fp64, on the CPU. batches:
    of the entire step. draws: passes a dtype.
    """
    exact, reference = _gradients(loss, model, batches)
    found = {}
    for dtype in dtypes:
        sums: dict[str, dict[str, float]] = {}
        for draw in range(draws):
            generator = torch.Generator().manual_seed(seed + draw)
            with _weights(model, dtype, generator), Roundings(dtype, generator):
                moved, found_loss = _gradients(loss, model, batches)
            for name, values in _facts(exact, moved).items():
                for key, value in values.items():
                    held = sums.setdefault(name, {})
                    held[key] = held.get(key, 0.0) + value * value
            sums[""]["loss"] = sums[""].get("loss", 0.0) + (found_loss / reference - 1.0) ** 2
        found[dtype] = {
            name: {key: math.sqrt(value / draws) for key, value in held.items()} for name, held in sums.items()
        }
    return found


def _gradients(loss: Loss, model: nn.Module, batches: Sequence[Any]) -> tuple[dict[str, Tensor], float]:
    """Gradients of the mean loss, by name; `.grad` is not touched."""
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    total = {name: torch.zeros_like(param) for name, param in named.items()}
    mean = 0.0
    for batch in batches:
        with sdpa_kernel(SDPBackend.MATH):
            one = loss(model, batch)
            grads = torch.autograd.grad(one, list(named.values()), allow_unused=True)
        mean += one.item() / len(batches)
        for name, grad in zip(named, grads, strict=True):
            if grad is not None:
                total[name] += grad / len(batches)
    return total, mean


@contextmanager
def _weights(model: nn.Module, dtype: str, generator: torch.Generator) -> Iterator[None]:
    """Weights cast as in a forward in a dtype narrower than fp32."""
    if UNIT[dtype] <= UNIT["fp32"]:
        yield
        return
    kept = [param.detach().clone() for param in model.parameters()]
    try:
        with torch.no_grad():
            for param in model.parameters():
                noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
                param.mul_(1.0 + UNIT[dtype] * RMS * noise)
        yield
    finally:
        with torch.no_grad():
            for param, before in zip(model.parameters(), kept, strict=True):
                param.copy_(before)


def _facts(exact: Mapping[str, Tensor], moved: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    squares, products, offs = 0.0, 0.0, 0.0
    facts = {}
    for name, grad in exact.items():
        off = moved[name] - grad
        square, product, far = (float((x * y).sum()) for x, y in ((grad, grad), (off, grad), (off, off)))
        squares, products, offs = squares + square, products + product, offs + far
        if square > 0.0:
            facts[name] = {"distance": math.sqrt(far / square), "scale": product / square}
    facts[""] = {"distance": math.sqrt(offs / squares), "scale": products / squares} if squares else {}
    return facts
