"""Mistakes that an engine of FP8 weights could have; following plain torch finds each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from harness.fsdp.storage.gradients import Gradients
from harness.fsdp.vocabulary import Fp8
from tests.fsdp.checked import Mutant, each_is_found, of_slips
from tests.fsdp.fp8.sharded import Case, follow
from tests.streams.recorder import Recorder, believing_in


@contextmanager
def _waiting_in_8_bits() -> Iterator[None]:
    """Where work is queued: elsewhere gradients come in the bucket's dtype."""
    always = property(lambda self: True, lambda self, value: None)
    with believing_in(Recorder().cuda), mock.patch.object(Gradients, "first_may_wait", always, create=True):
        yield


def _follow(rank: int, words: str) -> Any:
    """Strategy, recipe; and of two tensor-parallel ranks, what they recompute."""
    inner, recipe, *recompute = words.split(", ")
    tp = {"tp": 2, "recompute": recompute[0].removeprefix("nothing")} if recompute else {}
    return follow(rank, Case(Fp8[recipe], inner, **tp))


WORLD, CHECKS = 4, {"follow": _follow}
MUTANTS = {
    "gradients-of-8-bits": Mutant(
        "Gradients are cast to the dtype of the weight, as they are of weights that are not held in 8 bits",
        _waiting_in_8_bits,
        "follow",
        "optim_grads, current",
        "The engine, by its 8-bit weights",
    ),
} | of_slips(
    r"""
    [The engine, by its 8-bit weights]
    amax-of-own-rows: Each rank makes scales of the rows it has
        fsdp.storage.codec._take_largest: lambda *_, **__: None
        follow / optim, current
    scale-of-first-rows: A shard is quantized under the scales of the weight's first rows
        fp8.tile_scales.TileScales.encode: rows.shape, first) => rows.shape)
        follow / optim_grads_params, block
    stale-scale: Weights are quantized under the scales they began with
        fsdp.storage.codec.Fp8Weight.rescale: self.scales.take(maxima)
            => hasattr(self, "stale") or self.scales.take(maxima)\n    self.stale = True
        follow / optim_grads, block
    scaling-of-others: The exponent of a tile is rounded down, so that its largest values saturate
        fp8.tile_scales.TileScales.maxima: exponent_above(found => exponent_above(0.5 * found
        follow / optim_grads_params, mx_32x32
    [FP8 weights, by tensor parallelism]
    amax-of-own-TP shard: Tensor-parallel ranks make scales of the TP shards they have
        fsdp.storage.codec.refresh_scales: _take_largest(meshes.tensor => _take_largest(None
        follow / optim_grads_params, current, nothing
    own-TP shards-first: Until the first update scales are of the TP shards that each rank has
        fsdp.runtime.weights.Weights.agree_on_scales: lambda self: None
        follow / optim_grads_params, current, nothing
    tiles-of-neighbours: Tensor-parallel ranks share scales of tiles that each has for itself
        fsdp.storage.codec.Fp8Weight.__init__: not tp_shard.is_whole and => True or
        follow / optim_grads, block, nothing
    another-dtype-again: A weight in 8 bits is saved for the backward as the DTensor it is in, which says another dtype
        fp8.linear._CutWeight: lambda weight: None
        follow / no_shard, current, within
    """  # the last one ends them: ranks stop in the middle of it
)
test_a_mutant_is_found = each_is_found(__name__, MUTANTS)
