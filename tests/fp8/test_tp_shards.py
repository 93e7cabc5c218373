"""FP8 layers whose weight a plan of tensor parallelism, or rows over ranks, have cut: the bits of unsharded ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness.fp8 import linear
from harness.fp8.linear import Fp8Linear
from harness.fp8.recipes import RECIPES
from tests.fp8.test_linear import dequantized
from tests.support.mutants import each, kills, slips
from tests.support.spawn import run_ranks

TOKENS, IN, OUT = 24, 256, 512
"""TP shards of two ranks are entire tiles of every recipe."""
STYLES: dict[str, Callable[[], Any]] = {"rows": ColwiseParallel, "columns": lambda: RowwiseParallel()}
CLOSE = 1e-5
"""Relative to the largest: fp32 sums in another order."""
MULTIPLYING = slips(
    """
    bias-of-each: Every tensor-parallel rank adds the bias to its term of the sum
        fp8.linear.adds_bias: lambda weight: True
    a-term-for-all: A term of the gradient of x, or of y, is taken for the sum
        fp8.tp_shards.Partial: Replicate
    each-its-own-scale: A layer that quantizes its weight itself takes the amax of the TP shard it has
        fp8.linear.take_largest: lambda amax, weight: amax
    """
)


def _cut(holder: nn.Module, style: str) -> None:
    parallelize_module(holder, init_device_mesh("cpu", (dist.get_world_size(),)), {"0": STYLES[style]()})


def _products(rank: int, recipe: str, style: str) -> list[str]:
    """y, dx, dw and db of a layer that is cut, against fp64 products of operands that are quantized as each rank does
    it: the weight whole, activations and gradients by TP shards."""
    size = dist.get_world_size()
    torch.manual_seed(5)
    holder = nn.Sequential(nn.Linear(IN, OUT))
    with torch.no_grad():
        holder[0].weight.mul_(torch.randn(OUT, 1).exp() * torch.randn(1, IN).exp())
    weight, bias = holder[0].weight.detach().clone(), holder[0].bias.detach().clone()
    Fp8Linear.convert(holder, recipe)
    _cut(holder, style)
    x, grad = torch.randn(TOKENS, IN), torch.randn(TOKENS, OUT)
    columns = style == "columns"
    given = (x.chunk(size, 1)[rank] if columns else x).clone().requires_grad_()
    y = holder(given)
    y.backward(grad if columns else grad.chunk(size, 1)[rank])

    xs, grads = (x.chunk(size, 1), [grad] * size) if columns else ([x] * size, grad.chunk(size, 1))
    whole, transposed = dequantized(weight, recipe, "weights"), dequantized(weight, recipe, "weights", transposed=True)
    cut = [part.chunk(size, 1 if columns else 0) for part in (whole, weight)]
    cut_turned = transposed.chunk(size, 0 if columns else 1)
    terms = [dequantized(part, recipe, "activations") @ w.t() for part, w in zip(xs, cut[0], strict=True)]
    dx = [dequantized(part, recipe, "gradients") @ w.t() for part, w in zip(grads, cut_turned, strict=True)]
    dw = (
        dequantized(grads[rank], recipe, "gradients", transposed=True)
        @ dequantized(xs[rank], recipe, "activations", transposed=True).t()
    )
    wanted = {
        "y": sum(terms) + bias.double() if columns else terms[rank] + bias.double().chunk(size)[rank],
        "dx": dx[rank] if columns else sum(dx),
        "dw": dw,
        "db": grad.double().sum(0) if columns else grad.double().sum(0).chunk(size)[rank],
    }
    layer: Any = holder[0]
    held = {"y": y, "dx": given.grad, "dw": layer.weight.grad.to_local(), "db": layer.bias.grad.to_local()}
    told = [f"{n}: shape {tuple(v.shape)}" for n, v in held.items() if v.shape != wanted[n].shape]
    apart = {n: float((v.double() - wanted[n]).abs().max() / wanted[n].abs().max()) for n, v in held.items()}
    return told + [f"{recipe}, {style}: {n} is off by {by}" for n, by in apart.items() if not by < CLOSE]


def _edited(rank: int, style: str) -> str:
    """What a backward says of a weight that was edited since its forward; style: "" of one that is whole."""
    holder = nn.Sequential(nn.Linear(IN, OUT))
    Fp8Linear.convert(holder, "current")
    if style:
        _cut(holder, style)
    x = torch.ones(2, IN)
    y = holder(x.chunk(dist.get_world_size(), 1)[rank] if style == "columns" else x)
    with torch.no_grad():
        holder.get_parameter("0.weight").mul_(2)
    try:
        y.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def _on_two(rank: int) -> dict[str, Any]:
    made_now = [*RECIPES]
    found: dict[str, Any] = {
        "products": [wrong for recipe in made_now for style in STYLES for wrong in _products(rank, recipe, style)],
        "edited": [_edited(rank, style) for style in ("", *STYLES)],
    }
    with mock.patch.object(linear._CutWeight, "unedited", lambda self: self._weight):
        found["edits-unseen"] = [_edited(rank, style) for style in STYLES]
    for name, slip in MULTIPLYING.items():
        with slip.patched():
            found[name] = [told for style in STYLES for told in _products(rank, "current", style)]
    return found


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """One visit of two ranks; what each has to tell."""
    return run_ranks(_on_two, 2)


def test_products_of_tp_shards_are_those_of_the_quantized_operands(told: list[dict[str, Any]]) -> None:
    """The weight is quantized as a whole; the bias is added once, its gradient and that of x are whole."""
    assert [found["products"] for found in told] == [[], []]


def test_a_backward_tells_of_weights_that_were_edited_since(told: list[dict[str, Any]]) -> None:
    for found in told:
        assert all("modified by an inplace operation" in each_one for each_one in found["edited"]), found["edited"]


@kills("FP8 weights, by tensor parallelism", "edits-unseen", "A backward takes the weight as it is by then")
def test_a_mutant_that_sees_no_edit_is_found(told: list[dict[str, Any]]) -> None:
    assert all(found["edits-unseen"] == ["", ""] for found in told)


@pytest.mark.parametrize("name", each("FP8 weights, by tensor parallelism", MULTIPLYING))
def test_a_mutant_of_products_is_found(name: str, told: list[dict[str, Any]]) -> None:
    assert any(found[name] for found in told)
