"""Gradients that are not finite, reported by all ranks at the end of a step.

A rank that raised in the middle of a backward would leave the others waiting in their collectives. So it remembers what
it finds; when the step's gradients are finished, one small all-reduce tells every rank, and all raise one error. A
bucket is summed once a backward: right before it is sent, in the wire's dtype, or else at the end of the backward. NaN
and infinity survive a sum, and only then is the place looked for.

Where work is queued, reading a sum would stop the host. The largest element of every parameter stays on the device
until the end of the step; the host reads one number then, and the rest only if that is not zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.fsdp.comm.device import is_queued
from harness.fsdp.comm.mesh import Everyone, all_values
from harness.fsdp.storage.param_group import ParamGroup
from harness.private_torch import foreach_norm

MAX_LISTED = 8


class Finding(NamedTuple):
    """microbatch counts from 1. param: place in the list of trained ones. first: index in the parameter, flattened;
    -1 where nobody has counted. num_others: of the same bucket. by_wire: 1 if the gradient was finite before its cast.
    """

    microbatch: int
    param: int
    num_nan: int
    num_inf: int
    first: int
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
        self._finding: Finding | None = None
        self._seen: list[Seen] = []
        self.watch(buckets)

    def watch(self, buckets: Sequence[ParamGroup]) -> None:
        self._params = [(slot.spec.name, slot.spec.shape) for bucket in buckets for slot in bucket.layout.slots]
        self._places = {name: place for place, (name, _) in enumerate(self._params)}

    def begin_backward(self) -> None:
        self._microbatch += 1

    def forget(self) -> None:
        self._microbatch, self._finding, self._seen = 0, None, []

    @torch.no_grad()
    def look(self, bucket: ParamGroup, gradients: Tensor, source: Tensor | None = None) -> None:
        """Look at an unsharded bucket of unreduced gradients. source: the same before a cast, where there was one."""
        if is_queued(gradients.device):
            self._seen.append(self._note(bucket, gradients, source))
        elif self._finding is None and not bool(gradients.sum().isfinite()):
            self._finding = self._locate(bucket, gradients, source)

    def _note(self, bucket: ParamGroup, gradients: Tensor, source: Tensor | None) -> Seen:
        held = [(name, view) for name, view in bucket.named_slices(gradients) if view.numel()]
        uncast = [view for _, view in bucket.named_slices(source) if view.numel()] if source is not None else []
        return Seen(
            self._microbatch,
            [self._places[name] for name, _ in held],
            list(foreach_norm([view for _, view in held], math.inf)),
            list(foreach_norm(uncast, math.inf)) if uncast else [],
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
                is_nan = math.isnan(values[bad[-1]])
                by_wire = bool(seen.before) and math.isfinite(float(seen.before[bad[-1]]))
                place = seen.places[bad[-1]]
                return Finding(seen.microbatch, place, int(is_nan), int(not is_nan), -1, len(bad) - 1, int(by_wire))
        return None

    def _locate(self, bucket: ParamGroup, gradients: Tensor, source: Tensor | None) -> Finding | None:
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
        mine = self._finding or [0] * len(Finding._fields)
        values = torch.tensor(mine, dtype=torch.int64, device=self.comm.runtime.device)
        rows: list[list[int]] = all_values(self.comm, values, "non-finite gradients").tolist()
        found = sorted((row[0], rank, Finding(*row)) for rank, row in enumerate(rows) if row[0])
        if not found:
            return
        text = "; ".join(self._describe(finding, rank) for _, rank, finding in found[:MAX_LISTED])
        left = len(found) - MAX_LISTED
        more = f"; and on {left} more rank{'s' * (left > 1)}" if left > 0 else ""
        raise FloatingPointError(
            f"gradients are not finite before their reduction: {text}{more}. No weight was changed; zero_grad() forgets"
            " the step"
        )

    def _describe(self, finding: Finding, rank: int) -> str:
        name, shape = self._params[finding.param]
        numel = torch.Size(shape).numel()
        count = finding.num_others
        others = f" ({count} other tensor{'s' * (count > 1)} of its unit too)" if count else ""
        wire = ", finite until it was cast for sending" if finding.by_wire else ""
        where = f"{name} on rank {rank} in microbatch {finding.microbatch}"
        if finding.first < 0:
            return f"{where}: {'NaN' if finding.num_nan else 'Inf'} among {numel} elements{wire}{others}"
        kinds = [f"{count} {kind}" for kind, count in (("NaN", finding.num_nan), ("Inf", finding.num_inf)) if count]
        index = [int(place) for place in torch.unravel_index(torch.tensor(finding.first), shape)]
        return f"{where}: {' and '.join(kinds)} of {numel} elements, the first at {index}{wire}{others}"
