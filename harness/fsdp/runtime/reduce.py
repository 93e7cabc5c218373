"""The reduce pipeline: gradients leave in one static order, at most two units of them at a time.

Units are reduced in reverse forward order on every rank. A unit that is ready early waits for its turn; a unit that
this rank did not use contributes zeros, as soon as that is known.

[Note: Who waits for whom] A reduction lands when all ranks have come to it, at the latest when they make room two units
on; for that they need the weights of every unit so far, of which this rank holds a part. So a rank that did not use
these units takes its turn in their gathers before it waits. A gradient of the root may come between any two units: then
this rank may still use the unit that the others make room for, and its gather is begun and kept. A backward ends with
the reductions of what it did not use, and only then waits until the others have this rank's part of all weights.

On CUDA sums are queued on a side stream. On a CPU they are made by whoever waits for them, and when this rank issues
its next unit or waits for anything (`harness.shm.transfer`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from torch import Tensor

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import Part
from harness.fsdp.comm.device import DeviceRuntime, Event
from harness.fsdp.comm.events import OUTER, Label
from harness.fsdp.comm.reduction import Exchange, Reduction
from harness.fsdp.guards import GradientGuard
from harness.fsdp.policy import Dtypes
from harness.fsdp.runtime.step import Step
from harness.fsdp.runtime.units import Unit
from harness.fsdp.storage.memory import BucketMemory
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.placement import OPERATIONS, PARTIAL, SHARD, Axis, Operation

MAX_UNITS = 2
"""Units whose unreduced gradients may exist at once, the one being written included: a rank may be so far ahead.

A unit's storage is found when its first gradient arrives, not when its backward begins.
"""


class PendingReduction:
    """The reduction of one bucket in one backward, from unreduced gradients to this rank's sums; it begins at once.

    Its operations, their axes and their order are the route of the bucket's `Placements` from unreduced to accumulated
    and, in the backward that ends a step, on to main gradients ([Note: Placement], [Note: Outer once]). A reduced
    gradient is *copied* over a buffer that held the unreduced one, and *added* only to a shard that holds sums.
    """

    def __init__(self, bucket: ParamGroup, pipeline: ReducePipeline) -> None:
        assert bucket.gradients is not None
        self.bucket, self.gradients = bucket, bucket.gradients
        self.runtime, self.guard = pipeline.runtime, pipeline.guard
        self.plan, self.microbatch = pipeline.step.plan, pipeline.step.num_backwards
        self.factor = pipeline.factor if bucket.scales_as_it_sums else 1.0
        self.label = self._label(Axis.inner)  # label of the collective along the inner axis
        self.source: Tensor = self.gradients.take()
        self.done: Event | None = None
        self._stages = self._reduce()
        self._has_more = True
        self._stream = "reduce"
        self._copies: list[Tensor] = []  # encoded gradients beside those they were made of
        self.advance(waits=True)
        if self.runtime.has_streams:
            self.run()

    def _reduce(self) -> Iterator[bool]:
        """Go through the route. A `yield` stands between the traffic of an operation and the sums that are made of it,
        so that the traffic of many buckets is issued before any is waited for."""
        gradients, cuts, inner = self.gradients, self.bucket.cuts, self.bucket.inner
        lies, route = self.bucket.placements.main_grads, self.bucket.placements.reductions[self.plan.last]
        source, adds_first = self.source, not (gradients.is_reduced or gradients.is_in_place)
        if adds_first:
            self._look(source, None)
            gradients.allocate_sums()
            inner.numbers.absorb(source, gradients.sums, add=self.plan.adds)
            source = gradients.sums
        if not route:
            return
        wire = inner.numbers.encode(source)
        self._note(wire, source)
        if not adds_first:
            self._look(source, wire)
        exchange = self._exchange(inner, Axis.inner, cuts.inner_parts(wire))
        yield True
        gradients.allocate_sums()
        sums = gradients.inner_shards
        if lies.inner is not SHARD:  # the first leg of an all-reduce
            sums = [part.chunk(inner.comm.rank) for part in cuts.inner_parts(gradients.sums)]
        inner.fold(exchange, sums, add=self.plan.adds and gradients.is_reduced)
        for step in route[1:]:
            if step.operation is Operation.reduce_scatter:
                assert self.bucket.outer is not None
                outer = self.bucket.outer
                outer_sums = cuts.outer_parts(gradients.inner_shards if SHARD in lies else sums)
                self._stream = "outer"
                with self.runtime.stream(self._stream):
                    parts = [self._encoded(part, outer) for part in outer_sums]
                    outer_exchange = self._exchange(outer, Axis.outer, parts)
                yield True
                outer.fold(outer_exchange, [part.chunk(outer.comm.rank) for part in outer_sums], add=False)
            else:
                if step.axis is Axis.outer:
                    spreading = outer.spread(outer_exchange, outer_sums)
                else:
                    spreading = inner.spread(exchange, cuts.second_leg_parts(gradients.sums))
                yield True
                spreading.wait()

    def _exchange(self, reduction: Reduction, axis: Axis, parts: list[Part]) -> Exchange:
        route = self.bucket.placements.reductions[True]
        sums = [step.axis for step in route if step.operation is Operation.reduce_scatter]
        return reduction.exchange(parts, self._label(axis), self.factor if axis is sums[-1] else 1.0)

    def _encoded(self, part: Part, reduction: Reduction) -> Part:
        """A part as it is sent: itself where it already is; else a copy without what lies between its chunks."""
        if part.cut.covers is None and part.tensor.dtype == reduction.dtypes.wire:
            return part
        wire = reduction.numbers.encode(part.chunks.reshape(-1))
        if wire.data_ptr() == part.chunk(0).data_ptr():
            return part
        self._note(wire, part.tensor)
        return Part(wire, part.cut.closed_up)

    def _note(self, wire: Tensor, source: Tensor) -> None:
        if wire is not source:
            self._copies.append(self.bucket.memory.note(wire))

    def _label(self, axis: Axis) -> Label:
        """Label of a collective along one axis: the operation from terms of a sum to main gradients, whole or legs."""
        lies = self.bucket.placements.main_grads
        target, suffix = (lies.inner, "") if axis is Axis.inner else (lies.outer, OUTER)
        return Label(OPERATIONS[PARTIAL, target].value, self.bucket.name + suffix)

    def _look(self, source: Tensor, wire: Tensor | None) -> None:
        if self.guard is not None:
            seen = wire if wire is not None and wire.is_floating_point() else source
            self.guard.look(self.bucket, seen, self.microbatch)

    def advance(self, *, waits: bool = False) -> bool:
        """Run the next stage, if there is one; whether more are left. waits: for what was queued before."""
        if self._has_more:
            with self.runtime.stream(self._stream, waits=waits):
                self._has_more = next(self._stages, False)
        return self._has_more

    def run(self) -> None:
        while self.advance():
            pass
        if self.runtime.has_streams:
            with self.runtime.stream(self._stream, waits=False):
                self.done = self.runtime.record()

    def wait(self) -> None:
        """Block the host or the current stream until the sums are made; raises what making them raised."""
        if self.done is not None:
            self.done.wait()
        else:
            self.run()

    def free(self) -> None:
        for copy in self._copies:
            self.bucket.memory.free(copy)
        if not self.gradients.is_in_place:
            self.bucket.memory.give_back(self.source)


class ReducePipeline:
    """Reductions of all units with trained parameters.

    Args:
        units: in forward order; they are reduced in reverse.
        step: says of the backward that runs what is reduced in it.
        factor: what a step's sums are multiplied with, once. Where a step has one reduction it is applied while the
            sums are in cache; where it has one a microbatch, by `finish`.
        guard: looks at gradients before they are reduced; None looks at nothing.
        before_wait: called before others are waited for, with the unit that they come to when they make room; `keeps`:
            this rank may still use it. See [Note: Who waits for whom].
    """

    def __init__(
        self,
        units: Sequence[Unit],
        runtime: DeviceRuntime,
        memory: BucketMemory,
        step: Step,
        *,
        factor: float,
        guard: GradientGuard | None = None,
        before_wait: Callable[..., None] = lambda unit, *, keeps: None,
    ) -> None:
        self.step, self.guard, self.before_wait = step, guard, before_wait
        self.order = [unit for unit in reversed(units) if unit.trainable]
        self.runtime, self.memory, self.factor = runtime, memory, factor
        self._ready: set[str] = set()
        self._issued = 0
        self._in_flight: deque[tuple[Unit, list[PendingReduction]]] = deque()

    def expect(self, unit: Unit) -> None:
        """A unit's backward begins: its gradients will come, in the dtype they are sent in."""
        waits = self.runtime.has_streams and not unit.is_root and unit.readiness.is_due_once
        for gradients in unit.gradients:
            gradients.expect(waits=waits)

    def prepare(self, unit: Unit) -> None:
        """Give a unit's parameters flat gradient storage, waiting while too many units have theirs."""
        for gradients in unit.gradients:
            if not gradients.is_prepared:
                self._make_room(unit)
            gradients.prepare()

    def _make_room(self, unit: Unit) -> None:
        if len(self._in_flight) >= MAX_UNITS:
            following = self.order[self._issued] if unit.is_root and self._issued < len(self.order) else unit
            self.before_wait(following, keeps=unit.is_root)
        while len(self._in_flight) >= MAX_UNITS:
            self._land()

    def mark_ready(self, unit: Unit) -> None:
        """All gradients of a unit are in; reduce it and whatever waited behind it as soon as its turn comes."""
        self._ready.add(unit.name)
        while self._issued < len(self.order) and self.order[self._issued].name in self._ready:
            self._issue(self.order[self._issued])

    def is_done_with(self, unit: Unit) -> bool:
        """True if this backward's gradients of a unit have been handed over."""
        return unit.name in self._ready

    def post_backward(self, *, reduce: bool) -> None:
        """Reduce what is left, zeros for units that were not used; `reduce=False` keeps accumulating instead."""
        for unit in self.order[self._issued :]:
            if reduce:
                self._issue(unit)
                continue
            for bucket, gradients in zip(unit.trainable, unit.gradients, strict=True):
                gradients.copy_in_waiting()
                if self.guard is not None and gradients.bucket is not None:
                    gradients.settle()
                    self.guard.look(bucket, gradients.bucket, self.step.num_backwards)
        self._ready.clear()
        self._issued = 0

    def drain(self) -> None:
        jobs = [job for _, jobs in self._in_flight for job in jobs]
        if not self.runtime.has_streams and all(job.bucket.placements.accumulates_locally for job in jobs):
            with events.waiting(*(job.label for job in jobs)):  # nobody sums beside the backward: in steps, all at once
                while jobs:
                    jobs = [job for job in jobs if job.advance()]
        while self._in_flight:
            self._land()
        self.memory.release_spare()

    def finish(self) -> None:
        """Wait for the step's reductions; turn sums into main gradients and scale what was left unscaled."""
        self.drain()
        alike: dict[tuple[type, Dtypes, float], tuple[Reduction, list[Tensor], list[Tensor]]] = {}
        for unit in self.order:
            for bucket, gradients in zip(unit.trainable, unit.gradients, strict=True):
                factor = 1.0 if bucket.scales_as_it_sums else self.factor
                kind = type(bucket.inner.numbers), bucket.inner.dtypes, factor
                _, sums, main = alike.setdefault(kind, (bucket.inner, [], []))
                sums += gradients.own_shards
                main += gradients.main_shards
        for (*_, factor), (reduction, sums, main) in alike.items():  # what is alike in one launch
            reduction.numbers.finish(sums, main, factor)
        if any(gradients.is_offloaded for unit in self.order for gradients in unit.gradients):
            self.runtime.synchronize()  # once for all that is copied to the host, which goes on with it

    def discard(self) -> None:
        """Wait until nothing is in flight any more, for gradients that nobody wants: what failed does not matter."""
        while self._in_flight:
            with suppress(Exception):
                self._land()
        self.memory.release_spare()

    def _issue(self, unit: Unit) -> None:
        self._issued += 1
        if not all(gradients.is_prepared for gradients in unit.gradients):  # not used: it contributes zeros
            self.prepare(unit)
        if any(gradients.is_copied for gradients in unit.gradients):
            self._make_room(unit)
        self._in_flight.append((unit, [PendingReduction(bucket, self) for bucket in unit.trainable]))

    def _land(self) -> None:
        """Wait for the oldest unit in flight and free its buckets, also where a reduction failed; raises its error."""
        _, jobs = self._in_flight.popleft()
        failures = []
        with events.waiting(*(job.label for job in jobs)):
            for job in jobs:
                try:
                    job.wait()
                except Exception as error:
                    failures.append(error)
                job.free()
        if failures:
            raise events.explained(failures[0])
