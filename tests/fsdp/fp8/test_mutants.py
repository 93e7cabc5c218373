"""Mistakes that an engine of FP8 weights could have; following plain torch finds each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointError

from harness.fp8 import linear, tile_scales
from harness.fp8.quantize import History, exponent_above, spread
from harness.fsdp.runtime.weights import Weights
from harness.fsdp.storage import codec
from harness.fsdp.vocabulary import Fp8
from tests.fsdp.checked import patched
from tests.fsdp.fp8.sharded import Case, follow
from tests.fsdp.fp8.test_sharded import ZERO_3, going_on
from tests.streams.recorder import Recorder, believing_in
from tests.support.covering import once
from tests.support.mutants import each
from tests.support.spawn import run_ranks

INSTALL, RESCALE, UPDATE = Weights.install, codec.Fp8Weight.rescale, History.update


def _own_rows_alone() -> AbstractContextManager[Any]:
    return mock.patch.object(codec, "_take_largest", return_value=None)


def _first_row(grid: Any, tile: Any, shape: Any, first_row: int = 0) -> Any:
    return spread(grid, tile, shape)


def _stale(self: Any, amaxes: Any) -> None:
    if not hasattr(self, "stale"):
        RESCALE(self, amaxes)
    self.stale = True


def _rounded_down(values: Any) -> Any:
    return exponent_above(values * 0.5)


def _always_a_step(self: Any, *, step_ended: bool = False) -> None:
    INSTALL(self, step_ended=True)


def _never_a_step(self: Any, *, step_ended: bool = False) -> None:
    INSTALL(self)


def _only_expect(self: Any, gradients: Any) -> None:
    gradients.expect()


@contextmanager
def _waiting_in_8_bits() -> Iterator[None]:
    """Where work is queued: elsewhere gradients come in the bucket's dtype."""
    with believing_in(Recorder().cuda), mock.patch.object(codec.Fp8Codec, "prepare", _only_expect):
        yield


def _data_parallel_alone() -> AbstractContextManager[Any]:
    """Nothing is heard of the tensor-parallel axis, whose ranks follow each other."""
    take = codec._take_largest

    def some(comm: Any, tensors: Any) -> None:
        ranks = [0] if comm is None else dist.get_process_group_ranks(comm.group)
        if len(ranks) == 1 or ranks[1] - ranks[0] > 1:
            take(comm, tensors)

    return mock.patch.object(codec, "_take_largest", some)


MUTANTS: dict[str, tuple[str, Case, Any]] = {
    "amax-of-own-rows": ("Each rank makes scales of the rows it has", Case(Fp8.current, "optim"), _own_rows_alone),
    "scale-of-first-rows": (
        "A shard is quantized under the scales of the weight's first rows",
        Case(Fp8.block, ZERO_3),
        lambda: mock.patch.object(tile_scales, "spread", _first_row),
    ),
    "stale-scale": (
        "Weights are quantized under the scales they began with",
        Case(Fp8.block, "optim_grads"),
        lambda: mock.patch.object(codec.Fp8Weight, "rescale", _stale),
    ),
    "scaling-of-others": (
        "The exponent of a tile is rounded down, so that its largest values saturate",
        Case(Fp8.mx_32x32, ZERO_3),
        lambda: mock.patch.object(tile_scales, "exponent_above", _rounded_down),
    ),
    "gradients-of-8-bits": (
        "Gradients are cast to the dtype of the weight, as they are of weights that are not held in 8 bits",
        Case(Fp8.current, "optim_grads"),
        _waiting_in_8_bits,
    ),
    "history-stands": (
        "No step of delayed scaling ever ends",
        Case(Fp8.delayed, "optim"),
        lambda: mock.patch.object(Weights, "install", _never_a_step),
    ),
    "loading-is-a-step": (
        "Weights that are loaded end a step of delayed scaling, and are quantized under its next scale",
        Case(Fp8.delayed, ZERO_3),
        lambda: mock.patch.object(Weights, "install", _always_a_step),
    ),
}


OF_PORTIONS: dict[str, tuple[str, Case, Any]] = {
    "amax-of-own-TP shard": (
        "Tensor-parallel ranks make scales of the TP shards they have",
        Case(Fp8.current, ZERO_3, tp=2),
        _data_parallel_alone,
    ),
    "own-TP shards-first": (
        "Until the first update scales are of the TP shards that each rank has",
        Case(Fp8.current, ZERO_3, tp=2),
        patched(Weights, "agree_on_scales", lambda self: None),
    ),
    "tiles-of-neighbours": (
        "Tensor-parallel ranks share scales of tiles that each has for itself",
        Case(Fp8.block, "optim_grads", tp=2),
        lambda: mock.patch.object(
            codec.Fp8Weight, "shares_tiles", property(lambda self: True, lambda *_: None), create=True
        ),
    ),
    "history-of-TP shards": (
        "Under delayed scaling a rank does not hear what tensor-parallel ranks have multiplied",
        Case(Fp8.delayed, "optim", tp=2),
        _data_parallel_alone,
    ),
    "another-dtype-again": (  # the last one: ranks stop in the middle of it
        "A weight in 8 bits is saved for the backward as the DTensor it is in, which says another dtype",
        Case(Fp8.current, "no_shard", tp=2, recompute="within"),
        patched(linear, "_CutWeight", lambda weight: None),
    ),
}


def _visit(rank: int, world: int) -> dict[str, list[str]]:
    told = {}
    for name, (_, case, mutant) in (MUTANTS if world == 2 else OF_PORTIONS).items():
        with mutant():
            try:
                told[name] = going_on(rank, case, case) if name == "loading-is-a-step" else follow(rank, case)
            except CheckpointError as error:
                told[name] = [str(error)]
    return told


@once
def told(world: int) -> list[dict[str, list[str]]]:
    """What each rank finds wrong with each mutant."""
    return run_ranks(_visit, world, world)


@pytest.mark.parametrize("name", each("The engine, by its 8-bit weights", ((n, m[0]) for n, m in MUTANTS.items())))
def test_a_mutant_is_found(name: str) -> None:
    assert any(found[name] for found in told(2))


@pytest.mark.parametrize(
    "name", each("FP8 weights, by tensor parallelism", ((n, m[0]) for n, m in OF_PORTIONS.items()))
)
def test_a_mutant_of_tp_shards_is_found(name: str) -> None:
    assert any(found[name] for found in told(4))
