"""One bucket on its way from unreduced gradients to this rank's sums.

Under `no_shard` and `optim`, microbatches add up in the whole sums and only the step's last backward reduces. Under
`optim_grads` and `optim_grads_params`, every backward reduces a temporary bucket over the inner axis and the shard
adds up. Over the outer axis there is one reduction a step, by the last backward. A reduced gradient is *copied* over a
buffer that held the unreduced one, and *added* only to a shard that holds sums. See [Note: Two axes] for what goes
where.

[Note: Steps of a job] A job is a list of steps, each of which waits for what it needs, sums, and issues what comes
next, so that a pipeline can run the same step of many jobs before it waits for the next one of any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from harness.fsdp.comm.communicator import Pending
from harness.fsdp.comm.device import DeviceRuntime, Event
from harness.fsdp.comm.events import OUTER, Label
from harness.fsdp.comm.parts import Part
from harness.fsdp.comm.reduction import Exchange, Reduction
from harness.fsdp.guards.nonfinite import GradientGuard
from harness.fsdp.runtime.step import BackwardPlan
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.gradients import Gradients


@dataclass(frozen=True)
class Reductions:
    """How one bucket's sums are made along each axis."""

    inner: Reduction
    outer: Reduction | None = None

    def scales_as_it_sums(self, gradients: Gradients) -> bool:
        """Whether the last sum of a step is known to be the last, and multiplies by the factor while it is in cache."""
        return self.inner.numbers.scales_sums and (gradients.is_whole or self.outer is not None)


class Job:
    """The reduction of one bucket in one backward.

    Args:
        factor: what a step's sums are multiplied with, once.
        plan: of the backward the gradients are from.
    """

    def __init__(
        self,
        bucket: Bucket,
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
        self.source: Tensor = self.gradients.take()
        self.done: Event | None = None
        self.future: Future[None] | None = None
        self._absorbs = self.gradients.is_whole and not self.gradients.is_direct
        self._steps: deque[Callable[[], None]] = deque()
        self._stream = "reduce"
        self._copies: list[Tensor] = []
        """Encoded gradients beside those they were made of."""
        self._sent: list[Exchange] = []
        self._staying: list[Exchange] = []
        """Exchanges whose parts lie in whole sums, which stay as they are until they are forgotten."""

    @property
    def splits(self) -> bool:
        """Whether inner ranks keep their shares (reduce-scatter) or share them again (all-reduce)."""
        return self.cuts.splits_inner

    @property
    def label(self) -> Label:
        """Of its collective along the inner axis."""
        return Label("reduce_scatter" if self.splits else "all_reduce", self.bucket.name)

    # -- steps ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Encode the gradients and send every contribution to its owner."""
        source, sums = self.source, self.gradients.sums
        if self._absorbs:
            self._look(source, None)
            self.gradients.claim()
            self.reductions.inner.numbers.absorb(source, sums, add=self.plan.adds)
            source = sums
        if not self.plan.last and self.gradients.is_whole:
            return
        wire = self._noted(self.reductions.inner.encode(source), source)
        if not self._absorbs:
            self._look(source, wire)
        factor = self.factor if self.reductions.outer is None else 1.0
        exchange = self.reductions.inner.exchange(self.cuts.inner(wire), self.label, factor)
        (self._staying if wire is sums else self._sent).append(exchange)
        self._steps.append(lambda: self._fold_inner(exchange))

    def _noted(self, wire: Tensor, source: Tensor) -> Tensor:
        """What is sent; counted as long as it lives where it is a copy."""
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

    def _fold_inner(self, exchange: Exchange) -> None:
        add = self.plan.adds and not self.gradients.is_whole
        self.gradients.claim()
        targets = self.gradients.inner_pieces
        if not self.splits:
            rank = self.reductions.inner.comm.rank
            targets = [part.chunk(rank) for part in self.cuts.inner(self.gradients.sums)]
        self.reductions.inner.fold(exchange, targets, add=add)
        if self.reductions.outer is not None and self.plan.last:
            self._exchange_outer(self.reductions.outer, targets, exchange)
        elif not self.splits:
            self._spread_inner(exchange)

    def _exchange_outer(self, outer: Reduction, pieces: list[Tensor], inner: Exchange) -> None:
        """Encode what the inner axis has summed, and send it over the outer one."""
        if self.splits or self.cuts.splits_outer:
            pieces = self.gradients.inner_pieces
        sums = self.cuts.outer(pieces)
        self._stream = "outer"
        with self.runtime.stream(self._stream):
            parts = [_encoded(part, outer) for part in sums]
            self._copies += [
                self.bucket.memory.note(part.tensor) for part, own in zip(parts, sums, strict=True) if part is not own
            ]
            kind = "reduce_scatter" if self.cuts.splits_outer else "all_reduce"
            exchange = outer.exchange(parts, Label(kind, self.bucket.name + OUTER), self.factor)
        in_place = all(part is own for part, own in zip(parts, sums, strict=True))
        (self._staying if in_place and self.gradients.is_whole else self._sent).append(exchange)
        self._steps.append(lambda: self._fold_outer(outer, exchange, sums, inner))

    def _fold_outer(self, outer: Reduction, exchange: Exchange, sums: list[Part], inner: Exchange) -> None:
        outer.fold(exchange, [part.chunk(outer.comm.rank) for part in sums], add=False)
        if not self.cuts.splits_outer:
            spreading = outer.spread(exchange, sums)
            self._steps.append(lambda: self._spread_outer(spreading, inner))
        elif not self.splits:
            self._spread_inner(inner)

    def _spread_outer(self, spreading: Pending, inner: Exchange) -> None:
        spreading.wait()
        if not self.splits:
            self._spread_inner(inner)

    def _spread_inner(self, exchange: Exchange) -> None:
        spreading = self.reductions.inner.spread(exchange, self.cuts.inner_back(self.gradients.sums))
        self._steps.append(spreading.wait)

    # -- running them --------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Run the next step, if there is one; whether more are left."""
        if self._steps:
            with self.runtime.stream(self._stream):
                self._steps.popleft()()
        return bool(self._steps)

    def run(self) -> None:
        """Run all steps."""
        while self.advance():
            pass
        if self.runtime.has_streams:
            with self.runtime.stream(self._stream):
                self.done = self.runtime.record()

    def wait(self) -> None:
        """Block the host or the current stream until the sums are made; raises what making them raised."""
        if self.done is not None:
            self.done.wait()
        elif self.future is not None:
            self.future.result()
        else:
            self.run()
        for exchange in self._sent:
            exchange.pending.wait()

    @property
    def sending(self) -> list[Pending]:
        """What other ranks may still take from whole sums after `wait`."""
        return [exchange.pending for exchange in self._staying]

    def free(self) -> None:
        """Free the temporary bucket, where there was one, and what was made of it."""
        for copy in self._copies:
            self.bucket.memory.free(copy)
        if not self.gradients.is_direct:
            self.bucket.memory.give_back(self.source)


def _encoded(part: Part, reduction: Reduction) -> Part:
    """A part as it is sent: itself where it already is; else a copy without what lies between its chunks."""
    covered = part.covered
    if covered is None:
        if part.tensor.dtype == reduction.dtypes.wire:
            return part
        covered = torch.cat([part.chunk(rank) for rank in range(len(part.spans))])
    wire = reduction.encode(covered)
    return part if wire.data_ptr() == part.chunk(0).data_ptr() else Part.at(wire, [0, *accumulate(part.sizes)])
