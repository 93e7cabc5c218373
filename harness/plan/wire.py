"""Messages and bytes of a step on the wire, by axis and kind, as `harness.probe.collectives` counts them on rank 0.

Each collective is cut as the engine cuts it (`Cuts`), along the route of the bucket's `Placements`; see
`PendingReduction`, `ParamGroup.install` and `GatherPipeline`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from harness.fsdp.comm.communicator import Part
from harness.fsdp.comm.reduction import NUM_COUNTERS, PACKED_BYTES
from harness.fsdp.options import Numerics
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.placement import OPERATIONS, PARTIAL, SHARD, Axis, Operation, Step
from harness.plan.model import META, Model

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
        for axis, kind, _ in self:
            each = {what: self[axis, kind, what] for what in ("count", "bytes")}
            if any(each.values()):
                found.setdefault(axis, {})[kind] = each
        return found


def summed(size: int, num_bytes: int) -> int:
    """Bytes sent in an all-reduce that is one call."""
    return -(-2 * num_bytes * (size - 1) // size)


class Traffic:
    """Traffic of one bucket: of a `gather` for a use of it, of `install` of updated weights, and of `reductions` of its
    gradients, in a backward that does not end a step and in one that does."""

    def __init__(self, bucket: ParamGroup, transport: str) -> None:
        self.bucket, self.transport, cuts, placed = bucket, transport, bucket.cuts, bucket.placements
        self.sizes = {Axis.inner: cuts.place.inner_size, Axis.outer: cuts.place.outer_size}
        self.whole = torch.empty(cuts.layout.bucket_numel, device=META)
        inner = cuts.inner_parts(self.whole)
        own = cuts.inner_shards(self.whole) if SHARD in placed.main_grads else [part.chunk(0) for part in inner]
        self.parts = {Axis.inner: inner, Axis.outer: cuts.outer_parts(own) if self.sizes[Axis.outer] > 1 else []}
        self.gather = self._gathers(placed.unshard)
        self.install = self._gathers(placed.install if placed.resting_weights_are_kept else ())
        self.reductions = tuple(map(self._reduction, placed.reductions)) if bucket.gradients else ()

    def _gathers(self, route: Sequence[Step]) -> Rows:
        rows = Rows()
        for axis in (step.axis for step in route if self.sizes[step.axis] > 1):
            sent = _gathered(self.parts[axis], self.sizes[axis], self.bucket.dtypes.compute.itemsize)
            rows.sent(axis.value, "all_gather", sent)
        return rows

    def _reduction(self, route: Sequence[Step]) -> Rows:
        rows, lies, gradients = Rows(), self.bucket.placements.main_grads, self.bucket.gradients
        for step in (step for step in route if self.sizes[step.axis] > 1):
            size, parts, is_inner = self.sizes[step.axis], self.parts[step.axis], step.axis is Axis.inner
            reduction = self.bucket.inner if is_inner else self.bucket.outer
            assert reduction is not None
            assert gradients is not None
            kind, width = OPERATIONS[PARTIAL, getattr(lies, step.axis.value)].value, reduction.dtypes.wire.itemsize
            apart = reduction.legs_apart or reduction.comm.shm is not None or not reduction.is_native
            one_call, is_second = kind == "all_reduce" and not apart, step.operation is not Operation.reduce_scatter
            if one_call:
                sent = 0 if is_second else sum(summed(size, sum(part.cut.sizes) * width) for part in parts)
            elif is_second:
                legs = self.bucket.cuts.second_leg_parts(self.whole) if is_inner else parts
                sent = _gathered(legs, size, gradients.sums.itemsize)
            else:
                sent = self._contributed(parts, size, width, is_native=reduction.is_native)
            rows.sent(step.axis.value, kind, sent, count=int(not is_second))
        return rows

    def _contributed(self, parts: Sequence[Part], size: int, width: int, *, is_native: bool) -> int:
        total = sum(sum(part.cut.sizes) for part in parts)
        packed = len(parts) > 1 and total * width <= PACKED_BYTES[self.transport == "nccl"]
        if self.transport != "shm" and (is_native or packed):
            return sum(part.cut.longest for part in parts) * (size - 1) * width
        return (total - sum(part.cut.sizes[0] for part in parts)) * width


def _gathered(parts: Sequence[Part], size: int, width: int) -> int:
    """Bytes that rank 0 sends of its chunks, which are none the shorter for being evened."""
    return sum(part.cut.sizes[0] for part in parts) * (size - 1) * width


def wire(model: Model, k: int, gathers: Mapping[str, int]) -> Rows:
    """Traffic of a step of k microbatches after the first two steps, in which ranks also compare what they hold.

    What layers send over the tensor-parallel axis is left out.

    Args:
        gathers: of each unit in a microbatch.
    """
    rows, known = Rows(), dict[Any, Traffic]()
    for unit in model.units:
        for bucket in unit.buckets:
            key = (bucket.key, tuple(slot.spec.shape for slot in bucket.layout.slots))
            if key not in known:
                known[key] = Traffic(bucket, model.transport)
            rows.add(known[key].gather, k * (1 if unit.is_root else gathers[unit.name]))
            rows.add(known[key].install)
            for is_last, of_backward in enumerate(known[key].reductions):
                rows.add(of_backward, 1 if is_last else k - 1)
    for axis, size, num_bytes in [*_agreements(model), *_scales(model)]:
        if size > 1 and num_bytes:
            rows.sent(axis, "all_reduce", summed(size, num_bytes))
    return rows


def _agreements(model: Model) -> list[tuple[str, int, int]]:
    """Axis, ranks and bytes: which parameters were used, and the norm."""
    mode, tp, ranks = model.config.numerics.mode, model.config.mesh.tp, model.place.inner_size * model.place.outer_size
    axis = "inner" if model.place.outer_size == 1 else "all"
    used = sum(len(bucket.params) for bucket in model.trained) + (mode is Numerics.exact)
    sums = [(axis, ranks, NUMBER * used)]
    if not all(bucket.is_whole_everywhere for bucket in model.trained):
        sums.append((axis if tp == 1 else "all", ranks * tp, NUMBER * (NUM_COUNTERS if mode.bitwise else 1)))
    return sums


def _scales(model: Model) -> list[tuple[str, int, int]]:
    """Axis, ranks and bytes: maxima of weights in 8 bits."""
    sizes = {"inner": model.place.inner_size, "outer": model.place.outer_size}
    held = [(bucket, each.scale) for bucket in model.buckets if bucket.codec for _, each in bucket.codec.weights]
    return [
        (axis, size, sum(scale.nbytes for bucket, scale in held if getattr(bucket.cuts.own, axis) is SHARD))
        for axis, size in sizes.items()
    ]
