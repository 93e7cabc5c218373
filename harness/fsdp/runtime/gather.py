"""The gather pipeline: which units have their weights, which are on the way, what is fetched ahead.

[Note: One order] Every sweep over the model (a forward, a backward) issues the gathers of all units in one static
order, forwards or in reverse, each exactly once: a unit that this rank skips is gathered and dropped when its turn has
passed. So the order of collectives is the same on all ranks even where they do not use the same units, as long as each
rank runs the units it uses in definition order and once a forward. A unit asked for after its turn (its module runs
late, or again) is gathered again out of turn, and the order modules ran in becomes the static one; all ranks must then
run the same modules in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import Communicator, Pending, read_parts
from harness.fsdp.comm.device import DeviceRuntime, Event
from harness.fsdp.comm.events import Label
from harness.fsdp.runtime.units import Unit
from harness.fsdp.storage.bucket import Bucket


class LateGather:
    """A gather of which this rank's part is laid out at once, and the others' read when the unit is wanted.

    For ranks without a core to spare (see [Note: Spare cores]): no storage is taken before its time. Where weights are
    computed with as they are stored, the others read the main weights themselves; laying these out costs nothing, so a
    sweep lays out all of its units at once, and no rank waits for one that comes late to a unit. `has_copies` tells
    where that is not so. Other ranks may use `Communicator.all_gather` meanwhile.
    """

    def __init__(self, bucket: Bucket, comm: Communicator, label: Label) -> None:
        self._bucket, self.label = bucket, label
        self._own = bucket.given()
        self.has_copies = bucket.gives_copies
        self._pending, self._laid = comm.lay_out(self._own, label)

    def receive(self) -> None:
        """Take storage for the whole bucket and fill it. Once."""
        self._bucket.allocate_weights()
        parts = self._bucket.weight_parts()
        self._bucket.fill_own()
        read_parts(self._laid, parts)

    def wait(self) -> None:
        """Block until the other ranks have this one's part. Repeatable."""
        self._pending.wait()
        self._own = []


class GatherPipeline:
    """Weights of units under `optim_grads_params`; elsewhere weights are resident and nothing happens here.

    Args:
        units: in forward order, the root first. The root stays gathered from the forward's begin to the backward's end.
        prefetch: units gathered ahead of the one in use, at least 0.
        limit_bytes: of weights gathered ahead of the unit in use, never exceeded; None: whatever `prefetch` allows.
    """

    def __init__(
        self, units: Sequence[Unit], runtime: DeviceRuntime, prefetch: int, limit_bytes: int | None = None
    ) -> None:
        self.runtime = runtime
        self.prefetch = prefetch
        self.limit_bytes = limit_bytes
        self.order = [unit for unit in units if any(not bucket.resident for bucket in unit.buckets)]
        self._in_flight: dict[str, list[tuple[Pending | LateGather, Event]]] = {}
        self._held: dict[str, list[Pending | LateGather]] = {}
        """Units whose weights are here, and gathers that others may not have finished."""
        self._outgoing: list[LateGather] = []
        self._sweep: list[Unit] = []
        self._next = 0
        self._ran: list[Unit] = []
        self._late = False
        self.num_alive_peak = 0

    @property
    def last(self) -> Unit | None:
        """The unit a forward ends with; its weights are kept for the backward that begins with it."""
        return self.order[-1] if self.order else None

    def begin_forward(self) -> None:
        """Start a sweep in forward order, with the root, and start fetching what comes after it."""
        self._begin([unit for unit in self.order if unit.name not in self._held])
        self._ran, self._late = [], False
        for unit in self.order:
            if unit.is_root:
                self.request(unit)

    def end_forward(self, *, backward_follows: bool) -> None:
        """Finish the sweep: units that did not run take their turn; the last one stays if a backward follows."""
        self._take_turns(len(self._sweep), keep=self.last if backward_follows else None)
        for unit in self.order:  # joined modules of which the last did not run
            if unit.name in self._held and unit is not self.last:
                self.release(unit)
        if self._late:
            self._learn_order()
        if not backward_follows:
            self.release_all()

    def begin_backward(self) -> None:
        """Start a sweep in reverse order."""
        self._begin([unit for unit in reversed(self.order) if unit.name not in self._held])

    def end_backward(self) -> None:
        """Finish the sweep and release everything."""
        self._take_turns(len(self._sweep))
        self.release_all()

    def request(self, unit: Unit) -> None:
        """Make a unit's weights usable by what the caller does next, and fetch the following ones."""
        if unit not in self.order:
            return
        self._ran.append(unit)
        if unit.name not in self._held:
            self._reach(unit)
            self._issue(unit)
            self._land(unit)
        self._fetch_ahead()

    def release(self, unit: Unit) -> None:
        """Drop a unit's weights; the root's stay until the sweep that ends them."""
        if unit.name in self._held and not unit.is_root:
            self._drop(unit)

    def release_all(self) -> None:
        """Land what is in flight and drop everything, the root too; a sweep that was under way is over."""
        self._begin([])
        for unit in self.order:
            if unit.name in self._in_flight:
                self._land(unit)
            if unit.name in self._held:
                self._drop(unit)
        with events.waiting(*(each.label for each in self._outgoing)):
            while self._outgoing:
                self._outgoing.pop().wait()

    def pass_turn(self, unit: Unit) -> None:
        """Bring the sweep past a unit that this rank is done with; others may still want its part of the weights."""
        if unit in self._sweep:
            self._take_turns(self._sweep.index(unit) + 1)

    def reset_peak(self) -> None:
        """Let `num_alive_peak` begin anew from what is alive now."""
        self.num_alive_peak = self._num_alive()

    def _begin(self, sweep: list[Unit]) -> None:
        self._sweep, self._next = sweep, 0

    def _reach(self, unit: Unit) -> None:
        """Bring the sweep to a unit: those before it take their turn, or it is out of turn."""
        place = self._sweep.index(unit) if unit in self._sweep else -1
        self._take_turns(max(place, 0))
        if place == self._next:
            self._next += 1
        elif unit.name not in self._in_flight:
            self._late = True

    def _take_turns(self, until: int, keep: Unit | None = None) -> None:
        """Gather the units before place `until` that have not had their turn; drop those fetched and not in use."""
        for place, unit in enumerate(self._sweep[:until]):
            if place >= self._next:
                self._next = place + 1
                self._issue(unit)
            if unit.name in self._in_flight:
                self._land(unit)
                if unit is not keep and not unit.is_root:
                    self._drop(unit)

    def _fetch_ahead(self) -> None:
        while self._next < len(self._sweep):
            ahead = [unit for unit in self.order if self._takes_storage(unit)]
            following = self._sweep[self._next]
            if len(ahead) >= self.prefetch or not all(bucket.has_room for bucket in following.buckets):
                return
            if self.limit_bytes is not None and sum(u.weight_bytes for u in [*ahead, following]) > self.limit_bytes:
                return
            self._next += 1
            self._issue(self._sweep[self._next - 1])

    def _takes_storage(self, unit: Unit) -> bool:
        """Whether a unit on its way, not the root, has memory for that already."""
        handles = () if unit.is_root else self._in_flight.get(unit.name, ())
        return any(not isinstance(each, LateGather) or each.has_copies for each, _ in handles)

    def _issue(self, unit: Unit) -> None:
        """Start gathering a unit, unless it is on its way or here."""
        if unit.name in self._in_flight or unit.name in self._held:
            return
        handles: list[tuple[Pending | LateGather, Event]] = []
        for bucket in unit.buckets:
            label = Label("all_gather", bucket.name)
            comm = bucket.context.mesh.gather
            if comm.reads_when_wanted(bucket.gathered_bytes):
                handles.append((LateGather(bucket, comm, label), self.runtime.record()))
                continue
            bucket.allocate_weights()
            with self.runtime.stream("gather"):
                bucket.fill_own()
                pending = comm.all_gather(bucket.weight_parts(), label, ahead=True)
                handles.append((pending, self.runtime.record()))
        self._in_flight[unit.name] = handles
        self.num_alive_peak = max(self.num_alive_peak, self._num_alive())

    def _num_alive(self) -> int:
        """Units, the root apart, whose gathered weights take memory now."""
        return sum(not u.is_root and (self._takes_storage(u) or u.name in self._held) for u in self.order)

    def _land(self, unit: Unit) -> None:
        with events.waiting(*unit.labels("all_gather")):
            landing = self._in_flight.pop(unit.name, [])
            for pending, cast in landing:
                cast.wait()
                pending.receive()
        for bucket in unit.buckets:
            bucket.point_at_weights()
        self._held[unit.name] = [pending for pending, _ in landing]

    def _drop(self, unit: Unit) -> None:
        with events.waiting(*unit.labels("all_gather")):
            for pending in self._held.pop(unit.name, []):
                if isinstance(pending, LateGather):  # others take from the main weights, which stay
                    self._outgoing.append(pending)
                else:
                    pending.wait()
        for bucket in unit.buckets:
            bucket.release_weights()

    def _learn_order(self) -> None:
        """Adopt the order in which units ran; units that did not run stay behind their present predecessor."""
        ran = list({unit.name: unit for unit in self._ran}.values())
        learned = [unit for unit in self.order if unit.is_root] + [unit for unit in ran if not unit.is_root]
        for place, unit in enumerate(self.order):
            if unit not in learned:
                before = self.order[place - 1] if place else None
                learned.insert(learned.index(before) + 1 if before is not None else 0, unit)
        self.order = learned
