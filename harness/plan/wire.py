"""Messages and bytes of a step on the wire, by axis and kind, as `harness.probe.collectives` counts them on rank 0.

Each collective is cut as the engine cuts it (`Cuts`), along the route of the bucket's `Placements`; see
`PendingReduction`, `ParamGroup.install` and `GatherPipeline`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
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
AXES = ("inner", "outer", "all", "tp")
"""all: ranks of several axes at once."""

Rows = Counter[tuple[str, str, str]]
"""Amount by axis, kind and `count` or `bytes`."""


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
    def place_sizes(self) -> dict[Axis, int]:
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
        rows, placements, cuts = Rows(), self.bucket.placements, self.bucket.cuts
        steps, lies = placements.reductions[last], placements.main_grads
        exact = self.numerics is Numerics.exact
        wire = INTEGER if exact else self.bucket.dtypes.wire.itemsize
        sums = INTEGER if exact else self.bucket.dtypes.grads.itemsize
        inner = cuts.inner_parts(self.whole)
        own = cuts.inner_shards(self.whole) if SHARD in lies else [part.chunk(0) for part in inner]
        outer = cuts.outer_parts(own) if self.place_sizes[Axis.outer] > 1 else []
        for step in steps:
            axis, size = step.axis, self.place_sizes[step.axis]
            target = lies.inner if axis is Axis.inner else lies.outer
            kind = OPERATIONS[PARTIAL, target].value
            apart = self.transport != "nccl" or not self.is_native or (axis is Axis.inner and bool(outer))
            one_call = kind == Operation.all_reduce.value and not apart
            if size == 1:
                continue
            if step.operation is Operation.reduce_scatter:
                parts = inner if axis is Axis.inner else outer
                rows[axis.value, kind, "count"] += 1
                if one_call:
                    moved = sum(summed(size, sum(part.cut.sizes) * wire) for part in parts)
                else:
                    moved = self._contributed(parts, size, wire)
                rows[axis.value, kind, "bytes"] += moved
            elif not one_call:
                second = outer if axis is Axis.outer else cuts.second_leg_parts(self.whole)
                rows[axis.value, kind, "bytes"] += self._gathered(second, size, sums)
        return rows

    def _contributed(self, parts: Sequence[Part], size: int, width: int) -> int:
        total = sum(sum(part.cut.sizes) for part in parts)
        packed = len(parts) > 1 and total * width <= PACKED_BYTES[self.transport == "nccl"]
        if self.transport != "shm" and (self.is_native or packed):
            return sum(part.cut.longest for part in parts) * (size - 1) * width
        return (total - sum(part.cut.sizes[0] for part in parts)) * width

    def _gathered(self, parts: Iterable[Part], size: int, width: int) -> int:
        """Bytes that rank 0 sends of its chunks, which are none the shorter for being evened."""
        return sum(part.cut.sizes[0] for part in parts) * (size - 1) * width

    def gather(self) -> Rows:
        rows, size = Rows(), self.place_sizes[Axis.inner]
        if self.bucket.is_gathered and size > 1:
            rows["inner", "all_gather", "count"] += 1
            width = self.bucket.dtypes.compute.itemsize
            rows["inner", "all_gather", "bytes"] += self._gathered(
                self.bucket.cuts.inner_parts(self.whole), size, width
            )
        return rows

    def install(self) -> Rows:
        rows, placements, cuts = Rows(), self.bucket.placements, self.bucket.cuts
        if not (placements.resting_weights_are_kept and placements.install):
            return rows
        for step in route(placements.main_weights, placements.resting_weights):
            size = self.place_sizes[step.axis]
            if size == 1:
                continue
            is_inner = step.axis is Axis.inner
            parts = cuts.inner_parts(self.whole) if is_inner else cuts.outer_parts(cuts.inner_shards(self.whole))
            moved = self._gathered(parts, size, self.bucket.dtypes.compute.itemsize)
            rows[step.axis.value, "all_gather", "count"] += self.bucket.copies
            rows[step.axis.value, "all_gather", "bytes"] += self.bucket.copies * moved
        return rows


def wire(model: Model, k: int) -> Rows:
    """Traffic of a step of k microbatches after the first two steps, in which ranks also compare what they hold.

    What layers send over the tensor-parallel axis is left out.
    """
    mode, rows, gathers = model.config.numerics.mode, Rows(), Gathers(model)
    known: dict[Bucket, Traffic] = {}
    for unit in model.units:
        for bucket in unit.buckets:
            traffic = known.setdefault(bucket, Traffic(bucket, model.transport, mode))
            add(rows, traffic.gather(), k * gathers.of(unit, bucket))
            add(rows, traffic.install())
            if bucket.trainable:
                add(rows, traffic.reduction(last=True))
                add(rows, traffic.reduction(last=False), k - 1)
    add(rows, _agreements(model))
    add(rows, _scales(model))
    return Rows({key: amount for key, amount in rows.items() if amount})


def add(rows: Rows, more: Rows, times: int = 1) -> None:
    for key, amount in more.items():
        rows[key] += times * amount


class Gathers:
    """Gathers of a bucket in a microbatch: for the forward and for the backward; the unit a forward ends with stays."""

    def __init__(self, model: Model) -> None:
        order = [unit for unit in model.units if unit.is_gathered]
        self.last = order[-1] if order else None
        self.recomputes = model.config.model.activation_checkpointing

    def of(self, unit: Unit, bucket: Bucket) -> int:
        has_two = any(each.copies > 1 for each in unit.buckets)
        if unit.is_root:
            return bucket.copies
        if has_two and bucket.copies > 1:
            return 3 if self.recomputes else 2
        return 1 if unit is self.last and not has_two else 2


def _agreements(model: Model) -> Rows:
    """Which parameters were used, and the norm: a small all-reduce each."""
    rows, ranks = Rows(), model.ranks
    trained = [bucket for bucket in model.buckets if bucket.trainable]
    axis = "inner" if model.place.outer_size == 1 else "all"
    is_exact = model.config.numerics.mode is Numerics.exact
    used = sum(len(bucket.cuts.layout.slots) for bucket in trained) + is_exact
    is_split = any(bucket.is_cut or bucket.placements.main_weights != WHOLE for bucket in trained)
    squares = NUM_COUNTERS if model.config.numerics.mode.bitwise else 1
    sums = [(axis, ranks, used)]
    if is_split:
        sums.append((axis if model.tp == 1 else "all", ranks * model.tp, squares))
    for name, size, numbers in sums:
        if size > 1:
            rows[name, "all_reduce", "count"] += 1
            rows[name, "all_reduce", "bytes"] += summed(size, NUMBER * numbers)
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
            rows[name, "all_reduce", "count"] += num_bytes > 0
            rows[name, "all_reduce", "bytes"] += summed(size, num_bytes)
    return rows
