"""Peak of a step: an engine's own buffers, moved as it moves them, beside the recorded activations.

`Step` walks through the marks of a record. `Ours` has the rules of `GatherPipeline` (units gathered ahead, the last one
kept for the backward), `ReducePipeline` (at most two units of unreduced gradients) and `BucketMemory` (a reduced bucket
stays as a spare one); `harness.plan.peers` has those of other engines.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from harness.config.derived import engine_options, fixed_buffers
from harness.config.schema import Device
from harness.fsdp.runtime.reduce import MAX_UNITS
from harness.fsdp.storage.memory import ALIGN_BYTES
from harness.fsdp.vocabulary import Numerics
from harness.plan.activations import Mark
from harness.plan.model import INTEGER, Bucket, Model, Unit, tensors

SHOWN = {"forward": "forward of", "left": "after the forward of", "backward": "backward of", "gradient": "backward of"}
WEIGHTS, BUCKETS, SUMS = "gathered_weights", "gradient_buckets", "gradient_sums"


@dataclass
class Peak:
    """Bytes at the peak. moment: where in a step. parts: what is alive then."""

    total: int = 0
    moment: str = ""
    parts: dict[str, int] | None = None


class Step:
    """Buffers of one step beside what is kept, by part and owner. An engine does something at marks named `on_...`."""

    def __init__(self, units: Sequence[Unit], kept: int) -> None:
        self.units, self.kept, self.last, self.peak = units, kept, True, Peak()
        self.live: dict[str, Counter[str]] = {part: Counter() for part in (WEIGHTS, BUCKETS, SUMS)}

    def take(self, part: str, owner: str, num_bytes: int) -> None:
        self.live[part][owner] = num_bytes

    def free(self, part: str, owner: str) -> None:
        self.live[part].pop(owner, None)

    def note(self, moment: str, activations: int, more: int = 0) -> None:
        """more: bytes of what is alive at this moment alone."""
        parts = {"kept": self.kept, **{part: held.total() for part, held in self.live.items()}}
        parts |= {"activations": activations, "update": more}
        total = sum(parts.values())
        if total > self.peak.total:
            self.peak = Peak(total, moment, parts)

    def run(self, marks: Sequence[Mark], k: int) -> Peak:
        """A step of k microbatches that are alike."""
        self.peak = Peak()
        for number in range(min(k, 3)):
            self.last = number == min(k, 3) - 1
            self.begin()
            for mark in marks:
                unit = self.units[mark.unit] if mark.unit >= 0 else None
                act = getattr(self, f"on_{mark.what}", None)
                if act is not None:
                    act(mark, unit)
                where = f"{SHOWN[mark.what]} {unit.name}" if unit is not None and mark.what in SHOWN else mark.what
                self.note(where, mark.most)
            self.end()
        self.update()
        self.live[SUMS].clear()
        return self.peak

    def begin(self) -> None:
        """A microbatch begins."""

    def end(self) -> None:
        """The backward of a microbatch has ended."""

    def update(self) -> None:
        """The optimizer's step."""


class Ours(Step):
    """kept: bytes between steps, as `harness.plan.model` has them. gathers: of each unit in a microbatch."""

    def __init__(self, model: Model, marks: Sequence[Mark], kept: int) -> None:
        config, self.model, self.gathers = model.config, model, Counter[str]()
        self.prefetch: int = engine_options(config)["prefetch"]
        self.is_exact, self.fixed = config.numerics.mode is Numerics.exact, fixed_buffers(config)
        self.is_queued = config.cluster.device is Device.cuda
        self.order = [unit for unit in in_order(model.units, marks) if unit.is_gathered]
        has_two = any(bucket.copies > 1 for unit in self.order[-1:] for bucket in unit.buckets)
        self.stays = None if has_two or not self.order else self.order[-1]
        # sums of microbatches that are there from the first reduction of a step to `zero_grad`, by unit
        self.sums = {unit.name: sum(map(self._sums, unit.trained)) for unit in model.units}
        super().__init__(model.units, kept - sum(self.sums.values()))
        if self.fixed:
            self.take(WEIGHTS, "buffers of units in turn", self._standing())
        self.sweep: list[Unit] = []
        self.on_way: set[str] = set()
        self.in_flight: deque[Unit] = deque()
        self.written: dict[str, list[int]] = {}
        self.spare: list[int] = []

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
        return sum(self._copies_of(bucket) for bucket in unit.trained if bucket.placements.reductions[self.last])

    def _copies_of(self, bucket: Bucket) -> int:
        dtypes, numel, size = bucket.dtypes, bucket.cuts.layout.bucket_numel, self.model.place.inner_size
        locally = bucket.placements.accumulates_locally
        written = dtypes.grads if locally else bucket.arriving(self.model.config)
        wire, given, accum = dtypes.wire.itemsize, written.itemsize, dtypes.accum.itemsize
        if self.is_exact:
            wire, given, accum = INTEGER, INTEGER if locally else given, INTEGER
        found = numel * wire if wire != given else 0
        if size == 1:
            return found
        if self.model.transport == "shm":
            return found + (-(-numel // size) * accum if accum != wire else 0)
        received = self.model.transport == "gloo" or dtypes.wire != dtypes.accum
        return found + (numel * wire if received else 0)

    # -- weights -------------------------------------------------------------------------------------------------------

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
        if unit.name in self.live[WEIGHTS]:
            return
        self.gathers[unit.name] += 1
        found = sum(bucket.whole_bytes * bucket.copies for bucket in unit.buckets if bucket.is_gathered)
        self.take(WEIGHTS, unit.name, 0 if self.fixed and not unit.is_root else found)

    def _reshard(self, unit: Unit) -> None:
        if not unit.is_root:
            self.free(WEIGHTS, unit.name)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        while len(self.in_flight) >= MAX_UNITS:
            self._land()

    def _land(self) -> None:
        unit = self.in_flight.popleft()
        self.take(SUMS, unit.name, self.sums[unit.name])
        self.free(BUCKETS, f"{unit.name} as sent")
        self.free(BUCKETS, unit.name)
        self._spare([*(self.spare if self.fixed else []), *self.written.pop(unit.name, [])])

    def _spare(self, spare: list[int]) -> None:
        self.spare = spare
        self.take(BUCKETS, "spare", sum(spare))

    def _prepare(self, unit: Unit) -> None:
        written = self._written(unit)
        if unit.name in self.written or not written:
            return
        self._make_room()
        self.written[unit.name] = [self._taken(num_bytes) for num_bytes in written]
        self.take(BUCKETS, unit.name, sum(self.written[unit.name]))
        self._spare(self.spare)

    def _taken(self, num_bytes: int) -> int:
        """Bytes of the bucket that so many are written into: a spare one where that fits; see `BucketMemory.take`."""
        for place, spare in enumerate(self.spare):
            if spare == num_bytes or (self.fixed and spare > num_bytes):
                return self.spare.pop(place)
        del self.spare[:1]
        return num_bytes

    def _issue(self, unit: Unit) -> None:
        copies = self._copies(unit)
        if self._written(unit) or copies:
            self._make_room()
        self.in_flight.append(unit)
        self.take(BUCKETS, f"{unit.name} as sent", copies)

    # -- a step --------------------------------------------------------------------------------------------------------

    def run(self, marks: Sequence[Mark], k: int) -> Peak:
        if self.fixed:  # a step begins with the buffers of the one before
            super().run(marks, k)
        return super().run(marks, k)

    def begin(self) -> None:
        self.gathers.clear()
        self.sweep = list(self.order)

    def on_forward(self, mark: Mark, unit: Unit) -> None:
        self._unshard(unit)

    def on_left(self, mark: Mark, unit: Unit) -> None:
        if unit is not self.stays:
            self._reshard(unit)

    def on_loss(self, mark: Mark, unit: None) -> None:
        self.sweep = [unit for unit in self.order[::-1] if unit.name not in self.live[WEIGHTS]]

    def on_backward(self, mark: Mark, unit: Unit) -> None:
        self._unshard(unit)

    def on_gradient(self, mark: Mark, unit: Unit) -> None:
        self._prepare(unit)
        if self.is_queued and not unit.is_root:
            self.live[BUCKETS]["waiting"] += mark.given

    def on_done(self, mark: Mark, unit: Unit) -> None:
        self.note(f"backward of {unit.name}", mark.live)
        self.free(BUCKETS, "waiting")
        self._reshard(unit)
        if not unit.is_root and any(bucket.placements.reductions[self.last] for bucket in unit.trained):
            self._issue(unit)
        following = [each for each in self.order[::-1] if each.name in self.on_way] or self.sweep
        if following:
            self._unshard(following[0])

    def end(self) -> None:
        for unit in self.order:
            self.free(WEIGHTS, unit.name)
        for unit in (each for each in self.units if each.is_root and each.trained):
            self._issue(unit)

    def update(self) -> None:
        """The reductions land; gradients in another dtype than the main weights are cast for the optimizer."""
        self.note("reduction", 0)
        while self.in_flight:
            self._land()
        self.note("reduction", 0)
        self._spare(self.spare if self.fixed else [])
        trained = [bucket for unit in self.units for bucket in unit.trained]
        cast = [bucket for bucket in trained if bucket.dtypes.grads != bucket.dtypes.main]
        self.note("update", 0, sum(each.cuts.layout.shard_numel * each.dtypes.main.itemsize for each in cast))


def in_order(units: Sequence[Unit], marks: Sequence[Mark]) -> list[Unit]:
    """Units in the order in which they run, the root first; those that do not run come last."""
    places = {mark.unit: place for place, mark in reversed([*enumerate(marks)]) if mark.what == "forward"}
    order = sorted(range(len(units)), key=lambda number: (not units[number].is_root, places.get(number, len(marks))))
    return [units[number] for number in order]
