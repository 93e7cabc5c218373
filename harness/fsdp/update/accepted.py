"""Which optimizers can step shards: what is refused, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.fsdp.options import ELEMENTWISE
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.placement import WHOLE
from harness.fsdp.vocabulary import Numerics

NEEDS_WHOLE = {
    "Muon": "it orthogonalizes whole matrices",
    "LBFGS": "it works on one vector of all parameters",
    "Adafactor": "it keeps sums over whole rows and columns",
    "ZeroRedundancyOptimizer": "it splits whole parameters over ranks once more: use its optimizer_class itself",
}
"""Optimizers that cannot step rows of a matrix, by name, and why."""


def check_optimizer(
    optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], numerics: Numerics, *, decoupled: bool
) -> None:
    """Raise TypeError for an optimizer that needs whole parameters where these are cut, and ValueError for one that
    cannot keep the bits that `numerics` promises, or does not read `decoupled_grad`."""
    name = next((kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in NEEDS_WHOLE), None)
    if name and any(bucket.placements.main_weights != WHOLE for bucket in buckets):
        raise TypeError(
            f"{type(optimizer).__name__} cannot step sharded parameters: {NEEDS_WHOLE[name]}. Use an elementwise"
            f" optimizer ({', '.join(sorted(ELEMENTWISE))}), or zero_dp_strategy=0, under which parameters are whole"
        )
    if decoupled:
        _refuse_decoupled(optimizer)
    if numerics.bitwise:
        _refuse_updates_that_see_cuts(optimizer, buckets)


def _refuse_decoupled(optimizer: torch.optim.Optimizer) -> None:
    if type(optimizer).__module__.startswith("torch.optim"):
        raise ValueError(
            f"use_decoupled_grad=True hands gradients over as `decoupled_grad`, which {type(optimizer).__name__} of"
            " torch does not read: it would update nothing. Use an optimizer that does, or use_decoupled_grad=False"
        )


def _refuse_updates_that_see_cuts(optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
    """torch's `add(other, alpha=)` in 16 bits rounds once inside a tensor and twice in its last few elements.

    Of torch's optimizers, AdamW alone gets by without it.
    """
    narrow = {str(b.dtypes.main) for b in buckets if b.trainable and b.dtypes.main.itemsize < 4}
    if narrow and type(optimizer).__name__ != "AdamW":
        raise ValueError(
            f"numerics=ordered or exact with main_params_dtype={', '.join(sorted(narrow))} needs AdamW: what"
            f" {type(optimizer).__name__} adds to 16-bit weights is rounded otherwise at the end of a tensor, so that"
            " bits would depend on where shards are cut. Use main_params_dtype=torch.float32, AdamW, or numerics=fast"
        )
