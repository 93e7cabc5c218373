"""The FP8 layer: its three products against exact products of quantized operands, its recipes, its state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harness.fp8.linear import Fp8Linear, layers_of
from harness.fp8.quantize import RECIPES, WHOLE, Scaling, TileScales, quantize
from tests.support.mutants import each_found_by

TOKENS, IN, OUT = 37, 256, 128


def _layer(recipe: str, *, bias: bool = True) -> Fp8Linear:
    torch.manual_seed(5)
    holder = nn.Sequential(nn.Linear(IN, OUT, bias=bias))
    Fp8Linear.convert(holder, recipe)
    layer = holder[0]
    assert isinstance(layer, Fp8Linear)
    return layer


def _scattered(*shape: int) -> Tensor:
    """Numbers of many sizes: the tiles of a recipe matter."""
    return torch.randn(*shape) * torch.randn(shape[0], 1).exp() * torch.randn(1, shape[1]).exp()


def dequantized(values: Tensor, recipe: str, role: str, *, transposed: bool = False) -> Tensor:
    """An operand, or its transpose, after quantization for a product over its last dimension, in fp64."""
    found = RECIPES[recipe]
    operand = getattr(found, role)
    lying = values.detach().t().contiguous() if transposed else values.detach()
    return quantize(lying, operand.format, operand.tile, found.scaling).dequantize().double()


@pytest.mark.parametrize("recipe", RECIPES)
def test_three_products_are_those_of_the_quantized_operands(recipe: str) -> None:
    layer = _layer(recipe)
    x, grad = _scattered(TOKENS, IN).requires_grad_(), _scattered(TOKENS, OUT)
    y = layer(x.view(1, TOKENS, IN))
    assert y.shape == (1, TOKENS, OUT)
    y.backward(grad.view(1, TOKENS, OUT))
    weight = layer.weight
    expected = {
        "y": dequantized(x, recipe, "activations") @ dequantized(weight, recipe, "weights").t() + layer.bias.double(),
        "dx": dequantized(grad, recipe, "gradients") @ dequantized(weight, recipe, "weights", transposed=True).t(),
        "dw": dequantized(grad, recipe, "gradients", transposed=True)
        @ dequantized(x, recipe, "activations", transposed=True).t(),
        "db": grad.double().sum(0),
    }
    for name, found in {"y": y[0], "dx": x.grad, "dw": weight.grad, "db": layer.bias.grad}.items():
        assert found is not None
        scale = float(expected[name].detach().abs().max())
        torch.testing.assert_close(found.double(), expected[name], rtol=1e-5, atol=1e-5 * scale, msg=name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_results_have_the_dtype_of_activations(recipe: str) -> None:
    layer = _layer(recipe).bfloat16()
    x = torch.randn(TOKENS, IN, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert {layer(x).dtype, x.grad.dtype, layer.weight.grad.dtype} == {torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x.detach().float()).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="float64"):
        layer(x.detach().double())
    assert layer(x[:0]).shape == (0, OUT)
    assert f"fp8={recipe}" in repr(layer)


def test_scales_are_fp32_whatever_the_program_builds_models_in() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        held = TileScales(torch.empty(OUT, IN, dtype=torch.float8_e4m3fn), WHOLE, Scaling.exact)
        held.take(torch.tensor([3.0], dtype=torch.float32))
    finally:
        torch.set_default_dtype(before)
    assert [each.dtype for each in (held.scale, held.inverse)] == [torch.float32] * 2
    assert held.scale.item() == torch.tensor(448.0) / 3.0


def test_weights_cast_by_somebody_else_are_refused() -> None:
    layer = _layer("current")
    layer.weight.data = layer.weight.data.to(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="nothing says its scales"):
        layer(torch.randn(2, IN))


def test_conversion_takes_what_fits_and_refuses_by_name() -> None:
    def model() -> nn.Sequential:
        built = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 48), nn.Embedding(256, 256), nn.Linear(256, 256))
        built[3].weight = built[2].weight
        return built

    built = model()
    before = list(built.parameters())
    assert Fp8Linear.convert(built, "current") == ["0", "1"]
    assert [id(each) for each in built.parameters()] == [id(each) for each in before]
    assert Fp8Linear.convert(model(), "block") == ["0"]
    assert [layer.recipe.name for layer in layers_of(built)] == ["current", "current"]
    with pytest.raises(ValueError, match=r"1 was chosen for fp8=block, but its weight has shape \[48, 256\].*of 128"):
        Fp8Linear.convert(model(), "block", lambda name, layer: True)
    with pytest.raises(ValueError, match="3 was chosen for fp8=current, but its weight belongs to another module"):
        Fp8Linear.convert(model(), "current", lambda name, layer: name == "3")
    with pytest.raises(ValueError, match="found no linear layer in Sequential"):
        Fp8Linear.convert(nn.Sequential(nn.Linear(15, 16)), "current")
    with pytest.raises(ValueError, match="recipe='fp4' is not one of current, block, mx, mx_32x32"):
        Fp8Linear.convert(model(), "fp4")


def test_a_backward_tells_of_weights_that_were_edited_since() -> None:
    layer = _layer("current")
    y = layer(torch.ones(2, IN))
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


test_a_mutant_is_found = each_found_by(
    "FP8 layers",
    """
    edits-unseen: A backward takes the weight as it is by then
        fp8.linear._Product.forward: for_dw.scale_inv, weight) => for_dw.scale_inv, None)
    rounded-twice: The bias is added to a product that is rounded already
        fp8.linear._Product.forward: multiply(for_y, layer.weight_for(transposed=False))
            => multiply(for_y, layer.weight_for(transposed=False)).bfloat16()
    one-format: Gradients have the format of activations
        fp8.linear._Product.backward: quantize_pair(recipe.gradients => quantize_pair(recipe.activations
    tied: A weight that another module has, too, is converted
        fp8.linear._problem: owners[id(layer.weight)] > 1 => False
    """,
    test_three_products_are_those_of_the_quantized_operands,
    test_a_backward_tells_of_weights_that_were_edited_since,
    test_conversion_takes_what_fits_and_refuses_by_name,
)
