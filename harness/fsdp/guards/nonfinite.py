"""Watching for numbers that no training should go on from.

[Note: A report that all ranks share] A rank that raised in the middle of a backward would leave the others waiting in
their collectives. So a rank that finds a gradient that is not finite only remembers it; the reductions go on. When the
step's gradients are finished, one small all-reduce tells every rank what every rank has found, and all raise the same
error within the step, before the optimizer or anything else sees the gradients.

[Note: Looking once] A bucket is looked at once a backward, right before it is sent (in the wire's dtype, so that what a
16-bit wire cannot hold is found too) or, where microbatches accumulate locally, at the end of the backward. One sum
tells: NaN and infinity survive any sum. Only then is the place looked for. A sum that overflowed by itself finds none.

[Note: Looking later] Where work is queued, a look would stop the host in the middle of a backward, and the gradients
are gone when the step ends. There the largest element of every parameter is taken, in one launch a bucket, and kept on
the device; the ranks add up whether any of theirs is not finite, and the host reads that one number, at the end of the
step. Only if it is not zero does it read the rest, which tells all but how many elements there are, and where.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.fsdp.comm.crossed import Everyone
from harness.fsdp.comm.device import is_queued
from harness.fsdp.storage.bucket import Bucket

MAX_TOLD = 8
"""Findings spelled out in an error; one a rank at most exists."""


class Finding(NamedTuple):
    """The first gradient of a step that was not finite on one rank.

    microbatch counts from 1. param: place in the list of trained parameters. num_nan, num_inf: elements. first: index
    of the first of them in the flattened parameter, -1 where nobody has counted (one stands for any number then).
    num_others: further parameters of the same bucket with such elements. by_wire: 1 if the gradient was finite before
    it was cast for sending.
    """

    microbatch: int
    param: int
    num_nan: int
    num_inf: int
    first: int
    num_others: int
    by_wire: int


class Seen(NamedTuple):
    """A bucket that was looked at and not judged. places: of its parameters. largest, before: |x| of each, [], as sent
    and before the cast."""

    microbatch: int
    places: list[int]
    largest: list[Tensor]
    before: list[Tensor]


class GradientGuard:
    """Finds the first gradient of a step that is not finite, on every rank, and lets all ranks say so.

    Args:
        buckets: with gradients, in the same order on all ranks.
        comm: the ranks that report to each other.
    """

    def __init__(self, buckets: Sequence[Bucket], comm: Everyone) -> None:
        self.comm = comm
        self._microbatch = 0
        self._finding: Finding | None = None
        self._seen: list[Seen] = []
        self.watch(buckets)

    def watch(self, buckets: Sequence[Bucket]) -> None:
        """Look at these buckets from now on, in the same order on all ranks."""
        self._params = [(slot.spec.name, slot.spec.shape) for bucket in buckets for slot in bucket.layout.slots]
        self._places = {name: place for place, (name, _) in enumerate(self._params)}

    def begin_backward(self) -> None:
        """A microbatch's backward begins."""
        self._microbatch += 1

    def forget(self) -> None:
        """A new step begins."""
        self._microbatch, self._finding, self._seen = 0, None, []

    @torch.no_grad()
    def look(self, bucket: Bucket, gradients: Tensor, source: Tensor | None = None) -> None:
        """Look at a whole bucket of unreduced gradients, once.

        Args:
            gradients: flat, as they are sent or kept. source: the same before a cast, where there was one.
        """
        if is_queued(gradients.device):
            self._seen.append(self._note(bucket, gradients, source))
        elif self._finding is None and not bool(gradients.sum().isfinite()):
            self._finding = self._locate(bucket, gradients, source)

    def _note(self, bucket: Bucket, gradients: Tensor, source: Tensor | None) -> Seen:
        """What is to be judged later; see [Note: Looking later]."""
        held = [(name, view) for name, view in bucket.named_slices(gradients) if view.numel()]
        uncast = [view for _, view in bucket.named_slices(source) if view.numel()] if source is not None else []
        return Seen(
            self._microbatch,
            [self._places[name] for name, _ in held],
            list(torch._foreach_norm([view for _, view in held], math.inf)),
            list(torch._foreach_norm(uncast, math.inf)) if uncast else [],
        )

    def _none_anywhere(self) -> bool:
        """Whether all that was seen on all ranks is finite. *Collective.*"""
        found = torch.zeros(1, dtype=torch.int64, device=self.comm.runtime.device)
        for largest in self._by_dtype([value for seen in self._seen for value in seen.largest]):
            found += torch.stack(largest).isfinite().logical_not_().sum()
        return not int(self.comm.sum_scalars(found, "non-finite gradients"))

    @staticmethod
    def _by_dtype(values: Sequence[Tensor]) -> list[list[Tensor]]:
        dtypes = dict.fromkeys(value.dtype for value in values)
        return [[value for value in values if value.dtype == dtype] for dtype in dtypes]

    def _judge(self) -> Finding | None:
        """The first that was seen and is not finite; of one bucket the parameter that was used last in the forward."""
        for seen in self._seen:
            values = [float(value) for value in seen.largest]
            bad = [place for place, value in enumerate(values) if not math.isfinite(value)]
            if bad:
                is_nan = math.isnan(values[bad[-1]])
                by_wire = bool(seen.before) and math.isfinite(float(seen.before[bad[-1]]))
                place = seen.places[bad[-1]]
                return Finding(seen.microbatch, place, int(is_nan), int(not is_nan), -1, len(bad) - 1, int(by_wire))
        return None

    def _locate(self, bucket: Bucket, gradients: Tensor, source: Tensor | None) -> Finding | None:
        """The bad parameter that was used last in the forward: the backward reached it first."""
        views = bucket.named_slices(gradients)
        bad = [place for place, (_, view) in enumerate(views) if not bool(view.isfinite().all())]
        if not bad:
            return None
        name, view = views[bad[-1]]
        by_wire = source is not None and bool(bucket.named_slices(source)[bad[-1]][1].isfinite().all())
        return Finding(
            microbatch=self._microbatch,
            param=self._places[name],
            num_nan=int(view.isnan().sum()),
            num_inf=int(view.isinf().sum()),
            first=int((~view.isfinite()).reshape(-1).nonzero()[0]),
            num_others=len(bad) - 1,
            by_wire=int(by_wire),
        )

    def report(self) -> None:
        """Raise the same FloatingPointError on all ranks if any of them found something. *Collective.*"""
        if is_queued(self.comm.runtime.device):
            if self._none_anywhere():
                return
            self._finding = self._judge()
        width = len(Finding._fields)
        table = torch.zeros(self.comm.size, width, dtype=torch.int64, device=self.comm.runtime.device)
        if self._finding is not None:
            table[self.comm.rank] = torch.tensor(self._finding, dtype=torch.int64)
        rows: list[list[int]] = self.comm.sum_scalars(table, "non-finite gradients").tolist()
        found = sorted((row[0], rank, Finding(*row)) for rank, row in enumerate(rows) if row[0])
        if not found:
            return
        told = "; ".join(self._describe(finding, rank) for _, rank, finding in found[:MAX_TOLD])
        more = (
            f"; and on {len(found) - MAX_TOLD} more rank{'s' * (len(found) > MAX_TOLD + 1)}"
            if len(found) > MAX_TOLD
            else ""
        )
        raise FloatingPointError(
            f"gradients are not finite before their reduction: {told}{more}. No weight was changed; zero_grad() forgets"
            " the step"
        )

    def _describe(self, finding: Finding, rank: int) -> str:
        name, shape = self._params[finding.param]
        numel = torch.Size(shape).numel()
        others = (
            f" ({finding.num_others} other tensor{'s' * (finding.num_others > 1)} of its unit too)"
            if finding.num_others
            else ""
        )
        wire = ", finite until it was cast for sending" if finding.by_wire else ""
        where = f"{name} on rank {rank} in microbatch {finding.microbatch}"
        if finding.first < 0:
            return f"{where}: {'NaN' if finding.num_nan else 'Inf'} among {numel} elements{wire}{others}"
        kinds = [f"{count} {kind}" for kind, count in (("NaN", finding.num_nan), ("Inf", finding.num_inf)) if count]
        index: list[int] = []
        rest = finding.first
        for size in reversed(shape):
            rest, place = divmod(rest, size)
            index.insert(0, place)
        return f"{where}: {' and '.join(kinds)} of {numel} elements, the first at {index}{wire}{others}"
