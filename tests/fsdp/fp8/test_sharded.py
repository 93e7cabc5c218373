"""FP8 weights in the engine's buckets: beside plain torch, on the wire, and in and out of what is saved."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from harness.fsdp import MixedPrecisionPolicy
from harness.fsdp.options import Fp8
from harness.fsdp.storage.codec import PURPOSE
from tests.fsdp.fp8.sharded import (
    HIDDEN,
    MESHES,
    STRATEGIES,
    WIDTH,
    Case,
    across,
    converted,
    follow,
    meta,
    shard,
    traffic,
    train,
    unlike,
)
from tests.streams.recorder import Recorder, believing_in
from tests.support.spawn import run_ranks

ZERO_3 = "optim_grads_params"
FOLLOWED = (
    Case(Fp8.current, "optim"),
    Case(Fp8.current, ZERO_3),
    Case(Fp8.block, ZERO_3, 2, recompute="within"),
    Case(Fp8.current, "no_shard", 2, "optim"),
    Case(Fp8.mx, ZERO_3, 2, "optim"),
    Case(Fp8.mx, ZERO_3, recompute="around"),
    Case(Fp8.mx_32x32, ZERO_3, 2, "optim"),
    Case(Fp8.mx_32x32, "optim_grads", 2, recompute="within"),
)
PRODUCTS = [[Case(recipe, *mesh) for mesh in MESHES] for recipe in Fp8]

OPTIONS: tuple[dict[str, Any], ...] = (
    {"fsdp_double_buffer": True, "grad_buffer": "concat"},
    {"offload_optimizer": True, "transport": "auto"},
)
"""Of the engine: where buckets come from, where main weights lie, whether ranks read each other's memory."""


def _follow_all(rank: int, cases: tuple[Case, ...]) -> dict[Case, list[str]]:
    return {case: follow(rank, case) for case in cases}


@pytest.mark.parametrize("cases", [FOLLOWED, *(pytest.param(tuple(each), marks=pytest.mark.full) for each in PRODUCTS)])
def test_training_follows_plain_torch_under_every_strategy(cases: tuple[Case, ...]) -> None:
    """Losses to the bit, gradients to rounding, payloads and scales to the bit, after each of two steps."""
    for told in run_ranks(_follow_all, 4, cases):
        assert {case: wrong for case, wrong in told.items() if wrong} == {}


def _follow_on_streams(rank: int, cases: tuple[Case, ...]) -> dict[Case, list[str]]:
    with believing_in(Recorder().cuda):
        return _follow_all(rank, cases)


def test_training_follows_plain_torch_where_work_is_queued() -> None:
    """There gradients wait for one another as autograd makes them: not in the dtype of a weight of 8 bits."""
    for told in run_ranks(_follow_on_streams, 4, FOLLOWED[:6]):
        assert {case: wrong for case, wrong in told.items() if wrong} == {}


# -- odd values, edits, state ------------------------------------------------------------------------------------------


def _odd(rank: int, case: Case) -> list[str]:
    """A weight with a tile of zeros, one of NaN and an infinity: quantized in shards as it is whole."""
    model, _ = shard(case, converted(case.recipe))
    weights = dict(model.full_weights())
    weights["blocks.0.up.weight"][:128] = 0.0
    weights["blocks.0.up.weight"][128:256] = torch.nan
    weights["blocks.1.down.weight"][:, 128:256] = 0.0
    weights["blocks.1.down.weight"][5, 300] = torch.inf
    model.load_state_dict({**model.state_dict(), **weights})
    told = unlike(model, weights)
    model.close()
    return told


def _edit(rank: int, strategy: str) -> str:
    """What an edit in place is told."""
    model, _ = shard(Case(Fp8.current, strategy), converted(Fp8.current))
    try:
        with model.unsharded():
            model.module.get_parameter("blocks.0.up.weight").view(torch.uint8).add_(1)
    except RuntimeError as error:
        return str(error)
    finally:
        model.close()
    return ""


def _frozen(rank: int) -> list[str]:
    """Buckets of a model of which one FP8 layer is frozen; replicas are compared."""
    built = converted(Fp8.current)
    built.get_parameter("blocks.0.up.weight").requires_grad_(False)
    model, optimizer = shard(Case(Fp8.current, "optim"), built, check_replicas_every=1)
    train(model, optimizer, 0)
    found = sorted(bucket.key.label for bucket in model.engine.buckets)
    model.close()
    return found


def _exact(rank: int, case: Case) -> str:
    """The bits of all weights after two steps whose sums are integers."""
    model, optimizer = shard(case, converted(case.recipe), numerics="exact")
    train(model, optimizer, 0, 1)
    bits = b"".join(value.numpy().tobytes() for _, value in model.full_weights())
    model.close()
    return hashlib.sha256(bits).hexdigest()


def _refused(rank: int) -> list[str]:
    cast = converted(Fp8.current)
    cast.get_submodule("blocks.0.up").to(torch.float8_e4m3fn)
    wide = MixedPrecisionPolicy(main_params_dtype=torch.float64)
    told = []
    for model, options in ((converted(Fp8.current), {"mixed_precision_policy": wide}), (cast, {})):
        try:
            shard(Case(Fp8.current, "optim"), model, **options)
        except ValueError as error:
            told.append(str(error))
    return told


def _various(rank: int) -> dict[str, Any]:
    counted = [Case(Fp8.current, "no_shard"), Case(Fp8.current, "optim")]
    counted += [Case(recipe, ZERO_3) for recipe in (Fp8.current, Fp8.mx_32x32)]
    return {
        "traffic": [traffic(rank, case) for case in counted],
        "odd": [_odd(rank, Case(recipe, each)) for recipe, each in zip(Fp8, STRATEGIES, strict=True)],
        "edits": [_edit(rank, each) for each in ("no_shard", ZERO_3)],
        "state": [
            across(rank, Case(Fp8.current, ZERO_3), Case(Fp8.current, "optim")),
            across(rank, Case(Fp8.block, "no_shard"), Case(Fp8.block, ZERO_3)),
            across(rank, Case(Fp8.mx_32x32, ZERO_3), Case(Fp8.mx_32x32, "optim_grads")),
            across(rank, Case(Fp8.mx, ZERO_3), Case(Fp8.mx, "optim")),
        ],
        "meta": [meta(rank, Case(recipe, ZERO_3)) for recipe in (Fp8.current, Fp8.block, Fp8.mx)],
        "frozen": _frozen(rank),
        "exact": [
            [_exact(rank, Case(recipe, each)) for each in ("no_shard", "optim_grads", ZERO_3)]
            for recipe in (Fp8.current, Fp8.mx, Fp8.mx_32x32)
        ],
        "options": [follow(rank, Case(of, ZERO_3), 2, **each) for each in OPTIONS for of in (Fp8.block, Fp8.mx)],
        "refused": _refused(rank),
    }


@pytest.fixture(scope="module")
def various() -> list[dict[str, Any]]:
    """One visit of two ranks; what each has to tell."""
    return run_ranks(_various, 2)


def test_a_gather_moves_one_byte_a_parameter_and_one_collective_makes_scales(various: list[dict[str, Any]]) -> None:
    alone, optim, params, tiled = various[0]["traffic"]
    assert not any(PURPOSE in each for each in alone[0]), "weights that no rank cuts need no amax of others"
    for (rows, moved), gathers in ((optim, 1), (params, 2), (tiled, 2)):
        for name, width in (("blocks.0/bfloat16/fp8", 1), ("blocks.0/bfloat16", 2)):
            assert rows["all_gather", name] == (gathers, gathers * moved[name] * width // 2), name
    layers = 4
    assert optim[0]["all_reduce", PURPOSE] == (1, 4 * layers), "an amax a weight"
    assert params[0]["all_reduce", PURPOSE] == (1, 4 * layers)
    assert tiled[0]["all_reduce", PURPOSE] == (1, 4 * layers * WIDTH * HIDDEN // 32**2), "an amax a tile"


def test_odd_weights_are_quantized_in_shards_as_whole(various: list[dict[str, Any]]) -> None:
    assert [each["odd"] for each in various] == [[[]] * len(Fp8)] * 2


def test_state_is_exact_in_the_same_layout_and_in_another(various: list[dict[str, Any]]) -> None:
    assert [each["state"] for each in various] == [[[], [], [], []]] * 2


def test_models_without_memory_are_reset_before_they_are_quantized(various: list[dict[str, Any]]) -> None:
    assert [each["meta"] for each in various] == [[[], [], []]] * 2


def test_exact_has_one_hash_under_every_strategy(various: list[dict[str, Any]]) -> None:
    for of_recipe in zip(*(each["exact"] for each in various), strict=True):
        assert len({found for of_rank in of_recipe for found in of_rank}) == 1


def test_options_change_nothing_of_8_bits(various: list[dict[str, Any]]) -> None:
    assert [each["options"] for each in various] == [[[]] * 2 * len(OPTIONS)] * 2


def test_frozen_weights_stay_in_the_compute_dtype(various: list[dict[str, Any]]) -> None:
    labels = ["float32", "float32", "float32", "float32/fp8", "float32/fp8", "float32/frozen"]
    assert [each["frozen"] for each in various] == [labels] * 2


def test_what_8_bits_cannot_hold_is_refused(various: list[dict[str, Any]]) -> None:
    for told in various:
        assert all("was edited in place: it is kept in 8 bits" in each for each in told["edits"]), told["edits"]
        wide, cast = told["refused"]
        assert "main_params_dtype=torch.float64 cannot be quantized to 8 bits" in wide
        assert "is torch.float8_e4m3fn before sharding" in cast
