"""One bucket on its way from unreduced gradients to this rank's sums.

Which operations that takes, on which axis and in which order, is the route of the bucket's `Placements` from unreduced
to accumulated and, in the backward that ends a step, on to main gradients ([Note: Placement], [Note: Outer once]). A
reduced gradient is *copied* over a buffer that held the unreduced one, and *added* only to a shard that holds sums.

[Note: Stages of a reduction] Each operation of the route has two halves: one issues its traffic, one waits for it and
makes the sums. A stage is the second half of one operation and the first half of the next, so that a pipeline can run
the same stage of many buckets before it waits for the next one of any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from harness.fsdp.comm.communicator import Pending
from harness.fsdp.comm.device import DeviceRuntime, Event
from harness.fsdp.comm.events import OUTER, Label
from harness.fsdp.comm.parts import Part
from harness.fsdp.comm.reduction import Exchange, Reduction
from harness.fsdp.guards.nonfinite import GradientGuard
from harness.fsdp.runtime.step import BackwardPlan
from harness.fsdp.storage.gradients import Accumulation, Gradients
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.placement import OPERATIONS, PARTIAL, SHARD, Axis, Operation


@dataclass(frozen=True)
class Reductions:
    inner: Reduction
    outer: Reduction | None = None

    def scales_as_it_sums(self, gradients: Gradients) -> bool:
        """True if the last sum of a step is known to be the last, and multiplies by the factor while it is in cache."""
        return self.inner.numbers.scales_sums and gradients.placements.reduces_once


class Job:
    """The reduction of one bucket in one backward.

    Args:
        factor: what a step's sums are multiplied with, once.
        plan: of the backward the gradients are from.
    """

    def __init__(
        self,
        bucket: ParamGroup,
        reductions: Reductions,
        runtime: DeviceRuntime,
        factor: float,
        guard: GradientGuard | None,
        plan: BackwardPlan,
    ) -> None:
        if bucket.gradients is None:
            raise RuntimeError(f"bucket {bucket.name} is not trained")
        self.bucket = bucket
        self.gradients: Gradients = bucket.gradients
        self.cuts = bucket.cuts
        self.reductions = reductions
        self.runtime = runtime
        self.guard = guard
        self.plan = plan
        self.factor = factor if reductions.scales_as_it_sums(self.gradients) else 1.0
        self.label = self._label(Axis.inner)
        """Label of the job's collective along the inner axis."""
        self.source: Tensor = self.gradients.take()
        self.done: Event | None = None
        self._route = deque(bucket.placements.reduction(last=plan.last))
        sums = [step.axis for step in bucket.placements.reduction(last=True) if step.operation is _SUM]
        self._last_sum = sums[-1]
        self._stages: deque[Callable[[], None]] = deque()
        self._stream = "reduce"
        self._exchanges: dict[Axis, Exchange] = {}
        self._sums: list[Tensor] = []
        self._outer_sums: list[Part] = []
        self._copies: list[Tensor] = []
        """Encoded gradients beside those they were made of."""

    @property
    def accumulates_locally(self) -> bool:
        """True if its sums over microbatches are made on this rank, so that it is the step's one reduction."""
        return self.bucket.placements.accumulates_locally

    def _label(self, axis: Axis) -> Label:
        """Label of a collective along one axis: the operation from terms of a sum to main gradients, whole or legs."""
        lies = self.bucket.placements.main_grads
        target = lies.inner if axis is Axis.inner else lies.outer
        suffix = "" if axis is Axis.inner else OUTER
        return Label(OPERATIONS[PARTIAL, target].value, self.bucket.name + suffix)

    def _factor_of(self, axis: Axis) -> float:
        return self.factor if axis is self._last_sum else 1.0

    # -- stages --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Encode the gradients and send every contribution to its owner; or only add them to the sums on this rank."""
        source, sums = self.source, self.gradients.sums
        adds = self.gradients.accumulation is Accumulation.added
        if adds:
            self._look(source, None)
            self.gradients.claim()
            self.reductions.inner.numbers.absorb(source, sums, add=self.plan.adds)
            source = sums
        if not self._route:
            return
        wire = self._noted(self.reductions.inner.encode(source), source)
        if not adds:
            self._look(source, wire)
        exchange = self.reductions.inner.exchange(self.cuts.inner_parts(wire), self.label, self._factor_of(Axis.inner))
        self._exchanges[Axis.inner] = exchange
        self._route.popleft()
        self._stages.append(self._sum_inner)

    def _noted(self, wire: Tensor, source: Tensor) -> Tensor:
        if wire is not source:
            self._copies.append(self.bucket.memory.note(wire))
        return wire

    def _look(self, source: Tensor, wire: Tensor | None) -> None:
        if self.guard is None:
            return
        if wire is None or wire is source or not wire.is_floating_point():
            self.guard.look(self.bucket, source)
        else:
            self.guard.look(self.bucket, wire, source)

    def _issue_next(self) -> None:
        if self._route:
            step = self._route.popleft()
            _ISSUE[step.axis, step.operation](self)

    def _sum_inner(self) -> None:
        gradients, reduction = self.gradients, self.reductions.inner
        add = self.plan.adds and gradients.accumulation is Accumulation.reduced
        gradients.claim()
        self._sums = gradients.inner_shards
        if self.bucket.placements.main_grads.inner is not SHARD:  # the first leg of an all-reduce
            self._sums = [part.chunk(reduction.comm.rank) for part in self.cuts.inner_parts(gradients.sums)]
        reduction.fold(self._exchanges[Axis.inner], self._sums, add=add)
        self._issue_next()

    def _reduce_outer(self) -> None:
        outer = self._outer
        in_order = SHARD in self.bucket.placements.main_grads
        sums = self.cuts.outer_parts(self.gradients.inner_shards if in_order else self._sums)
        self._stream = "outer"
        with self.runtime.stream(self._stream):
            parts = [_encoded(part, outer) for part in sums]
            self._copies += [
                self.bucket.memory.note(part.tensor) for part, own in zip(parts, sums, strict=True) if part is not own
            ]
            exchange = outer.exchange(parts, self._label(Axis.outer), self._factor_of(Axis.outer))
        self._exchanges[Axis.outer] = exchange
        self._stages.append(lambda: self._sum_outer(sums))

    def _sum_outer(self, sums: list[Part]) -> None:
        outer, exchange = self._outer, self._exchanges[Axis.outer]
        outer.fold(exchange, [part.chunk(outer.comm.rank) for part in sums], add=False)
        self._outer_sums = sums
        self._issue_next()

    def _gather_outer(self) -> None:
        self._await(self._outer.spread(self._exchanges[Axis.outer], self._outer_sums))

    def _gather_inner(self) -> None:
        back = self.cuts.second_leg_parts(self.gradients.sums)
        self._await(self.reductions.inner.spread(self._exchanges[Axis.inner], back))

    def _await(self, spreading: Pending) -> None:
        def land() -> None:
            spreading.wait()
            self._issue_next()

        self._stages.append(land)

    @property
    def _outer(self) -> Reduction:
        assert self.reductions.outer is not None
        return self.reductions.outer

    # -- running them --------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Run the next stage, if there is one; whether more are left."""
        if self._stages:
            with self.runtime.resuming(self._stream):
                self._stages.popleft()()
        return bool(self._stages)

    def run(self) -> None:
        while self.advance():
            pass
        if self.runtime.has_streams:
            with self.runtime.resuming(self._stream):
                self.done = self.runtime.record()

    def wait(self) -> None:
        """Block the host or the current stream until the sums are made; raises what making them raised."""
        if self.done is not None:
            self.done.wait()
        else:
            self.run()

    def cancel(self) -> None:
        """Let nobody wait for this rank in what is under way, of gradients that nobody wants."""
        for exchange in self._exchanges.values():
            exchange.pending.cancel()

    def free(self) -> None:
        """Free the temporary bucket, where there was one, and what was made of it."""
        for copy in self._copies:
            self.bucket.memory.free(copy)
        if not self.gradients.is_in_place:
            self.bucket.memory.give_back(self.source)


_SUM = Operation.reduce_scatter
_ISSUE: dict[tuple[Axis, Operation], Callable[[Job], None]] = {
    (Axis.outer, Operation.reduce_scatter): Job._reduce_outer,
    (Axis.outer, Operation.all_gather): Job._gather_outer,
    (Axis.inner, Operation.all_gather): Job._gather_inner,
}


def _encoded(part: Part, reduction: Reduction) -> Part:
    """A part as it is sent: itself where it already is; else a copy without what lies between its chunks."""
    if part.covered is None and part.tensor.dtype == reduction.dtypes.wire:
        return part
    wire = reduction.encode(part.closed_up)
    return part if wire.data_ptr() == part.chunk(0).data_ptr() else Part(wire, part.cut.closed_up)
