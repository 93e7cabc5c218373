"""Mistakes that an engine of FP8 weights could have; following plain torch finds each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from harness.fsdp.options import Fp8
from harness.fsdp.storage.gradients import Gradients
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
    """words: strategy, recipe."""
    inner, recipe = words.split(", ")
    return follow(rank, Case(Fp8[recipe], inner))


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
        fp8.quantize.TileScales.encode: rows.shape, start // rows.shape[1]) => rows.shape)
        follow / optim_grads_params, block
    stale-scale: Weights are quantized under the scales they began with
        fp8.quantize.TileScales.take: self.scale.copy_(scale)
            => if hasattr(self, "stale"): return\n    self.stale = True\n    self.scale.copy_(scale)
        follow / optim_grads, block
    scaling-of-others: The exponent of a tile is rounded down, so that its largest values saturate
        fp8.quantize.TileScales.take: maxima.view_as => (0.5 * maxima).view_as
        follow / optim_grads_params, mx_32x32
    """
)
test_a_mutant_is_found = each_is_found(__name__, MUTANTS)
