"""Mistakes that an engine of FP8 weights could have; following plain torch finds each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist

from harness.fp8 import linear, tile_scales
from harness.fp8.quantize import exponent_above, spread
from harness.fsdp.runtime.weights import Weights
from harness.fsdp.storage import codec
from harness.fsdp.storage.gradients import Gradients
from harness.fsdp.vocabulary import Fp8
from tests.fsdp.checked import Mutant, each_is_found, patched
from tests.fsdp.fp8.sharded import Case, follow
from tests.fsdp.fp8.test_sharded import ZERO_3
from tests.streams.recorder import Recorder, believing_in

RESCALE = codec.Fp8Weight.rescale


def _first_row(grid: Any, tile: Any, shape: Any, first_row: int = 0) -> Any:
    return spread(grid, tile, shape)


def _stale(self: Any, amaxes: Any) -> None:
    if not hasattr(self, "stale"):
        RESCALE(self, amaxes)
    self.stale = True


def _rounded_down(values: Any) -> Any:
    return exponent_above(values * 0.5)


@contextmanager
def _waiting_in_8_bits() -> Iterator[None]:
    """Where work is queued: elsewhere gradients come in the bucket's dtype."""
    always = property(lambda self: True, lambda self, value: None)
    with believing_in(Recorder().cuda), mock.patch.object(Gradients, "first_may_wait", always, create=True):
        yield


def _data_parallel_alone() -> AbstractContextManager[Any]:
    """Nothing is heard of the tensor-parallel axis, whose ranks follow each other."""
    take = codec._take_largest

    def some(comm: Any, tensors: Any) -> None:
        ranks = [0] if comm is None else dist.get_process_group_ranks(comm.group)
        if len(ranks) == 1 or ranks[1] - ranks[0] > 1:
            take(comm, tensors)

    return mock.patch.object(codec, "_take_largest", some)


_of_shards = partial(Mutant, check=follow, area="The engine, by its 8-bit weights")
_of_tp_shards = partial(Mutant, check=follow, area="FP8 weights, by tensor parallelism")
WORLD = 4
MUTANTS = {
    "amax-of-own-rows": _of_shards(
        "Each rank makes scales of the rows it has",
        patched(codec, "_take_largest", return_value=None),
        strategy=Case(Fp8.current, "optim"),
    ),
    "scale-of-first-rows": _of_shards(
        "A shard is quantized under the scales of the weight's first rows",
        patched(tile_scales, "spread", _first_row),
        strategy=Case(Fp8.block, ZERO_3),
    ),
    "stale-scale": _of_shards(
        "Weights are quantized under the scales they began with",
        patched(codec.Fp8Weight, "rescale", _stale),
        strategy=Case(Fp8.block, "optim_grads"),
    ),
    "scaling-of-others": _of_shards(
        "The exponent of a tile is rounded down, so that its largest values saturate",
        patched(tile_scales, "exponent_above", _rounded_down),
        strategy=Case(Fp8.mx_32x32, ZERO_3),
    ),
    "gradients-of-8-bits": _of_shards(
        "Gradients are cast to the dtype of the weight, as they are of weights that are not held in 8 bits",
        _waiting_in_8_bits,
        strategy=Case(Fp8.current, "optim_grads"),
    ),
    "amax-of-own-TP shard": _of_tp_shards(
        "Tensor-parallel ranks make scales of the TP shards they have",
        _data_parallel_alone,
        strategy=Case(Fp8.current, ZERO_3, tp=2),
    ),
    "own-TP shards-first": _of_tp_shards(
        "Until the first update scales are of the TP shards that each rank has",
        patched(Weights, "agree_on_scales", lambda self: None),
        strategy=Case(Fp8.current, ZERO_3, tp=2),
    ),
    "tiles-of-neighbours": _of_tp_shards(
        "Tensor-parallel ranks share scales of tiles that each has for itself",
        patched(codec.Fp8Weight, "shares_tiles", property(lambda self: True, lambda *_: None), create=True),
        strategy=Case(Fp8.block, "optim_grads", tp=2),
    ),
    "another-dtype-again": _of_tp_shards(  # the last one: ranks stop in the middle of it
        "A weight in 8 bits is saved for the backward as the DTensor it is in, which says another dtype",
        patched(linear, "_CutWeight", lambda weight: None),
        strategy=Case(Fp8.current, "no_shard", tp=2, recompute="within"),
    ),
}
test_a_mutant_is_found = each_is_found(__name__, MUTANTS)
