"""Which parameters got a gradient on no rank in a step: to the optimizer they are what `grad is None` is to torch's.

[Note: Used anywhere] A parameter is used if any rank had a gradient of it in any microbatch of the step; then all ranks
update it, those that had none with the others' sum. How ranks know of each other's:

    marks    gradients themselves say so, and nothing is sent (see [Note: Negative zero]); a rank that had a gradient of
             every parameter need not even look, and one that is alone marks nothing
    counts   an int64 a parameter, summed over all ranks once a step: in the same message as the counters of
             numerics=exact, whose gradients are integers and have no negative zero; under numerics=ordered, which may
             touch no element in a place that depends on the layout; where a format has too little range (fp16), or a
             backend that sums by itself loses the sign of zero; and where work is queued: one message a step is given
             sooner than marks in every bucket. A rank that had all gradients need not look: no sum is zero
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.device import is_queued
from harness.fsdp.comm.reduction import NativeReduction, Reduction
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.gradients import Gradients
from harness.fsdp.storage.marks import ABSENT, Marks, can_mark
from harness.fsdp.storage.placement import SHARD
from harness.fsdp.vocabulary import Numerics

PROBED_ELEMENTS = (1 << 8, 1 << 22)
"""Least lengths of the tensors a backend is asked with: it chooses how to sum by length."""


@dataclass(frozen=True)
class Group:
    """Gradients whose ranks tell each other: those of dense parameters, or of experts."""

    comm: Communicator
    gradients: Sequence[Gradients]


class Usage:
    """Finds out, once a step, which parameters got a gradient on no rank.

    Args:
        groups: all gradients of the model, those of dense parameters first.
        why_counts: why gradients cannot say so themselves; empty where they can.
    """

    def __init__(self, groups: Sequence[Group], why_counts: str) -> None:
        self.groups = groups
        self.why_counts = why_counts
        self.wanted = True
        """Whether an optimizer asks, or may yet be bound and ask. Else nothing is looked at or sent."""

    def take_in(self, other: Usage) -> None:
        """Go on with the groups of another one, and in its way."""
        self.groups, self.why_counts = other.groups, other.why_counts

    def facts(self) -> dict[str, str]:
        """How ranks know of each other's gradients, for `ShardedModel.transport`."""
        if not self.wanted:
            return {}
        return {"unused_parameters": f"counts: {self.why_counts}" if self.why_counts else "marks"}

    def find(self, beyond: Tensor | None = None) -> int:
        """Note in all gradients which parameters are unused. *Collective* where ranks count.

        Args:
            beyond: int64, shape [1], to be summed over the ranks of the first group in the same message.

        Returns that sum; 0 without one.
        """
        if self.why_counts:
            sums = [self._count(group, beyond if index == 0 else None) for index, group in enumerate(self.groups)]
            return sums[0]
        if self.wanted:
            for group in self.groups:
                _look(group)
        return 0

    def _count(self, group: Group, beyond: Tensor | None) -> int:
        """Sum what every rank had; the sum of `beyond` too."""
        asked = group.gradients if self.wanted else ()
        had = [index in each.came for each in asked for index in range(len(each.params))]
        first = [] if beyond is None else [beyond]
        if not first and not had:
            return 0
        counts = _as_counts(had, group.comm.runtime.device)
        values = torch.cat([*first, counts]) if first else counts
        totals = group.comm.sum_scalars(values, "gradients beyond the fixed point" if first else "used parameters")
        if not first and all(had):
            return 0
        told: list[int] = totals.tolist()
        self._note(asked, told[len(first) :])
        return told[0] if first else 0

    def _note(self, asked: Sequence[Gradients], counts: list[int]) -> None:
        begin = 0
        for each in asked:
            unused = {i for i, count in enumerate(counts[begin : begin + len(each.params)]) if not count}
            begin += len(each.params)
            if unused:
                each.note_unused(unused)


def _look(group: Group) -> None:
    """Note what marks say of parameters that this rank had no gradient of; one that is alone knows by itself."""
    for gradients in group.gradients:
        missing = gradients.missing()
        if missing and group.comm.size == 1:
            gradients.note_unused(missing)
        elif missing and gradients.marks is not None:
            gradients.note_unused(gradients.marks.absent(gradients.own_shards, missing))


def _as_counts(had: Sequence[bool], device: torch.device) -> Tensor:
    """Ones and zeros, int64; the host brings them to the device only where they differ."""
    if all(had):
        return torch.ones(len(had), dtype=torch.int64, device=device)
    return torch.tensor(had, dtype=torch.int64, device=device)


def make_usage(
    groups: Sequence[Group], buckets: Sequence[Bucket], reductions: Iterable[Reduction], numerics: Numerics
) -> Usage:
    """Choose how ranks tell each other, see [Note: Used anywhere], and prepare gradients for it. *Collective.*

    Args:
        buckets: of the gradients. reductions: of all of them.
    """
    why = _why_counts(buckets, numerics)
    if not why and is_queued(groups[0].comm.runtime.device):
        why = "work is queued"
    if not why and not keeps_negative_zero(reductions, groups[0].comm):
        why = "this backend's sums lose the sign of zero"
    for bucket in buckets:
        if bucket.gradients is not None:
            marked = not why and bucket.context.mesh.everyone.size > 1
            bucket.gradients.marks = Marks(bucket.cuts, bucket.dtypes, bucket.memory.device) if marked else None
    return Usage(groups, why)


def _why_counts(buckets: Sequence[Bucket], numerics: Numerics) -> str:
    if numerics.bitwise:
        return f"numerics={numerics.name}"
    if any(bucket.context.sharded_parameters and SHARD in bucket.cuts.own for bucket in buckets):
        return "ranks agree on gradients that are None, of parameters without a row there, too"
    narrow = next((bucket for bucket in buckets if not can_mark(bucket.dtypes)), None)
    return "" if narrow is None else f"fp16 is among the gradient formats of {narrow.name}"


def keeps_negative_zero(reductions: Iterable[Reduction], everyone: Communicator) -> bool:
    """Whether -0.0 + (-0.0) is -0.0 in all backends that sum by themselves, on all ranks. *Collective.*

    Where the engine sums, on gloo always, nothing is asked.
    """
    asked = {(each.comm, each.dtypes.wire): each for each in reductions if isinstance(each, NativeReduction)}
    lost = [_lost(comm, dtype) for comm, dtype in asked if comm.size > 1]
    if not lost:
        return True
    return not int(everyone.sum_scalars(torch.stack(lost).sum().reshape(1), "negative zeros that were lost"))


def _lost(comm: Communicator, dtype: torch.dtype) -> Tensor:
    """How many elements of sums of -0.0 are not -0.0: int64, shape []."""
    count = torch.zeros((), dtype=torch.int64, device=comm.runtime.device)
    for numel in PROBED_ELEMENTS:
        share = -(-numel // comm.size)
        whole = torch.full((share * comm.size,), ABSENT, dtype=dtype, device=comm.runtime.device)
        part = torch.empty_like(whole[:share])
        comm.group.reduce_scatter_tensor_coalesced([part], [whole]).wait()
        comm.group.allreduce([whole]).wait()
        count += sum((~torch.signbit(each)).sum() for each in (part, whole))
    return count
