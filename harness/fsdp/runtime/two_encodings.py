"""The gather pipeline of models whose weights have an encoding for each direction; see [Note: Two encodings].

Under `optim_grads_params` a forward gathers its copy of such weights and a backward the other, one byte a parameter
each, as Megatron-FSDP does; so the last unit of a forward does not stay for the backward, as others do. The root, whose
weights stay from the forward's begin to the backward's end, has both.

A backward needs the forward's copy too where a forward is recomputed in it. The first backward gathers both copies and
records which were used; all ranks then agree on it for each unit, so that none gathers what others do not. A unit that
no rank used until then always gathers both. A copy that is needed and not here is gathered when the module's hooks, or
the layer itself, request it: correct as long as all ranks do, and not overlapped with anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.units import Unit
from harness.fsdp.runtime.weak_hooks import WeakHook
from harness.fsdp.storage.codec import BACKWARD, BOTH, FORWARD

PURPOSE = "recomputed forwards"
_RANKING = (0, BACKWARD, BOTH)
"""Directions that a backward may have requested of a unit, the most last."""


class TwoEncodings(GatherPipeline):
    """Gathers the copy of a unit's weights that a direction needs.

    Args:
        everyone: all ranks that gather together.
    """

    def __init__(self, units: Sequence[Unit], prefetch: int, limit_bytes: int | None, everyone: Communicator) -> None:
        super().__init__(units, prefetch, limit_bytes)
        self._everyone = everyone
        self._seen = {unit: 0 for unit in self.order if has_two_encodings(unit)}
        """Directions that backwards have requested of each unit, as far as this rank knows."""
        self._agreed: dict[Unit, int] = {}
        for unit in self._seen:
            for weight in (each for bucket in unit.buckets for each in bucket.codec.encoded):
                weight.request = WeakHook(self.complete, unit)

    @property
    def last(self) -> Unit | None:
        last = super().last
        return None if last in self._seen else last

    def complete(self, unit: Unit, direction: int) -> None:
        if unit in self._seen:
            if self.in_backward:
                self._seen[unit] |= direction
            self._bring(unit, direction)

    def _bring(self, unit: Unit, directions: int) -> None:
        for bucket in unit.buckets:
            bucket.unshard(directions)
            bucket.wait_for_unshard()

    def hold(self, units: Sequence[Unit]) -> list[Unit]:
        found = super().hold(units)
        for unit in found:
            self.complete(unit, BOTH)
        return found

    def _directions(self, unit: Unit) -> int:
        if unit.is_root or unit not in self._seen:
            return BOTH
        return self._agreed.get(unit, BOTH) if self.in_backward else FORWARD

    def step_ended(self) -> None:
        """Agree on what backwards need. *Collective* until ranks have agreed."""
        if not self._seen or self._agreed:
            return
        requested = [_RANKING.index(BOTH if each & FORWARD else each) for each in self._seen.values()]
        known = torch.tensor(requested, dtype=torch.int32, device=self._everyone.runtime.device)
        found = self._everyone.largest(known, PURPOSE).tolist()
        if any(found):
            self._agreed = {unit: _RANKING[most] or BOTH for unit, most in zip(self._seen, found, strict=True)}


def has_two_encodings(unit: Unit) -> bool:
    return any(len(bucket.encodings) > 1 for bucket in unit.buckets)


def pipeline_of(
    units: Sequence[Unit], everyone: Communicator, prefetch: int, limit_bytes: int | None
) -> GatherPipeline:
    if any(has_two_encodings(unit) for unit in units):
        return TwoEncodings(units, prefetch, limit_bytes, everyone)
    return GatherPipeline(units, prefetch, limit_bytes)
