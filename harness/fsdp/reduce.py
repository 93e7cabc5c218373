"""The reduce pipeline: gradients leave in one static order, at most two units of them at a time.

Under `no_shard` and `optim`, microbatches add up in the whole main-gradient buffer and only the step's last backward
reduces. Under `optim_grads` and `optim_grads_params`, every backward reduces a temporary bucket and the shard adds up.
A reduced gradient is *copied* over a buffer that held the unreduced one, and *added* only to a shard that holds sums.

[Note: Issue order] Units are reduced in reverse forward order on every rank. A unit that is ready early waits for its
turn; a unit that this rank did not use contributes zeros, as soon as that is known.

[Note: Who waits for whom] A reduction lands when all ranks have come to it and have taken what they get, at the latest
when they make room two units on; for that they need the weights of every unit so far, of which this rank holds a part.
A rank that did not use these units is done with them early; before it waits, it takes its turn in the gathers up to
the unit it makes room for. No rank then waits for one that waits for it.

[Note: Folding beside compute] On gloo the host must sum what arrives. One thread does that, in issue order, while the
backward goes on; its result is waited for like any collective. Where no core is to spare for that thread, the sum is
made when it is waited for (see [Note: Spare cores]). On CUDA the same work is queued on a side stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from torch import Tensor

from harness.fsdp import labels
from harness.fsdp.buffer import Bucket
from harness.fsdp.collectives import Exchange, Reduction
from harness.fsdp.communicator import Communicator, Pending
from harness.fsdp.device import DeviceRuntime, Event
from harness.fsdp.guards import GradientGuard
from harness.fsdp.labels import Label
from harness.fsdp.memory import BucketMemory
from harness.fsdp.parts import Part
from harness.fsdp.units import Unit

MAX_UNITS = 2
"""Units whose unreduced gradients may exist at once, the one being written included: a rank may be so far ahead.

A unit's storage is found when its first gradient arrives, not when its backward begins.
"""


class ReducePipeline:
    """Reductions of all units with trained parameters.

    Args:
        units: in forward order; they are reduced in reverse.
        reductions: how the sums of a bucket are made, by bucket name.
        factor: what a step's sums are multiplied with, once. Where a step has one reduction it is applied while the
            sums are in cache; where it has one a microbatch, by `finish`.
        guard: looks at gradients before they are reduced; None looks at nothing.
        before_wait: called with a unit before others are waited for to make room for it;
            see [Note: Who waits for whom].
    """

    def __init__(
        self,
        units: Sequence[Unit],
        reductions: dict[str, Reduction],
        comm: Communicator,
        runtime: DeviceRuntime,
        memory: BucketMemory,
        *,
        factor: float,
        guard: GradientGuard | None = None,
        before_wait: Callable[[Unit], None] = lambda unit: None,
    ) -> None:
        self.guard = guard
        self.before_wait = before_wait
        self.order = [unit for unit in reversed(units) if unit.trainable]
        self.reductions = reductions
        self.comm = comm
        self.runtime = runtime
        self.memory = memory
        self.factor = factor
        beside = runtime.has_streams or comm.threads_help
        self.sums_when_wanted = not beside
        self._ready: set[str] = set()
        self._issued = 0
        self._in_flight: deque[tuple[Unit, list[Job]]] = deque()
        self._sending: list[Pending] = []
        self._folder = (
            ThreadPoolExecutor(1, thread_name_prefix="fsdp-fold") if beside and not runtime.has_streams else None
        )

    def expect(self, unit: Unit) -> None:
        """A unit's backward begins: its gradients will come, in the dtype they are sent in."""
        for bucket in unit.trainable:
            bucket.expect_gradients()

    def prepare(self, unit: Unit) -> None:
        """Give a unit's parameters flat gradient storage, waiting while too many units have theirs."""
        for bucket in unit.trainable:
            if bucket.grad_bucket is None:
                self._make_room(unit)
            bucket.prepare_gradients()

    def _make_room(self, unit: Unit) -> None:
        if len(self._in_flight) >= MAX_UNITS and not unit.is_root:
            self.before_wait(unit)
        while len(self._in_flight) >= MAX_UNITS:
            self._land()

    def mark_ready(self, unit: Unit) -> None:
        """All gradients of a unit are in; reduce it and whatever waited behind it as soon as its turn comes."""
        self._ready.add(unit.name)
        while self._issued < len(self.order) and self.order[self._issued].name in self._ready:
            self._issue(self.order[self._issued])

    def is_done_with(self, unit: Unit) -> bool:
        """Whether this backward's gradients of a unit have been handed over."""
        return unit.name in self._ready

    def end_backward(self, *, reduce: bool) -> None:
        """Reduce what is left, zeros for units that were not used; `reduce=False` keeps accumulating instead."""
        for unit in self.order[self._issued :]:
            if reduce:
                self._issue(unit)
            elif self.guard is not None:
                self._look(unit, self.guard)
        self._ready.clear()
        self._issued = 0

    def drain(self) -> None:
        """Wait until every issued reduction has landed in the main gradients."""
        if self.sums_when_wanted and all(bucket.accumulates_whole for bucket in self._buckets_in_flight()):
            self._sum_all()
        while self._in_flight:
            self._land()
        self._release()

    def _buckets_in_flight(self) -> Iterator[Bucket]:
        return (job.bucket for _, jobs in self._in_flight for job in jobs)

    def finish(self) -> None:
        """Wait for the step's reductions and scale what they left unscaled."""
        self.drain()
        for unit in self.order:
            for bucket in unit.trainable:
                if not bucket.accumulates_whole:
                    self.reductions[bucket.name].finish(bucket.grad_pieces, self.factor)

    def discard(self) -> None:
        """Wait until nothing is in flight any more, for gradients that nobody wants.

        What failed in a reduction does not matter then. Sums that landed do: raises where others could not take theirs.
        """
        unfinished = bool(self._in_flight)
        while self._in_flight:
            with suppress(Exception):
                self._land()
        try:
            self._wait_until_sent()
        except RuntimeError:
            if not unfinished:
                raise
        self._release()

    def _wait_until_sent(self) -> None:
        """Wait until other ranks have taken what whole gradient buffers held for them, so that these may be reused."""
        sending, self._sending = self._sending, []
        with labels.waiting():
            for each in sending:
                each.wait()

    def _release(self) -> None:
        """Free what is only kept between one reduction and the next."""
        self.comm.release_scratch()
        self.memory.release_spare()

    def close(self) -> None:
        """End the folding thread."""
        if self._folder is not None:
            self._folder.shutdown(wait=True)

    def _issue(self, unit: Unit) -> None:
        self._issued += 1
        if any(bucket.grad_bucket is None for bucket in unit.trainable):  # not used: it contributes zeros
            self.prepare(unit)
        if not unit.buckets[0].accumulates_whole:
            self._make_room(unit)
        self._in_flight.append((unit, [self._start(bucket) for bucket in unit.trainable]))

    def _look(self, unit: Unit, guard: GradientGuard) -> None:
        for bucket in unit.trainable:
            if bucket.grad_bucket is not None:
                bucket.settle_gradients()
                guard.look(bucket, bucket.grad_bucket)

    def _start(self, bucket: Bucket) -> Job:
        factor = self.factor if bucket.accumulates_whole else 1.0
        job = Job(bucket, self.reductions[bucket.name], self.comm.size, factor, self.guard)
        with self.runtime.stream("reduce"):
            job.exchange()
            if self.runtime.has_streams:
                job.reduce()
                job.done = self.runtime.record()
            elif self._folder is not None:
                job.future = self._folder.submit(job.reduce)
        return job

    def _sum_all(self) -> None:
        """Sum every bucket that nobody sums beside the backward, before waiting for what others make of the sums."""
        with labels.waiting(*(job.label for _, jobs in self._in_flight for job in jobs)):
            for _, jobs in self._in_flight:
                for job in jobs:
                    job.sum_now()

    def _land(self) -> None:
        """Wait for the oldest unit in flight and free its buckets, also where a reduction failed; raises its error."""
        _, jobs = self._in_flight.popleft()
        failures = []
        with labels.waiting(*(job.label for job in jobs)):
            for job in jobs:
                try:
                    job.wait()
                except Exception as error:
                    failures.append(error)
                job.free()
        self._sending += [job.sending for job in jobs if job.sending is not None]
        if failures:
            raise labels.explained(failures[0])


class Job:
    """One bucket on its way from unreduced gradients to this rank's main gradients."""

    def __init__(
        self, bucket: Bucket, reduction: Reduction, num_ranks: int, factor: float, guard: GradientGuard | None
    ) -> None:
        self.guard = guard
        self.bucket = bucket
        self.reduction = reduction
        self.num_ranks = num_ranks
        self.factor = factor
        self.source: Tensor = bucket.take_gradients()
        self.done: Event | None = None
        self.future: Future[None] | None = None
        self._exchange: Exchange | None = None
        self._spread = Pending([])
        self._summed = False
        self._stays = False
        """Whether what others take lies in whole main gradients, which stay as they are until they are forgotten."""

    @property
    def _splits(self) -> bool:
        """Whether the owners keep their shares (reduce-scatter) or share them again (all-reduce)."""
        return self.bucket.context.strategy.shards_optimizer

    @property
    def label(self) -> Label:
        """Its collective."""
        return Label("reduce_scatter" if self._splits else "all_reduce", self.bucket.name)

    def exchange(self) -> None:
        """Encode the gradients and send every contribution to its owner."""
        wire = self.reduction.encode(self.source)
        self._stays = self.bucket.accumulates_whole and wire is self.source
        if self.guard is not None:
            self.guard.look(self.bucket, wire, None if wire is self.source else self.source)
        parts = self.bucket.segment_parts(wire) if self._splits else [Part.evenly(wire, self.num_ranks)]
        self._exchange = self.reduction.exchange(parts, self.label, self.factor)

    def reduce(self) -> None:
        """Sum what this rank owns, and wait for what others sum."""
        self.sum_now()
        self._spread.wait()

    def sum_now(self) -> None:
        """Sum what this rank owns into the main gradients, once; an all-reduce then begins to spread the sums."""
        exchange = self._exchange
        if self._summed:
            return
        if exchange is None:
            raise RuntimeError(f"bucket {self.bucket.name} was summed before it was exchanged")
        self._summed = True
        add = self.bucket.claim_main_grads()
        if self._splits:
            self.reduction.fold(exchange, self.bucket.grad_pieces, add=add)
        else:
            whole = Part.evenly(self.source, self.num_ranks)
            self.reduction.fold(exchange, [whole.chunk(self.reduction.comm.rank)], add=False)
            self._spread = self.reduction.spread(exchange, whole)

    def wait(self) -> None:
        """Block the host or the current stream until the main gradients hold the sum; raises what the sum raised."""
        if self.done is not None:
            self.done.wait()
        elif self.future is not None:
            self.future.result()
        else:
            self.reduce()
        if self._exchange is not None and not self._stays:
            self._exchange.pending.wait()

    @property
    def sending(self) -> Pending | None:
        """What other ranks may still take from the unreduced gradients after `wait`."""
        return self._exchange.pending if self._exchange is not None and self._stays else None

    def free(self) -> None:
        """Free the temporary bucket, where there was one."""
        if not self.bucket.accumulates_whole:
            self.bucket.context.memory.give_back(self.source)
