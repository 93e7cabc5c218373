"""Peak of a step: the engine's own buffers, moved as its pipelines move them, beside the recorded activations.

The rules are those of `GatherPipeline` (units gathered ahead, the last one kept for the backward), `ReducePipeline` (at
most two units of unreduced gradients) and `BucketMemory` (a reduced bucket stays as a spare one).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from harness.config.derived import engine_options, fixed_buffers, microbatches_per_rank
from harness.config.schema import Device
from harness.fsdp.runtime.reduce import MAX_UNITS
from harness.fsdp.storage.memory import ALIGN_BYTES
from harness.fsdp.vocabulary import Numerics
from harness.plan.activations import Mark
from harness.plan.model import INTEGER, Bucket, Model, Unit, tensors

SHOWN = {"forward": "forward of", "left": "after the forward of", "backward": "backward of", "gradient": "backward of"}


@dataclass
class Peak:
    """Bytes at the peak. moment: where in a step. parts: what is alive then."""

    total: int = 0
    moment: str = ""
    parts: dict[str, int] | None = None


class Step:
    """Buffers of one step. kept: bytes between steps, as `harness.plan.model` has them."""

    def __init__(self, model: Model, kept: int) -> None:
        config, options = model.config, engine_options(model.config)
        self.model, self.units = model, model.units
        self.order = [unit for unit in model.units if unit.is_gathered]
        self.prefetch = options["prefetch"]
        self.is_exact = config.numerics.mode is Numerics.exact
        self.is_queued = config.cluster.device is Device.cuda
        # sums of microbatches that are there from the first reduction of a step to `zero_grad`, by unit
        self.sums = {unit.name: sum(map(self._sums, unit.trained)) for unit in self.units}
        self.kept = kept - sum(self.sums.values())
        self.fixed = fixed_buffers(config)
        self.standing = self._standing() if self.fixed else 0
        self.weights: dict[str, int] = {}
        self.sweep: list[Unit] = []
        self.on_way: set[str] = set()
        self.buckets: dict[str, list[int]] = {}
        self.in_flight: deque[Unit] = deque()
        self.beside: dict[str, int] = {}
        self.spare: list[int] = []
        self.summed: set[str] = set()
        self.waiting = 0
        self.last = True
        self.peak = Peak()

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def _sums(self, bucket: Bucket) -> int:
        """Bytes of a bucket's sums, where they come and go with a step."""
        if bucket.placements.accumulates_locally:
            return 0
        found = {role: num_bytes for role, num_bytes, _ in tensors(bucket, self.model.config)}
        return found.get("gradient_sums", found["main_grads"])

    def _standing(self) -> int:
        """Bytes of the two buffers that units but the root take turns in; see `harness.fsdp.storage.memory`."""
        turns = [0, 0]
        for number, unit in enumerate(unit for unit in self.units if not unit.is_root):
            gathered = [bucket for bucket in unit.buckets if bucket.is_gathered]
            placed = sum(-(-each.whole_bytes // ALIGN_BYTES) * ALIGN_BYTES * each.copies for each in gathered)
            turns[number % 2] = max(turns[number % 2], placed)
        return sum(turns)

    def _written(self, unit: Unit) -> list[int]:
        """Bytes of the buckets that a unit's gradients are copied into; none where autograd adds to the sums."""
        return [
            bucket.cuts.layout.bucket_numel * bucket.arriving(self.model.config).itemsize
            for bucket in unit.trained
            if not bucket.placements.accumulates_locally or self.is_exact
        ]

    def _copies(self, unit: Unit) -> int:
        """Bytes of gradients as they are sent, and of what is received or summed beside them."""
        found = 0
        for bucket in unit.trained:
            layout, dtypes = bucket.cuts.layout, bucket.dtypes
            wire = INTEGER if self.is_exact else dtypes.wire.itemsize
            from_sums = bucket.placements.accumulates_locally
            given = (
                (INTEGER if self.is_exact else dtypes.grads.itemsize)
                if from_sums
                else bucket.arriving(self.model.config).itemsize
            )
            if not bucket.placements.reductions[self.last]:
                continue
            found += layout.bucket_numel * wire if wire != given else 0
            own = -(-layout.bucket_numel // self.model.place.inner_size)
            if self.model.place.inner_size == 1:
                continue
            if self.model.transport == "shm":
                accum = INTEGER if self.is_exact else dtypes.accum.itemsize
                found += own * accum if accum != wire else 0
            elif self.model.transport == "gloo" or dtypes.wire != dtypes.accum:
                found += layout.bucket_numel * wire
        return found

    @property
    def live(self) -> dict[str, int]:
        return {
            "kept": self.kept,
            "gathered_weights": self.standing + sum(self.weights.values()),
            "gradient_buckets": sum(map(sum, self.buckets.values()))
            + sum(self.beside.values())
            + sum(self.spare)
            + self.waiting,
            "gradient_sums": sum(self.sums[name] for name in self.summed),
        }

    def note(self, moment: str, activations: int, more: int = 0) -> None:
        live = self.live
        total = sum(live.values()) + activations + more
        if total > self.peak.total:
            self.peak = Peak(total, moment, {**live, "activations": activations, "update": more})

    # -- weights -------------------------------------------------------------------------------------------------------

    def _begin_sweep(self, order: Sequence[Unit]) -> None:
        self.sweep = [unit for unit in order if unit.name not in self.weights]

    def _unshard(self, unit: Unit) -> None:
        if not unit.is_gathered:
            return
        self._gather(unit)
        self.on_way.discard(unit.name)
        while self.sweep and len(self.on_way) < self.prefetch:
            self.on_way.add(self.sweep[0].name)
            self._gather(self.sweep[0])

    def _gather(self, unit: Unit) -> None:
        if unit in self.sweep:
            self.sweep.remove(unit)
        found = sum(bucket.whole_bytes * bucket.copies for bucket in unit.buckets if bucket.is_gathered)
        self.weights[unit.name] = 0 if self.fixed and not unit.is_root else found

    def _unshard_next(self) -> None:
        """The unit whose backward is next, on its way or to be gathered."""
        following = [unit for unit in self.order[::-1] if unit.name in self.on_way] or self.sweep
        if following:
            self._unshard(following[0])

    def _reshard(self, unit: Unit) -> None:
        if not unit.is_root:
            self.weights.pop(unit.name, None)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        while len(self.in_flight) >= MAX_UNITS:
            self._land()

    def _land(self) -> None:
        unit = self.in_flight.popleft()
        self.summed.add(unit.name)
        self.beside.pop(unit.name, None)
        self.spare = [*(self.spare if self.fixed else []), *self.buckets.pop(unit.name, [])]

    def _prepare(self, unit: Unit) -> None:
        if unit.name in self.buckets or not self._written(unit):
            return
        self._make_room()
        self.buckets[unit.name] = [self._taken(num_bytes) for num_bytes in self._written(unit)]

    def _taken(self, num_bytes: int) -> int:
        """Bytes of the bucket that so many are written into: a spare one where that fits; see `BucketMemory.take`."""
        for place, spare in enumerate(self.spare):
            if spare == num_bytes or (self.fixed and spare > num_bytes):
                return self.spare.pop(place)
        del self.spare[:1]
        return num_bytes

    def _issue(self, unit: Unit) -> None:
        if self._written(unit) or self._copies(unit):
            self._make_room()
        self.in_flight.append(unit)
        self.beside[unit.name] = self._copies(unit)

    # -- a step --------------------------------------------------------------------------------------------------------

    def microbatch(self, marks: Sequence[Mark], *, last: bool) -> None:
        self.last = last
        self._begin_sweep(self.order)
        for mark in marks:
            unit = self.units[mark.unit] if mark.unit >= 0 else None
            if unit is not None:
                self._come_to(mark, unit)
            elif mark.what == "loss":
                self._begin_sweep(self.order[::-1])
            moment = f"{SHOWN[mark.what]} {unit.name}" if unit is not None and mark.what in SHOWN else mark.what
            self.note(moment, mark.most)
        self.weights.clear()
        for unit in (each for each in self.units if each.is_root and each.trained):
            self._issue(unit)

    def _come_to(self, mark: Mark, unit: Unit) -> None:
        if mark.what == "forward":
            self._unshard(unit)
        elif mark.what == "left" and unit is not (self.order[-1] if self.order else None):
            self._reshard(unit)
        elif mark.what == "backward":
            self._unshard(unit)
        elif mark.what == "gradient":
            self._prepare(unit)
            self.waiting += mark.given if self.is_queued and not unit.is_root else 0
        elif mark.what == "done":
            self.note(f"backward of {unit.name}", mark.live)
            self.waiting = 0
            self._reshard(unit)
            if not unit.is_root and any(bucket.placements.reductions[self.last] for bucket in unit.trained):
                self._issue(unit)
            self._unshard_next()

    def update(self) -> None:
        """The reductions land; gradients in another dtype than the main weights are cast for the optimizer."""
        self.note("reduction", 0)
        while self.in_flight:
            self._land()
        self.note("reduction", 0)
        self.spare = self.spare if self.fixed else []
        casts = 0
        for unit in self.units:
            for bucket in unit.trained:
                if bucket.dtypes.grads != bucket.dtypes.main:
                    casts += bucket.cuts.layout.shard_numel * bucket.dtypes.main.itemsize
        self.note("update", 0, casts)


def peak(model: Model, marks: Sequence[Mark], kept: int) -> Peak:
    step = Step(model, kept)
    k = min(microbatches_per_rank(model.config), 3)
    for _ in range(2 if step.fixed else 1):  # a step begins with the fixed buffers of the one before
        step.peak = Peak()
        for number in range(k):
            step.microbatch(marks, last=number == k - 1)
        step.update()
        step.summed.clear()
    return step.peak
