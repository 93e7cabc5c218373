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
from harness.fsdp.comm.device import DeviceRuntime
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.unit_weights import WeightState
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

    def __init__(
        self,
        units: Sequence[Unit],
        runtime: DeviceRuntime,
        prefetch: int,
        limit_bytes: int | None,
        everyone: Communicator,
    ) -> None:
        super().__init__(units, runtime, prefetch, limit_bytes)
        self._everyone = everyone
        self._in_backward = False
        self._seen = {unit: 0 for unit in self.order if has_two_encodings(unit)}
        """Directions that backwards have requested of each unit, as far as this rank knows."""
        self._agreed: dict[Unit, int] = {}
        for unit in self._seen:
            for weight in (each for bucket in unit.buckets for each in bucket.codec.encoded):
                weight.request = WeakHook(self.complete, unit)

    @property
    def last(self) -> Unit | None:
        """See `GatherPipeline.last`."""
        last = super().last
        return None if last in self._seen else last

    def pre_forward(self) -> None:
        """See `GatherPipeline.pre_forward`."""
        self._in_backward = False
        super().pre_forward()

    def pre_backward(self) -> None:
        """See `GatherPipeline.pre_backward`."""
        self._in_backward = True
        super().pre_backward()

    def reshard_all(self) -> None:
        """See `GatherPipeline.reshard_all`."""
        self._in_backward = False
        super().reshard_all()

    def unshard(self, unit: Unit, direction: int) -> None:
        """See `GatherPipeline.unshard`; the copy for the direction comes before what is prefetched."""
        if unit in self._seen:
            self._wake(unit)
            if not self._is(unit, WeightState.UNSHARDED):
                self._reach(unit)
                self._start_unshard(unit)
                self._wait_for_unshard(unit)
            self.complete(unit, direction)
        super().unshard(unit, direction)

    def _start_unshard(self, unit: Unit) -> None:
        self._weights[unit.name].wanted = self._wanted(unit)
        super()._start_unshard(unit)

    def complete(self, unit: Unit, direction: int) -> None:
        """Gather the copy for a direction of a unit that is unsharded. *Collective* where it is not here."""
        if unit not in self._seen:
            return
        if self._in_backward:
            self._seen[unit] |= direction
        weights = self._weights[unit.name]
        if not weights.directions & direction:
            weights.add(direction)

    def hold(self, units: Sequence[Unit]) -> list[Unit]:
        """See `GatherPipeline.hold`; both copies."""
        found = super().hold(units)
        for unit in found:
            self.complete(unit, FORWARD)
            self.complete(unit, BACKWARD)
        return found

    def _wanted(self, unit: Unit) -> int:
        if unit.is_root or unit not in self._seen:
            return BOTH
        return self.directions(unit) if self._in_backward else FORWARD

    def directions(self, unit: Unit) -> int:
        """Directions that a backward gathers a unit's weights for: both until ranks have agreed on less."""
        return self._agreed.get(unit, BOTH)

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
    """True if some of the unit's weights are others in the backward."""
    return any(len(bucket.encodings) > 1 for bucket in unit.buckets)


def pipeline_of(
    units: Sequence[Unit], everyone: Communicator, runtime: DeviceRuntime, prefetch: int, limit_bytes: int | None
) -> GatherPipeline:
    """The pipeline for the encodings of a model; arguments as of `GatherPipeline` and `TwoEncodings`."""
    if any(has_two_encodings(unit) for unit in units):
        return TwoEncodings(units, runtime, prefetch, limit_bytes, everyone)
    return GatherPipeline(units, runtime, prefetch, limit_bytes)
