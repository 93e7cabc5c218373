"""Gradients that are not finite, reported by all ranks at the end of a step.

A rank that raised in the middle of a backward would leave the others waiting in their collectives. So it remembers what
it finds; when the step's gradients are finished, one small all-reduce tells every rank, and all raise one error. A
bucket is looked at once a backward: right before it is sent, in the wire's dtype, or else at the end of the backward.
The largest element of every parameter stays on the device until the end of the step; the host reads one number then,
and the rest only if that is not zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.fsdp.comm.mesh import Everyone, all_values
from harness.fsdp.storage.param_group import ParamGroup
from harness.private_torch import foreach_norm

MAX_LISTED = 8


class Finding(NamedTuple):
    """microbatch counts from 1. param: place in the list of trained ones. num_others: of the same bucket. by_wire: 1 if
    the gradient was finite before its cast.
    """

    microbatch: int
    param: int
    is_nan: int
    num_others: int
    by_wire: int


class Seen(NamedTuple):
    microbatch: int
    places: list[int]
    largest: list[Tensor]
    before: list[Tensor]


class GradientGuard:
    def __init__(self, buckets: Sequence[ParamGroup], comm: Everyone) -> None:
        self.comm = comm
        self._microbatch = 0
        self._seen: list[Seen] = []
        self.watch(buckets)

    def watch(self, buckets: Sequence[ParamGroup]) -> None:
        self._params = [(slot.spec.name, slot.spec.numel) for bucket in buckets for slot in bucket.layout.slots]
        self._places = {name: place for place, (name, _) in enumerate(self._params)}

    def begin_backward(self) -> None:
        self._microbatch += 1

    def forget(self) -> None:
        self._microbatch, self._seen = 0, []

    @torch.no_grad()
    def look(self, bucket: ParamGroup, gradients: Tensor, source: Tensor | None = None) -> None:
        """Look at an unsharded bucket of unreduced gradients. source: the same before a cast, where there was one."""
        held = [(name, view) for name, view in bucket.named_slices(gradients) if view.numel()]
        uncast = [view for _, view in bucket.named_slices(source) if view.numel()] if source is not None else []
        self._seen.append(
            Seen(
                self._microbatch,
                [self._places[name] for name, _ in held],
                list(foreach_norm([view for _, view in held], math.inf)) if held else [],
                list(foreach_norm(uncast, math.inf)) if uncast else [],
            )
        )

    def _none_anywhere(self) -> bool:
        found = torch.zeros(1, dtype=torch.int64, device=self.comm.runtime.device)
        values = [value for seen in self._seen for value in seen.largest]
        for dtype in dict.fromkeys(value.dtype for value in values):
            largest = torch.stack([value for value in values if value.dtype == dtype])
            found += largest.isfinite().logical_not_().sum()
        return not int(self.comm.sum_scalars(found, "non-finite gradients"))

    def _judge(self) -> Finding | None:
        """The first bad bucket's last parameter: the backward reached it first."""
        for seen in self._seen:
            values = [float(value) for value in seen.largest]
            bad = [place for place, value in enumerate(values) if not math.isfinite(value)]
            if bad:
                by_wire = bool(seen.before) and math.isfinite(float(seen.before[bad[-1]]))
                is_nan, others = math.isnan(values[bad[-1]]), len(bad) - 1
                return Finding(seen.microbatch, seen.places[bad[-1]], int(is_nan), others, int(by_wire))
        return None

    def report(self) -> None:
        """Raise the same FloatingPointError on all ranks if any of them found something. *Collective.*"""
        if self._none_anywhere():
            return
        mine = self._judge() or [0] * len(Finding._fields)
        values = torch.tensor(mine, dtype=torch.int64, device=self.comm.runtime.device)
        rows: list[list[int]] = all_values(self.comm, values, "non-finite gradients").tolist()
        found = sorted((row[0], rank, Finding(*row)) for rank, row in enumerate(rows) if row[0])
        text = "; ".join(self._describe(finding, rank) for _, rank, finding in found[:MAX_LISTED])
        left = len(found) - MAX_LISTED
        more = f"; and on {left} more rank{'s' * (left > 1)}" if left > 0 else ""
        raise FloatingPointError(
            f"gradients are not finite before their reduction: {text}{more}. No weight was changed; zero_grad() forgets"
            " the step"
        )

    def _describe(self, finding: Finding, rank: int) -> str:
        name, numel = self._params[finding.param]
        count = finding.num_others
        others = f" ({count} other tensor{'s' * (count > 1)} of its unit too)" if count else ""
        wire = ", finite until it was cast for sending" if finding.by_wire else ""
        where = f"{name} on rank {rank} in microbatch {finding.microbatch}"
        return f"{where}: {'NaN' if finding.is_nan else 'Inf'} among {numel} elements{wire}{others}"
