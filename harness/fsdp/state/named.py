"""All of a model's state by the module's own names, as tensors that know where their rows belong.

Keys are `weights/<parameter>` (main weights; of frozen parameters the compute weights) and
`optimizer/<parameter>/<entry>`. Tensors with the parameter's shape are DTensors over the engine's own memory, plain
ones where nothing cuts them. Counters such as `step` are plain tensors of shape [], one a parameter, and belong to the
caller until `adopt` takes them back. `fp8/<layer>.<buffer>` is what delayed scaling knows,
whole on every rank and in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from harness.fsdp.ragged import RaggedShard, RaggedTensor
from harness.fsdp.ragged.tensor import spec_like
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.dtensors import DTensorFactory
from harness.fsdp.storage.dtensors import fill as fill
from harness.fsdp.storage.layout import Slot
from harness.fsdp.update.blank import COUNTERS, begins_with_gradient, blank, entries_of
from harness.fsdp.update.optimizer import ShardedOptimizer
from harness.fsdp.update.stretches import FlatStretch, is_moment

COUNTER_ELSEWHERE = "a counter of which this rank has no copy"
WEIGHTS, OPTIMIZER = "weights/", "optimizer/"
COUNTER_DTYPE = torch.float32
"""Dtype of counters that an optimizer keeps as plain numbers; torch keeps its own as fp32 tensors."""


@dataclass
class ShardedState:
    """tensors: key -> the state itself, or a copy of a counter. counters: keys of copies, which `adopt` takes back."""

    tensors: dict[str, Tensor]
    counters: set[str] = field(default_factory=set)
    _optimizer: ShardedOptimizer | None = None
    taking_back: list[tuple[str, Callable[[Tensor], None]]] = field(default_factory=list)
    """Keys of copies, and what takes each."""

    def adopt(self) -> None:
        """Take the counters back. Stretches whose parameters were not updated equally often are cut."""
        for key, take in self.taking_back:
            take(self.tensors[key])
        for flat in [] if self._optimizer is None else list(self._optimizer.stretches):
            assert self._optimizer is not None
            for piece in self._optimizer.split(flat, partial(self._counts, self._counters(flat))):
                self._count_as(piece)

    def _counts(self, counters: Sequence[str], _: int, slot: Slot) -> tuple[float, ...]:
        return tuple(float(self.tensors[_key(slot, entry)]) for entry in counters)

    def _counters(self, flat: FlatStretch) -> list[str]:
        """Names of a stretch's counters that were handed out."""
        held = {} if self._optimizer is None else self._optimizer.state_of(flat)
        counters = [entry for entry, value in held.items() if value is not None and not is_moment(value, flat.weight)]
        return [entry for entry in counters if all(_key(slot, entry) in self.tensors for _, slot, _ in flat.members)]

    def _count_as(self, piece: FlatStretch) -> None:
        if self._optimizer is None or not piece.members:
            return
        _, slot, _ = piece.members[0]
        held = self._optimizer.state_of(piece)
        for entry in self._counters(piece):
            value = self.tensors[_key(slot, entry)]
            if isinstance(held[entry], Tensor):
                held[entry].copy_(value)
            else:
                held[entry] = type(held[entry])(value.item())


def is_counter_elsewhere(value: Tensor) -> bool:
    """Stands for a counter of a parameter that has no row on this rank."""
    return isinstance(value, RaggedTensor) and value.cut.name == COUNTER_ELSEWHERE


def _key(slot: Slot, entry: str) -> str:
    return f"{OPTIMIZER}{slot.spec.name}/{entry}"


class ShardMap(DTensorFactory):
    """All of a model's state as DTensors."""

    def state(self, buckets: Sequence[Bucket], optimizer: ShardedOptimizer | None) -> ShardedState:
        """Everything, by key.

        Raises:
            NotImplementedError: ranks hold different experts under one name.
        """
        found = ShardedState(
            {WEIGHTS + name: shard for name, shard in self.weights(buckets).items()}, _optimizer=optimizer
        )
        if optimizer is not None:
            self._add_optimizer(found, buckets, optimizer)
        return found

    def _add_optimizer(self, found: ShardedState, buckets: Sequence[Bucket], optimizer: ShardedOptimizer) -> None:
        stretches: dict[int, list[FlatStretch]] = {}
        for flat in optimizer.stretches:
            stretches.setdefault(id(flat.bucket), []).append(flat)
        entries = _entries(optimizer)
        _complete(optimizer, entries)
        for bucket in (each for each in buckets if each.trainable):
            held = stretches.get(id(bucket), [])
            for slot in bucket.layout.slots:
                stretch = _stretch_of(bucket, slot, held)
                state = {} if stretch is None else optimizer.state_of(stretch)
                self._add_entries(found, bucket, slot, stretch, state, entries)

    def _add_entries(
        self,
        found: ShardedState,
        bucket: Bucket,
        slot: Slot,
        flat: FlatStretch | None,
        state: Mapping[str, Any],
        entries: Mapping[str, torch.dtype | None],
    ) -> None:
        if flat is None:  # no row of it lies here: the key is there all the same, for collective reads
            for entry, dtype in entries.items():
                found.tensors[_key(slot, entry)] = self._nothing(bucket, slot, dtype)
                found.counters |= {_key(slot, entry)} if dtype is None else set()
            return
        for entry, value in state.items():
            if is_moment(value, flat.weight):
                found.tensors[_key(slot, entry)] = self._shard(bucket, slot, value, flat.stretch.start)
            elif value is not None:
                found.tensors[_key(slot, entry)] = _counter(value)
                found.counters.add(_key(slot, entry))

    def _nothing(self, bucket: Bucket, slot: Slot, dtype: torch.dtype | None) -> Tensor:
        """No row of a moment, or (None) no copy of a counter: nothing to save here, and nothing to load."""
        if dtype is not None:
            return self._shard(bucket, slot, torch.empty(0, dtype=dtype, device=bucket.context.main_device), 0)
        mesh = self._mesh(bucket)
        elsewhere = RaggedShard(lambda: [(0, 0)] * mesh.size(mesh.ndim - 1), COUNTER_ELSEWHERE)
        spec = spec_like(
            torch.empty((), dtype=COUNTER_DTYPE, device="meta"), mesh, (*[Replicate()] * (mesh.ndim - 1), elsewhere)
        )
        return RaggedTensor.of(torch.empty(0, dtype=COUNTER_DTYPE), spec)


class StateMismatch(ValueError, RuntimeError):
    """A state does not fit the model: names are missing or unexpected, or shapes differ. Nothing was loaded. It is a
    RuntimeError, as torch raises, and a ValueError."""


def check_fit(pairs: Sequence[tuple[str, Tensor, Tensor]], missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Raise StateMismatch where a name is missing or unexpected, or of name, own tensor and given one shapes differ."""
    problems = [
        f"{n} is {list(given.shape)}, the model's {list(o.shape)}" for n, o, given in pairs if given.shape != o.shape
    ]
    problems += [f"missing {name}" for name in missing] + [f"unexpected {name}" for name in unexpected]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise StateMismatch(f"state does not fit the model, nothing was loaded: {'; '.join(problems[:8])}{more}")


def _entries(optimizer: ShardedOptimizer) -> dict[str, torch.dtype | None]:
    """What the optimizer keeps of every parameter: dtype of moments, None of counters. The same on all ranks, also
    where a rank has no stretch to look at."""
    found: dict[str, torch.dtype | None] = {}
    for flat in optimizer.stretches:
        for entry, value in optimizer.state_of(flat).items():
            if value is not None:
                found[entry] = value.dtype if is_moment(value, flat.weight) else None
    if not optimizer.stretches or (optimizer.has_updated and not found):  # nothing to look at: what torch's own keep
        for each in optimizer.groups.optimizers:
            for group in each.param_groups:
                found |= {entry: None if entry in COUNTERS else COUNTER_DTYPE for entry in entries_of(each, group)}
    return found


def _complete(optimizer: ShardedOptimizer, entries: Mapping[str, torch.dtype | None]) -> None:
    """Give blank state to stretches that no step has updated yet, where others have some: ranks hand out equal keys.

    Raises:
        NotImplementedError: nothing is known of what the optimizer begins with.
    """
    for flat in optimizer.stretches:
        if optimizer.state_of(flat) or not entries:
            continue
        stepped_by, group = optimizer.stepped_by(flat), optimizer.group_of(flat)
        known = entries_of(stepped_by, group)
        if not known or begins_with_gradient(group):
            raise NotImplementedError(
                f"{flat.members[0][1].spec.name if flat.members else flat.name} has never been updated, and what"
                f" {type(stepped_by).__name__} keeps of it before that is not known: save after a step that"
                " uses it, or take local_state(), which resumes on the same layout"
            )
        optimizer.put_state(flat, {e: blank(e, group, flat.weight, entries.get(e)) for e in known})


def _stretch_of(bucket: Bucket, slot: Slot, stretches: Sequence[FlatStretch]) -> FlatStretch | None:
    """The stretch that updates this rank's rows of a parameter."""
    local = bucket.layout.local_slice(slot, bucket.cuts.layout_rank)
    if not local.numel:
        return None
    fitting = (
        flat
        for flat in stretches
        if flat.stretch.segment == local.segment and flat.stretch.start <= local.offset < flat.stretch.end
    )
    return next(fitting, None)


def _counter(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return torch.tensor(float(value), dtype=COUNTER_DTYPE)
