"""FP8 weights under tensor parallelism: products of portions, scales of whole weights, state that goes anywhere."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointError

from harness.fp8 import linear
from harness.fsdp.runtime.weights import Weights
from harness.fsdp.storage import codec
from harness.fsdp.vocabulary import Fp8
from tests.fsdp.fp8.portions import across, beside_fsdp2, halves_the_bytes, meta, traffic
from tests.fsdp.fp8.sharded import Case, follow
from tests.support.mutants import each
from tests.support.spawn import run_ranks

ZERO_3 = "optim_grads_params"
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
    take = codec._take_largest

    def some(comm: Any, tensors: Any) -> None:
        ranks = [0] if comm is None else dist.get_process_group_ranks(comm.group)
        if len(ranks) == 1 or ranks[1] - ranks[0] > 1:
            take(comm, tensors)

    return mock.patch.object(codec, "_take_largest", some)


def _patched(owner: Any, name: str, wrong: Any) -> Any:
    def patch() -> AbstractContextManager[Any]:
        return mock.patch.object(owner, name, wrong, create=True)

    return patch


CUT = Case(Fp8.current, ZERO_3, tp=2)
FOLLOWING: dict[str, tuple[str, Case, Any]] = {
    "amax-of-own-portion": (
        "Tensor-parallel ranks make scales of the portions they have",
        CUT,
        _data_parallel_alone,
    ),
    "own-portions-first": (
        "Until the first update scales are of the portions that each rank has",
        CUT,
        _patched(Weights, "agree_on_scales", lambda self: None),
    ),
    "tiles-of-neighbours": (
        "Tensor-parallel ranks share scales of tiles that each has for itself",
        Case(Fp8.block, "optim_grads", tp=2),
        _patched(codec.Fp8Weight, "shares_tiles", property(lambda self: True, lambda *_: None)),
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


def test_fsdp2_gathers_twice_the_bytes_for_the_same_bits(told: list[dict[str, Any]]) -> None:
    for found in told:
        halves_the_bytes(*found["beside"])
