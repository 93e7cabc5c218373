"""Gradients that are not finite, reported by all ranks at the end of a step.

A rank that raised in the middle of a backward would leave the others waiting in their collectives. So it remembers what
it finds; when the step's gradients are finished, one small all-reduce tells every rank, and all raise one error. A
bucket is looked at once a backward: right before it is sent, in the wire's dtype, or else at the end of the backward.
The largest element of every parameter stays on the device until the end of the step; the host reads one number then,
and the rest only if that is not zero.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.mesh import everyones
from harness.fsdp.storage.param_group import ParamGroup
from harness.private_torch import foreach_norm

MAX_LISTED = 8
PURPOSE = "non-finite gradients"


class Seen(NamedTuple):
    """One bucket in one backward.

    microbatch: counts from 1. params: names and numbers of elements. largest, before: as it is sent, and before a cast
    for that; empty where there was none.
    """

    microbatch: int
    params: list[tuple[str, int]]
    largest: list[Tensor]
    before: list[Tensor]


class GradientGuard:
    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._microbatch = 0
        self._seen: list[Seen] = []

    def begin_backward(self) -> None:
        self._microbatch += 1

    def forget(self) -> None:
        self._microbatch, self._seen = 0, []

    @torch.no_grad()
    def look(self, bucket: ParamGroup, gradients: Tensor, source: Tensor | None = None) -> None:
        """Look at an unsharded bucket of unreduced gradients. source: the same before a cast, where there was one."""
        held = [(name, view) for name, view in bucket.named_slices(gradients) if view.numel()]
        uncast = [view for _, view in bucket.named_slices(source) if view.numel()] if source is not None else []
        norms = [list(foreach_norm(views, math.inf)) if views else [] for views in ([view for _, view in held], uncast)]
        self._seen.append(Seen(self._microbatch, [(name, view.numel()) for name, view in held], *norms))

    def _none_anywhere(self) -> bool:
        found = torch.zeros(1, dtype=torch.int64, device=self.comm.runtime.device)
        values = [value for seen in self._seen for value in seen.largest]
        for dtype in dict.fromkeys(value.dtype for value in values):
            largest = torch.stack([value for value in values if value.dtype == dtype])
            found += largest.isfinite().logical_not_().sum()
        return not int(self.comm.sum_scalars(found, PURPOSE))

    def report(self) -> None:
        """Raise the same FloatingPointError on all ranks if any of them found something. *Collective.*"""
        if self._none_anywhere():
            return
        told = everyones(self._worst(), self.comm, PURPOSE)
        found = sorted((int(number), rank, text) for rank, pairs in enumerate(told) for number, text in pairs)
        text = "; ".join(text for *_, text in found[:MAX_LISTED])
        left = len(found) - MAX_LISTED
        more = f"; and on {left} more rank{'s' * (left > 1)}" if left > 0 else ""
        raise FloatingPointError(
            f"gradients are not finite before their reduction: {text}{more}. No weight was changed; zero_grad() forgets"
            " the step"
        )

    def _worst(self) -> list[tuple[str, str]]:
        """Microbatch and description of this rank's first bad bucket; [] if it has none.

        Of its parameters the last one: the backward reached it first.
        """
        for seen in self._seen:
            values = [float(value) for value in seen.largest]
            bad = [place for place, value in enumerate(values) if not math.isfinite(value)]
            if bad:
                (name, numel), value, count = seen.params[bad[-1]], values[bad[-1]], len(bad) - 1
                others = f" ({count} other tensor{'s' * (count > 1)} of its unit too)" if count else ""
                by_wire = seen.before and math.isfinite(float(seen.before[bad[-1]]))
                wire = ", finite until it was cast for sending" if by_wire else ""
                kind = "NaN" if math.isnan(value) else "Inf"
                where = f"{name} on rank {self.comm.rank} in microbatch {seen.microbatch}"
                return [(str(seen.microbatch), f"{where}: {kind} among {numel} elements{wire}{others}")]
        return []
