"""The gathered weights of one unit: where they are, and what brings them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import Pending
from harness.fsdp.comm.device import DeviceRuntime, Event
from harness.fsdp.comm.events import Label
from harness.fsdp.runtime.state_machine import StateMachine
from harness.fsdp.runtime.units import Unit
from harness.fsdp.storage.codec import BACKWARD, BOTH, FORWARD, Encoding
from harness.fsdp.storage.param_group import ParamGroup

DIRECTIONS = (0, FORWARD, BACKWARD, BOTH)


class WeightState(Enum):
    SHARDED = "each rank holds its part"
    UNSHARDING = "a gather is under way: of the unit that is wanted, or of one that is prefetched"
    UNSHARDED = "whole on every rank, until they are resharded"

    __hash__ = object.__hash__  # Enum's own is written in Python


class WeightCall(Enum):
    unshard = "unshard()"
    wait = "wait()"
    reshard = "reshard()"
    fail = "an exception in a gather"

    __hash__ = object.__hash__


WEIGHT_TRANSITIONS = {
    WeightState.SHARDED: {WeightCall.unshard: (WeightState.UNSHARDING,)},
    WeightState.UNSHARDING: {
        WeightCall.wait: (WeightState.UNSHARDED,),
        WeightCall.fail: (WeightState.SHARDED,),  # a gather that raises brings nothing
    },
    WeightState.UNSHARDED: {WeightCall.reshard: (WeightState.SHARDED,)},
}


Gather = tuple[Pending, Event]
"""One encoding of a bucket on its way; and the end of the cast of this rank's part, where no collective comes after."""


class UnitWeights(StateMachine[WeightState, WeightCall]):
    """A unit's weights, and the gathers that bring them."""

    state = WeightState.SHARDED
    transitions = WEIGHT_TRANSITIONS
    refusals = {}  # noqa: RUF012 # none that a user could make

    def __init__(self, unit: Unit, runtime: DeviceRuntime) -> None:
        self.unit = unit
        self.runtime = runtime
        gathered = [
            (bucket, encoding, Label("all_gather", bucket.name + encoding.suffix))
            for bucket in unit.buckets
            for encoding in bucket.encodings
        ]
        self._gathered = {wanted: [each for each in gathered if each[1].directions & wanted] for wanted in DIRECTIONS}
        """Buckets, encodings and labels to gather, by directions."""
        self._labels = {wanted: [label for _, _, label in self._gathered[wanted]] for wanted in DIRECTIONS}
        self._gathers: list[Gather] = []
        self.wanted = BOTH
        """Directions that are gathered next."""
        self.directions = 0
        """Directions of which weights are whole, or on their way; see [Note: Two encodings]."""

    def unshard(self, directions: int) -> None:
        """Start gathering them, which are sharded, for these directions. *Collective.*"""
        self._gathers = [self._gather(*each) for each in self._gathered[directions]]
        self.directions = directions
        self.move(WeightCall.unshard)

    def add(self, directions: int) -> None:
        """Bring those for further directions, the others being here. *Collective.*"""
        found = [self._gather(*each) for each in self._gathered[directions] if not each[1].is_valid]
        self._gathers += found
        self.directions |= directions
        self._receive(found)

    def _gather(self, bucket: ParamGroup, encoding: Encoding, label: Label) -> Gather:
        comm = bucket.mesh.gather
        if comm.shm is not None:  # no storage is taken before its time
            return comm.gather_late(bucket.given(encoding), partial(bucket.own_filled, encoding), label), Event()
        bucket.allocate_weights(encoding)
        with self.runtime.stream("gather"):
            bucket.receive()  # of the outer axis
            bucket.fill_own(encoding)
            pending = comm.all_gather(bucket.weight_parts(encoding), label)
            return pending, self.runtime.record() if comm.size == 1 else Event()

    def wait(self) -> None:
        """Have those that are on their way here, for whoever runs next."""
        try:
            self._receive(self._gathers)
        except BaseException:
            self.move(WeightCall.fail)
            raise
        self.move(WeightCall.wait)

    def _receive(self, gathers: Sequence[Gather]) -> None:
        with events.waiting(*self._labels[self.directions]):
            for pending, cast in gathers:
                cast.wait()
                pending.wait()
        for _, encoding, _ in self._gathered[self.directions]:
            encoding.is_valid = True
        for bucket in self.unit.buckets:
            bucket.point_at_weights()

    def reshard(self) -> None:
        """Drop what is whole."""
        self.move(WeightCall.reshard)
        self._gathers, self.directions = [], 0
        for bucket in self.unit.buckets:
            bucket.release_weights()

    def cancel(self) -> None:
        """Let nobody wait for this rank in gathers under way."""
        for pending, _ in self._gathers:
            pending.cancel()
