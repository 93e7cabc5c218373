"""FP8 weights under tensor parallelism: products of portions, scales of whole weights, state that goes anywhere."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.utils.checkpoint import CheckpointError

from harness.fsdp import Fp8Linear, Portion
from harness.fsdp.fp8 import linear, portions
from harness.fsdp.fp8.quantize import quantize
from harness.fsdp.runtime import weight_scales
from harness.fsdp.runtime.installation import WeightInstaller
from harness.fsdp.storage import eight_bit
from harness.fsdp.storage.eight_bit import EightBitWeight, EightBitWeights
from harness.fsdp.storage.layout import ParamSpec, plan_bucket
from harness.fsdp.vocabulary import Fp8
from tests.fsdp.fp8.portions import STYLES, across, beside_fsdp2, edited, meta, products, traffic
from tests.fsdp.fp8.sharded import HIDDEN, WIDTH, Case, follow
from tests.support.mutants import each, kills
from tests.support.spawn import run_ranks

ZERO_3 = "optim_grads_params"
RECIPES = tuple(recipe for recipe in Fp8 if recipe is not Fp8.delayed)
"""Scales of which are made now."""
PAIRS = (
    (Case(Fp8.delayed, ZERO_3, tp=2), Case(Fp8.delayed, "optim")),
    (Case(Fp8.current, "no_shard", tp=4), Case(Fp8.current, ZERO_3, tp=2)),
    (Case(Fp8.block, "optim_grads", 2, "optim", tp=2), Case(Fp8.block, ZERO_3)),
    (Case(Fp8.mx_32x32, ZERO_3, tp=2), Case(Fp8.mx_32x32, "optim", tp=4)),
    (Case(Fp8.mx, ZERO_3, 2, tp=2), Case(Fp8.mx, "optim_grads", tp=2)),
)
"""TP 2 x DP 2 and DP 4, TP 4 and TP 2 x DP 2, HFSDP x TP 2 and DP 4, TP 2 x DP 2 and TP 4, HSDP x TP 2 and TP 2 x DP 2.
"""


# -- on four ranks -----------------------------------------------------------------------------------------------------


def _data_parallel_alone() -> AbstractContextManager[Any]:
    """Nothing is heard of the tensor-parallel axis, whose ranks follow each other."""
    take = weight_scales._take_largest

    def some(comm: Any, tensors: Any) -> None:
        ranks = [0] if comm is None else dist.get_process_group_ranks(comm.group)
        if len(ranks) == 1 or ranks[1] - ranks[0] > 1:
            take(comm, tensors)

    return mock.patch.object(weight_scales, "_take_largest", some)


def _patched(owner: Any, name: str, wrong: Any) -> Any:
    def patch() -> AbstractContextManager[Any]:
        return mock.patch.object(owner, name, wrong)

    return patch


CUT = Case(Fp8.current, ZERO_3, tp=2)
FOLLOWING: dict[str, tuple[str, Case, Any]] = {
    "amax-of-own-portion": (
        "Tensor-parallel ranks make scales of the portions they have",
        CUT,
        _patched(EightBitWeights, "of_tiles_elsewhere", lambda self, told: []),
    ),
    "own-portions-first": (
        "Until the first update scales are of the portions that each rank has",
        CUT,
        _patched(WeightInstaller, "agree_on_scales", lambda self: None),
    ),
    "tiles-of-neighbours": (
        "Tensor-parallel ranks share scales of tiles that each has for itself",
        Case(Fp8.block, "optim_grads", tp=2),
        _patched(eight_bit, "_along", lambda tile, dim: None),
    ),
    "history-of-portions": (
        "Under delayed scaling a rank does not hear what tensor-parallel ranks have multiplied",
        Case(Fp8.delayed, "optim", tp=2),
        _data_parallel_alone,
    ),
    "another-dtype-again": (  # the last one: ranks stop in the middle of it
        "A weight in 8 bits is saved for the backward as the DTensor it is in, which says another dtype",
        Case(Fp8.current, "no_shard", tp=2, recompute="within"),
        _patched(linear, "_CutWeight", lambda weight: None),
    ),
}
MULTIPLYING: dict[str, tuple[str, Any]] = {
    "bias-of-each": (
        "Every tensor-parallel rank adds the bias to its term of the sum",
        _patched(linear, "adds_bias", lambda weight: True),
    ),
    "a-term-for-all": (
        "A term of the gradient of x, or of y, is taken for the sum",
        _patched(portions, "Partial", Replicate),
    ),
    "each-its-own-scale": (
        "A layer that quantizes its weight itself takes the amax of the portion it has",
        _patched(linear, "take_largest", lambda amax, weight: amax),
    ),
}


def _on_four(rank: int) -> dict[str, Any]:
    told: dict[str, Any] = {
        "state": [across(rank, *pair) for pair in PAIRS],
        "traffic": [traffic(rank, Case(recipe, ZERO_3, tp=2)) for recipe in Fp8],
        "beside": beside_fsdp2(rank, Case(Fp8.current, ZERO_3, tp=2)),
        "meta": [meta(rank, Case(recipe, ZERO_3, tp=2)) for recipe in (Fp8.delayed, Fp8.block)],
    }
    for name, (_, case, mutant) in FOLLOWING.items():
        with mutant():
            try:
                told[name] = follow(rank, case)
            except CheckpointError as error:
                told[name] = [str(error)]
    return told


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """One visit of four ranks; what each has to tell."""
    return run_ranks(_on_four, 4)


def test_state_is_exact_in_layouts_with_other_portions(told: list[dict[str, Any]]) -> None:
    assert [found["state"] for found in told] == [[[]] * len(PAIRS)] * 4


def test_models_cut_without_memory_are_quantized_as_whole_ones(told: list[dict[str, Any]]) -> None:
    assert [found["meta"] for found in told] == [[[], []]] * 4


def test_a_gather_of_portions_moves_a_byte_each_and_one_more_collective_makes_scales(
    told: list[dict[str, Any]],
) -> None:
    weights, columns, width = 4, 3, 4
    for found in told:
        current, delayed, *tiled = found["traffic"]
        for each_one in found["traffic"]:
            moved = each_one["elements"][0]
            assert each_one["gathers"] == (2, 2 * moved // 2), "a byte a parameter of which this rank has a half"
        assert current["scales"] == (2, 2 * weights * width), "data-parallel ranks, then tensor-parallel ones"
        assert delayed["scales"] == (2, 2 * (weights + weights * columns) * width)
        assert [each_one["scales"][0] for each_one in tiled] == [1, 1, 1], (
            "tensor-parallel ranks have no tile in common"
        )


@pytest.mark.parametrize("name", each("FP8 weights, by tensor parallelism", ((n, m[0]) for n, m in FOLLOWING.items())))
def test_a_mutant_is_found(name: str, told: list[dict[str, Any]]) -> None:
    assert any(found[name] for found in told)


# -- on two ranks ------------------------------------------------------------------------------------------------------


def _on_two(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "products": [wrong for recipe in RECIPES for style in STYLES for wrong in products(rank, recipe, style)],
        "beside": beside_fsdp2(rank, Case(Fp8.current, ZERO_3)),
        "edited": [edited(rank, style) for style in ("", *STYLES)],
    }
    with mock.patch.object(linear._CutWeight, "unedited", lambda self: self._weight):
        found["edits-unseen"] = [edited(rank, style) for style in STYLES]
    for name, (_, mutant) in MULTIPLYING.items():
        with mutant():
            found[name] = [wrong for style in STYLES for wrong in products(rank, Fp8.current, style)]
    return found


@pytest.fixture(scope="module")
def told_by_two() -> list[dict[str, Any]]:
    """One visit of two ranks; what each has to tell."""
    return run_ranks(_on_two, 2)


def test_products_of_portions_are_those_of_the_quantized_operands(told_by_two: list[dict[str, Any]]) -> None:
    """The weight is quantized as a whole; the bias is added once, its gradient and that of x are whole."""
    assert [found["products"] for found in told_by_two] == [[], []]


def test_a_backward_tells_of_weights_that_were_edited_since(told_by_two: list[dict[str, Any]]) -> None:
    for found in told_by_two:
        assert all("modified by an inplace operation" in each_one for each_one in found["edited"]), found["edited"]


@kills("FP8 weights, by tensor parallelism", "edits-unseen", "A backward takes the weight as it is by then")
def test_a_mutant_that_sees_no_edit_is_found(told_by_two: list[dict[str, Any]]) -> None:
    assert all(found["edits-unseen"] == ["", ""] for found in told_by_two)


@pytest.mark.parametrize(
    "name", each("FP8 weights, by tensor parallelism", ((n, m[0]) for n, m in MULTIPLYING.items()))
)
def test_a_mutant_of_products_is_found(name: str, told_by_two: list[dict[str, Any]]) -> None:
    assert any(found[name] for found in told_by_two)


def test_fsdp2_gathers_twice_the_bytes_for_the_same_bits(
    told: list[dict[str, Any]], told_by_two: list[dict[str, Any]]
) -> None:
    """Losses and weights of three steps, of DP 2 and of DP 2 x TP 2. FSDP2 gathers each of two blocks twice a step,
    ours the last one once; a block's FP8 weights are P elements, of which a rank sends half."""
    elements = 2 * WIDTH * HIDDEN
    for wrong, theirs, ours in (found["beside"] for found in (*told, *told_by_two)):
        assert wrong == []
        assert 4 * elements <= theirs < 4 * elements * 1.05, "two bytes each, vectors and ends beside"
        assert ours == 3 * elements // 2, "a byte each"


# -- tiles and rank boundaries, without ranks --------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("recipe", [Fp8.block, Fp8.mx, Fp8.mx_32x32])
def test_tiles_that_are_cut_have_the_bits_of_whole_ones(recipe: Fp8, num_ranks: int) -> None:
    """Amaxes of rows are taken together."""
    torch.manual_seed(7)
    holder = nn.Sequential(nn.Linear(256, 640, bias=False))
    Fp8Linear.convert(holder, recipe)
    layer: Any = holder[0]
    values = layer.weight.detach() * torch.randn(640, 1).exp()
    weights = layer.recipe.weights
    wholes = [quantize(values, weights.format, tile, layer.recipe.scaling) for tile in layer.recipe.held_tiles]
    layout = plan_bucket([ParamSpec("w", (640, 256))], num_ranks, 64)
    (slot,) = layout.slots
    locals_ = [layout.local_slice(slot, rank) for rank in range(num_ranks)]
    held = [EightBitWeight(lambda: layer, slot, Portion((640, 256)), torch.device("cpu")) for _ in locals_]
    parts = [values.flatten()[local.start : local.end] for local in locals_]
    found = [weight.told_by(rows, local) for weight, rows, local in zip(held, parts, locals_, strict=True)]
    for weight in held:
        weight.rescale(torch.stack(found).amax(0))
    for place, whole in enumerate(wholes):
        payload = torch.empty(640 * 256, dtype=weights.format.dtype)
        for weight, rows, local in zip(held, parts, locals_, strict=True):
            payload[local.start : local.end] = weight.encode(rows, local, place)
        assert torch.equal(payload.view(torch.uint8), whole.payload.flatten().view(torch.uint8)), place
