"""Watching for numbers that no training should go on from.

[Note: A report that all ranks share] A rank that raised in the middle of a backward would leave the others waiting in
their collectives. So a rank that finds a gradient that is not finite only remembers it; the reductions go on. When the
step's gradients are finished, one small all-reduce tells every rank what every rank has found, and all raise the same
error within the step, before the optimizer or anything else sees the gradients.

[Note: Looking once] A bucket is looked at once a backward, right before it is sent (in the wire's dtype, so that what a
16-bit wire cannot hold is found too) or, where microbatches accumulate locally, at the end of the backward. One sum
tells: NaN and infinity survive any sum. Only then is the place looked for. A sum that overflowed by itself finds none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.fsdp.comm.crossed import Everyone
from harness.fsdp.storage.bucket import Bucket

MAX_TOLD = 8
"""Findings spelled out in an error; one a rank at most exists."""


class Finding(NamedTuple):
    """The first gradient of a step that was not finite on one rank.

    microbatch counts from 1. param: place in the list of trained parameters. num_nan, num_inf: elements. first: index
    of the first of them in the flattened parameter. num_others: further parameters of the same bucket with such
    elements. by_wire: 1 if the gradient was finite before it was cast for sending.
    """

    microbatch: int
    param: int
    num_nan: int
    num_inf: int
    first: int
    num_others: int
    by_wire: int


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
        self._microbatch, self._finding = 0, None

    @torch.no_grad()
    def look(self, bucket: Bucket, gradients: Tensor, source: Tensor | None = None) -> None:
        """Look at a whole bucket of unreduced gradients, once.

        Args:
            gradients: flat, as they are sent or kept. source: the same before a cast, where there was one.
        """
        if self._finding is None and not bool(gradients.sum().isfinite()):
            self._finding = self._locate(bucket, gradients, source)

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
        width = len(Finding._fields)
        table = torch.zeros(self.comm.size, width, dtype=torch.int64, device=self.comm.runtime.device)
        if self._finding is not None:
            table[self.comm.rank] = torch.tensor(self._finding, dtype=torch.int64)
        rows: list[list[int]] = self.comm.sum_scalars(table, "non-finite gradients").tolist()
        found = sorted((row[0], rank, Finding(*row)) for rank, row in enumerate(rows) if row[0])
        if not found:
            return
        told = "; ".join(self._describe(finding, rank) for _, rank, finding in found[:MAX_TOLD])
        more = f"; and on {len(found) - MAX_TOLD} more ranks" if len(found) > MAX_TOLD else ""
        raise FloatingPointError(
            f"gradients are not finite before their reduction: {told}{more}. No weight was changed; zero_grad() forgets"
            " the step"
        )

    def _describe(self, finding: Finding, rank: int) -> str:
        name, shape = self._params[finding.param]
        numel = torch.Size(shape).numel()
        kinds = [f"{count} {kind}" for kind, count in (("NaN", finding.num_nan), ("Inf", finding.num_inf)) if count]
        index: list[int] = []
        rest = finding.first
        for size in reversed(shape):
            rest, place = divmod(rest, size)
            index.insert(0, place)
        others = f" ({finding.num_others} other tensors of its unit too)" if finding.num_others else ""
        wire = ", finite until it was cast for sending" if finding.by_wire else ""
        return (
            f"{name} on rank {rank} in microbatch {finding.microbatch}: {' and '.join(kinds)} of {numel} elements, the"
            f" first at {index}{wire}{others}"
        )
