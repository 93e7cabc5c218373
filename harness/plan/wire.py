"""Messages and bytes of a step on the wire, by axis and kind, as `harness.probe.collectives` counts them on rank 0.

Each collective is cut as the engine cuts it (`Cuts`), along the route of the bucket's `Placements`; see
`PendingReduction`, `ParamGroup.install` and `GatherPipeline`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from harness.fp8.linear import layers_of
from harness.fp8.quantize import Column
from harness.fsdp.comm.communicator import Part
from harness.fsdp.comm.fixed_point import NUM_COUNTERS
from harness.fsdp.comm.reduction import PACKED_BYTES
from harness.fsdp.storage.placement import OPERATIONS, PARTIAL, SHARD, WHOLE, Axis, Operation, route
from harness.fsdp.vocabulary import Numerics
from harness.plan.model import INTEGER, Bucket, Model, Unit

NUMBER = 8
"""Bytes of a count, or of a sum of squares."""


class Rows(Counter[tuple[str, str, str]]):
    """Amount by axis (inner, outer, tp, or all: ranks of several), kind, and `count` or `bytes`."""

    def sent(self, axis: str, kind: str, num_bytes: int, count: int = 1) -> None:
        self[axis, kind, "count"] += count
        self[axis, kind, "bytes"] += num_bytes

    def add(self, more: Rows, times: int = 1) -> None:
        for key, amount in more.items():
            self[key] += times * amount

    @property
    def num_bytes(self) -> int:
        return sum(amount for (_, _, what), amount in self.items() if what == "bytes")

    @property
    def table(self) -> dict[str, dict[str, dict[str, int]]]:
        """Count and bytes by axis and kind, of what is sent."""
        found: dict[str, dict[str, dict[str, int]]] = {}
        for (axis, kind, what), amount in self.items():
            if self[axis, kind, "count"] or self[axis, kind, "bytes"]:
                found.setdefault(axis, {}).setdefault(kind, {"count": 0, "bytes": 0})[what] = amount
        return found


def summed(size: int, num_bytes: int) -> int:
    """Bytes sent in an all-reduce that is one call."""
    return -(-2 * num_bytes * (size - 1) // size)


@dataclass(frozen=True)
class Traffic:
    """Traffic of one bucket: `reduction` of its gradients, `gather` for a use of it, `install` of updated weights."""

    bucket: Bucket
    transport: str
    numerics: Numerics

    @property
    def sizes(self) -> dict[Axis, int]:
        place = self.bucket.cuts.place
        return {Axis.inner: place.inner_size, Axis.outer: place.outer_size}

    @cached_property
    def whole(self) -> Tensor:
        return torch.empty(self.bucket.cuts.layout.bucket_numel, device="meta")

    @property
    def is_native(self) -> bool:
        """See `Reduction`: whether the backend sums."""
        dtypes, exact = self.bucket.dtypes, self.numerics is Numerics.exact
        as_sent = dtypes.wire == dtypes.accum and dtypes.accum.itemsize >= 4
        otherwise = not exact and (self.numerics.bitwise or not as_sent)
        return self.transport == "shm" or (self.transport == "nccl" and not otherwise)

    def reduction(self, *, last: bool) -> Rows:
        rows, cuts, exact, dtypes = Rows(), self.bucket.cuts, self.numerics is Numerics.exact, self.bucket.dtypes
        lies = self.bucket.placements.main_grads
        wire, sums = (INTEGER, INTEGER) if exact else (dtypes.wire.itemsize, dtypes.grads.itemsize)
        inner = cuts.inner_parts(self.whole)
        own = cuts.inner_shards(self.whole) if SHARD in lies else [part.chunk(0) for part in inner]
        outer = cuts.outer_parts(own) if self.sizes[Axis.outer] > 1 else []
        for step in self.bucket.placements.reductions[last]:
            size, is_inner = self.sizes[step.axis], step.axis is Axis.inner
            if size == 1:
                continue
            kind = OPERATIONS[PARTIAL, lies.inner if is_inner else lies.outer].value
            apart = self.transport != "nccl" or not self.is_native or (is_inner and bool(outer))
            one_call = kind == Operation.all_reduce.value and not apart
            parts = inner if is_inner else outer
            if step.operation is not Operation.reduce_scatter:  # the second leg of what was counted
                second = cuts.second_leg_parts(self.whole) if is_inner else outer
                rows.sent(step.axis.value, kind, 0 if one_call else _gathered(second, size, sums), count=0)
            elif one_call:
                rows.sent(step.axis.value, kind, sum(summed(size, sum(part.cut.sizes) * wire) for part in parts))
            else:
                rows.sent(step.axis.value, kind, self._contributed(parts, size, wire))
        return rows

    def _contributed(self, parts: Sequence[Part], size: int, width: int) -> int:
        total = sum(sum(part.cut.sizes) for part in parts)
        packed = len(parts) > 1 and total * width <= PACKED_BYTES[self.transport == "nccl"]
        if self.transport != "shm" and (self.is_native or packed):
            return sum(part.cut.longest for part in parts) * (size - 1) * width
        return (total - sum(part.cut.sizes[0] for part in parts)) * width

    def gather(self) -> Rows:
        rows, size, width = Rows(), self.sizes[Axis.inner], self.bucket.dtypes.compute.itemsize
        if self.bucket.is_gathered and size > 1:
            rows.sent("inner", "all_gather", _gathered(self.bucket.cuts.inner_parts(self.whole), size, width))
        return rows

    def install(self) -> Rows:
        rows, placements, cuts = Rows(), self.bucket.placements, self.bucket.cuts
        width, copies = self.bucket.dtypes.compute.itemsize, self.bucket.copies
        if not (placements.resting_weights_are_kept and placements.install):
            return rows
        for step in route(placements.main_weights, placements.resting_weights):
            is_inner, size = step.axis is Axis.inner, self.sizes[step.axis]
            parts = cuts.inner_parts(self.whole) if is_inner else cuts.outer_parts(cuts.inner_shards(self.whole))
            if size > 1:
                rows.sent(step.axis.value, "all_gather", copies * _gathered(parts, size, width), copies)
        return rows


def _gathered(parts: Iterable[Part], size: int, width: int) -> int:
    """Bytes that rank 0 sends of its chunks, which are none the shorter for being evened."""
    return sum(part.cut.sizes[0] for part in parts) * (size - 1) * width


def wire(model: Model, k: int, gathers: Mapping[str, int]) -> Rows:
    """Traffic of a step of k microbatches after the first two steps, in which ranks also compare what they hold.

    What layers send over the tensor-parallel axis is left out.

    Args:
        gathers: of each unit in a microbatch.
    """
    mode, rows, known = model.config.numerics.mode, Rows(), dict[Bucket, Traffic]()
    for unit in model.units:
        for bucket in unit.buckets:
            traffic = known.setdefault(bucket, Traffic(bucket, model.transport, mode))
            rows.add(traffic.gather(), k * _times(model, unit, bucket, gathers[unit.name]))
            rows.add(traffic.install())
            if bucket.trainable:
                rows.add(traffic.reduction(last=True))
                rows.add(traffic.reduction(last=False), k - 1)
    rows.add(_agreements(model))
    rows.add(_scales(model))
    return rows


def _times(model: Model, unit: Unit, bucket: Bucket, gathers: int) -> int:
    """Gathers of a bucket in a microbatch; of two encodings a forward that is recomputed wants its own again."""
    if unit.is_root:
        return bucket.copies
    return gathers + (bucket.copies > 1 and model.config.model.activation_checkpointing)


def _agreements(model: Model) -> Rows:
    """Which parameters were used, and the norm: a small all-reduce each."""
    rows, ranks = Rows(), model.ranks
    trained = [bucket for bucket in model.buckets if bucket.trainable]
    axis, mode = "inner" if model.place.outer_size == 1 else "all", model.config.numerics.mode
    used = sum(len(bucket.cuts.layout.slots) for bucket in trained) + (mode is Numerics.exact)
    sums = [(axis, ranks, used)]
    if any(bucket.is_cut or bucket.placements.main_weights != WHOLE for bucket in trained):
        sums.append((axis if model.tp == 1 else "all", ranks * model.tp, NUM_COUNTERS if mode.bitwise else 1))
    for name, size, numbers in sums:
        if size > 1:
            rows.sent(name, "all_reduce", summed(size, NUMBER * numbers))
    return rows


def _scales(model: Model) -> Rows:
    """Maxima of weights in 8 bits, and of delayed scaling's histories: an all-reduce of each dtype over each axis."""
    rows, place = Rows(), model.place
    held = [(bucket, each) for bucket in model.buckets for each in bucket.scales]
    histories = sum(len(Column) * 4 for each in layers_of(model.module) if each.recipe.delayed)
    for name, size in (("inner", place.inner_size), ("outer", place.outer_size), ("tp", model.tp)):
        alike = Counter({4: histories})
        for bucket, scales in held:
            if scales.over_tp if name == "tp" else getattr(bucket.cuts.own, name) is SHARD:
                alike[scales.itemsize] += scales.agreed
        for num_bytes in alike.values() if size > 1 else ():
            rows.sent(name, "all_reduce", summed(size, num_bytes), count=int(num_bytes > 0))
    return rows
