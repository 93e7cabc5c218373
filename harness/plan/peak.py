"""Peak of a step: an engine's own buffers, moved as it moves them, beside the recorded activations.

`Step` walks through the marks of a record, and gathers, drops and fetches ahead the weights of units. `Ours` has the
rest of `GatherPipeline`'s rules (the last unit is kept for the backward), those of `ReducePipeline` (at most two units
of unreduced gradients) and of `BucketMemory` (a reduced bucket stays as a spare one); `harness.plan.peers` has those of
other engines.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from harness.config.derived import engine_options, microbatches_per_rank
from harness.config.schema import Config, Device
from harness.fsdp.runtime.reduce import MAX_UNITS
from harness.fsdp.runtime.units import Unit
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.update.norms import LONG
from harness.plan.activations import Mark, Recorded
from harness.plan.model import Model, kept
from harness.plan.wire import Rows, wire

SHOWN = {"forward": "forward of", "left": "after the forward of", "backward": "backward of", "gradient": "backward of"}
WEIGHTS, BUCKETS, SUMS = "gathered_weights", "gradient_buckets", "gradient_sums"
WAITING = "waiting"
"""Gradients as autograd made them, until their unit's are copied."""


class Step:
    """Buffers of one step beside what is kept, by part and owner. An engine does something at marks named `on_...`.

    whole: bytes of weights that are gathered for a use, by unit. ahead: units fetched ahead in a forward, and in a
    backward. gathers: of each unit in a microbatch. rounds: steps until one begins as it ends.
    """

    ahead = (0, 1)
    rounds = 1
    on_host = 0
    memory: dict[str, int]
    rows: Rows

    def __init__(self, units: Sequence[Unit], marks: Sequence[Mark]) -> None:
        places = {mark.unit: place for place, mark in reversed([*enumerate(marks)]) if mark.what == "forward"}
        order = sorted(range(len(units)), key=lambda at: (not units[at].is_root, places.get(at, len(marks))))
        self.units, self.order = units, [units[at] for at in order]  # the root first; those that do not run last
        self.kept, self.last, self.in_backward = 0, True, False
        self.whole, self.gathers = dict[str, int](), Counter[str]()
        self.sweep, self.on_way = list[Unit](), list[Unit]()
        self.peak: dict[str, Any] = {}
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
        if total > self.peak["total"]:
            self.peak = {"total": total, "moment": moment, "parts": parts}

    def run(self, marks: Sequence[Mark], k: int) -> dict[str, Any]:
        """The peak of a step of k microbatches that are alike: its bytes, their parts, and the moment in the step."""
        for _ in range(self.rounds):
            self.peak = {"total": 0, "moment": "", "parts": None}
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

    def end(self) -> None:
        """The backward of a microbatch has ended."""

    def update(self) -> None:
        """The optimizer's step."""

    # -- weights -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.gathers.clear()
        self.in_backward, self.sweep = False, [unit for unit in self.order if unit.name in self.whole]

    def on_forward(self, mark: Mark, unit: Unit) -> None:
        """Have a unit's weights, and let those of the next ones of the sweep be on their way."""
        if unit.name not in self.whole:
            return
        self._gather(mark, unit)
        if unit in self.on_way:
            self.on_way.remove(unit)
        while self.sweep and len(self.on_way) < self.ahead[self.in_backward]:
            self.on_way.append(self.sweep[0])
            self._gather(mark, self.sweep[0])

    on_backward = on_forward

    def _gather(self, mark: Mark, unit: Unit) -> None:
        if unit in self.sweep:
            self.sweep.remove(unit)
        if unit.name in self.live[WEIGHTS]:
            return
        self.gathers[unit.name] += 1
        self.take(WEIGHTS, unit.name, self.whole[unit.name])
        if more := self.beside_gather(self.whole[unit.name]):
            self.note(f"gather of {unit.name}", mark.live, more)

    def beside_gather(self, size: int) -> int:
        return 0

    def on_left(self, mark: Mark, unit: Unit) -> None:
        self.drop(unit)

    def on_loss(self, mark: Mark, unit: None) -> None:
        gathered = [unit for unit in self.order[::-1] if unit.name in self.whole]
        self.in_backward, self.sweep = True, [unit for unit in gathered if unit.name not in self.live[WEIGHTS]]

    def drop(self, unit: Unit) -> None:
        if not self.stays(unit):
            self.free(WEIGHTS, unit.name)

    def stays(self, unit: Unit) -> bool:
        """True if a unit keeps its weights after its forward or, `in_backward`, its backward."""
        return unit.is_root


class Ours(Step):
    def __init__(self, config: Config, model: Model, recorded: Recorded) -> None:
        super().__init__(model.units, recorded.marks)
        self.model, self.buffers, prefetch = model, model.memory, engine_options(config)["prefetch"]
        self.ahead, self.rounds = (prefetch, prefetch), 1 + model.memory.fixed
        self.is_queued = config.cluster.device is Device.cuda
        gathered = [unit for unit in self.order if any(not bucket.is_resident for bucket in unit.buckets)]
        self.whole = {unit.name: 0 if unit.shares_buffers else _whole(unit) for unit in gathered}
        self.for_backward = gathered[-1:]
        shares = model.transport == "shm" and model.place.inner_size > 1
        self.staged = {unit.name: _staged(unit, model.place.inner_size) * shares for unit in gathered}
        # sums of microbatches that are there from the first reduction of a step to `zero_grad`, by unit
        of_units = {unit.name: unit.gradients for unit in model.units}
        self.sums = {name: sum(each.sums.nbytes for each in own if each.is_reduced) for name, own in of_units.items()}
        self.memory, self.on_host = kept(model)
        self.kept = sum(self.memory.values()) - self.on_host - sum(self.sums.values())
        self.standing = self.buffers.live_bytes  # under double_buffer, of weights of units in turn
        self.take(WEIGHTS, "buffers of units in turn", self.standing)
        self.in_flight: deque[Unit] = deque()
        self.written: dict[str, list[Tensor]] = {}

    def _copies(self, bucket: ParamGroup) -> int:
        """Bytes of gradients as they are sent, and of what is received or summed beside them."""
        gradients, dtypes, numel = bucket.gradients, bucket.inner.dtypes, bucket.layout.bucket_numel
        assert gradients is not None
        given = (gradients.arriving if gradients.is_reduced else gradients.sums.dtype).itemsize
        wire, accum, size = dtypes.wire.itemsize, dtypes.accum.itemsize, self.model.place.inner_size
        found = numel * wire if wire != given else 0
        if size == 1:
            return found
        if self.model.transport == "shm":
            return found + (-(-numel // size) * accum if accum != wire else 0)
        received = self.model.transport == "gloo" or dtypes.wire != dtypes.accum
        return found + (numel * wire if received else 0)

    def note(self, moment: str, activations: int, more: int = 0) -> None:
        self.take(BUCKETS, "written and spare", self.buffers.live_bytes - self.standing)
        super().note(moment, activations, more)

    def stays(self, unit: Unit) -> bool:
        return unit.is_root or (not self.in_backward and unit in self.for_backward)

    def on_forward(self, mark: Mark, unit: Unit) -> None:
        for each in self.units:
            if each not in self.on_way:
                self.free(WEIGHTS, f"{each.name} as sent")
        super().on_forward(mark, unit)

    on_backward = on_forward

    def _gather(self, mark: Mark, unit: Unit) -> None:
        if unit.name not in self.live[WEIGHTS]:
            self.take(WEIGHTS, f"{unit.name} as sent", self.staged[unit.name])
        super()._gather(mark, unit)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def on_gradient(self, mark: Mark, unit: Unit) -> None:
        written = [each for each in unit.gradients if not each.is_in_place]
        if written and unit.name not in self.written:
            self._make_room()
            self.written[unit.name] = [self.buffers.take(each.layout.bucket_numel, each.arriving) for each in written]
        if self.is_queued and not unit.is_root:
            self.live[BUCKETS][WAITING] += mark.given

    def _make_room(self) -> None:
        while len(self.in_flight) >= MAX_UNITS:
            self._land()

    def _land(self) -> None:
        unit = self.in_flight.popleft()
        self.take(SUMS, unit.name, self.sums[unit.name])
        self.free(BUCKETS, f"{unit.name} as sent")
        for bucket in self.written.pop(unit.name, []):
            self.buffers.give_back(bucket)

    def _issue(self, unit: Unit) -> None:
        copies = sum(self._copies(each) for each in unit.trainable if each.placements.reductions[self.last])
        if copies or not all(each.is_in_place for each in unit.gradients):
            self._make_room()
        self.in_flight.append(unit)
        self.take(BUCKETS, f"{unit.name} as sent", copies)

    def on_done(self, mark: Mark, unit: Unit) -> None:
        self.note(f"backward of {unit.name}", mark.live)
        self.free(BUCKETS, WAITING)
        self.drop(unit)
        if not unit.is_root and any(bucket.placements.reductions[self.last] for bucket in unit.trainable):
            self._issue(unit)
        for following in [*self.on_way, *self.sweep][:1]:
            self.on_backward(mark, following)

    def end(self) -> None:
        for name in self.whole:
            self.free(WEIGHTS, name)
            self.free(WEIGHTS, f"{name} as sent")
        for unit in (each for each in self.units if each.is_root and each.trainable):
            self._issue(unit)

    def update(self) -> None:
        """The reductions land; gradients in another dtype than the main weights are cast for the optimizer."""
        self.note("reduction", 0)
        while self.in_flight:
            self._land()
        self.note("reduction", 0)
        self.buffers.release_spare()
        if not self.is_queued:  # torch makes a short shard double before it adds its squares
            shards = [shard.numel() for bucket in self.model.trained for shard in bucket.grad_shards]
            self.note("norm", 0, max([8 * numel for numel in shards if numel < LONG], default=0))
        cast = [bucket for bucket in self.model.trained if bucket.dtypes.grads != bucket.dtypes.main]
        self.note("update", 0, sum(each.layout.shard_numel * each.dtypes.main.itemsize for each in cast))
        self.rows = wire(self.model, microbatches_per_rank(self.model.config), self.gathers)


def _whole(unit: Unit) -> int:
    """Bytes of weights that are unsharded for a use."""
    return sum(bucket.compute.nbytes for bucket in unit.buckets if not bucket.is_resident)


def _staged(unit: Unit, size: int) -> int:
    """Bytes of this rank's part of a gather in shared memory, where peers cannot read main weights as they are."""
    cast = [b for b in unit.buckets if not b.is_resident and (b.codec or b.dtypes.main != b.dtypes.compute)]
    return sum(bucket.compute.nbytes for bucket in cast if bucket.kept is None) // size
