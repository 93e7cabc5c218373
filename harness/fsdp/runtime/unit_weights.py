"""The gathered weights of one unit: where they are, and what brings them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import Communicator, Pending, read_parts
from harness.fsdp.comm.device import DeviceRuntime, Event
from harness.fsdp.comm.events import Label
from harness.fsdp.runtime.state_machine import StateMachine
from harness.fsdp.runtime.units import Unit
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.codec import BACKWARD, BOTH, FORWARD, Encoding

DIRECTIONS = (0, FORWARD, BACKWARD, BOTH)


class LateGather:
    """A gather of which this rank's part is laid out at once, and the others' read when the unit is wanted.

    For ranks without a core to spare (see [Note: Spare cores]): no storage is taken before its time. Where weights are
    computed with as they are stored, the others read the main weights themselves; laying these out costs nothing, so a
    sweep lays out all of its units at once, and no rank waits for one that comes late to a unit. `has_copies` tells
    where that is not so. Other ranks may use `Communicator.all_gather` meanwhile.
    """

    def __init__(self, bucket: Bucket, encoding: Encoding, comm: Communicator, label: Label) -> None:
        self._bucket, self._encoding, self.label = bucket, encoding, label
        self.has_copies = bucket.gives_copies
        self._pending, self._laid = comm.lay_out(bucket.given(encoding), label)

    def receive(self) -> None:
        """Take storage for the whole bucket and fill it. Once."""
        self._bucket.allocate_weights(self._encoding)
        parts = self._bucket.weight_parts(self._encoding)
        self._bucket.fill_own(self._encoding)
        read_parts(self._laid, parts)

    def let_go(self) -> bool:
        """Drop copies that this rank gives, if the others are known to have them; whether they are gone."""
        return self._pending.let_go()

    def wait(self) -> None:
        """Block until the other ranks have this one's part. Repeatable."""
        self._pending.wait()


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


Gather = tuple[Pending | LateGather, Event]
"""One encoding of a bucket on its way; and the end of the cast of this rank's part, where no collective comes after."""


class UnitWeights(StateMachine[WeightState, WeightCall]):
    """A unit's weights, and the gathers that bring them, which others may not have finished."""

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

    @property
    def take_storage(self) -> bool:
        on_way = self._gathers if self.state is WeightState.UNSHARDING else ()
        return any(not isinstance(each, LateGather) or each.has_copies for each, _ in on_way)

    @property
    def copies(self) -> list[LateGather]:
        return [each for each, _ in self._gathers if isinstance(each, LateGather) and each.has_copies]

    def unshard(self, directions: int) -> None:
        """Start gathering them, which are sharded, for these directions. *Collective.*"""
        self._gathers = [self._gather(*each) for each in self._gathered[directions]]
        self.directions = directions
        self.move(WeightCall.unshard)

    def add(self, directions: int) -> list[LateGather]:
        """Bring those for further directions, the others being here. Returns gathers that others read copies for.
        *Collective.*"""
        found = [self._gather(*each) for each in self._gathered[directions] if not each[1].is_valid]
        self._gathers += found
        self.directions |= directions
        self._receive(found)
        return [each for each, _ in found if isinstance(each, LateGather) and each.has_copies]

    def _gather(self, bucket: Bucket, encoding: Encoding, label: Label) -> Gather:
        comm = bucket.context.mesh.gather
        if comm.reads_when_wanted(bucket.gathered_bytes):
            return LateGather(bucket, encoding, comm, label), Event()
        bucket.allocate_weights(encoding)
        with self.runtime.stream("gather"):
            bucket.receive()  # of the outer axis
            bucket.fill_own(encoding)
            pending = comm.all_gather(bucket.weight_parts(encoding), label, ahead=True)
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
                pending.receive()
        for _, encoding, _ in self._gathered[self.directions]:
            encoding.is_valid = True
        for bucket in self.unit.buckets:
            bucket.point_at_weights()

    def wait_for_others(self) -> None:
        """Wait until other ranks have this one's part of what is whole here, and stays so."""
        with events.waiting(*self._labels[self.directions]):
            for pending, _ in self._gathers:
                pending.wait()

    def reshard(self) -> list[LateGather]:
        """Drop what is whole. Returns the gathers in which others may still read this rank's main weights, which stay
        where they are; all others have been waited for."""
        self.move(WeightCall.reshard)
        gathers = self._gathers
        self._gathers, outgoing = [], []
        with events.waiting(*self._labels[self.directions]):
            for pending, _ in gathers:
                if isinstance(pending, LateGather):
                    outgoing.append(pending)
                else:
                    pending.wait()
        self.directions = 0
        for bucket in self.unit.buckets:
            bucket.release_weights()
        return outgoing
