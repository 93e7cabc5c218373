"""State by name: full tensors for whoever looks, this rank's own flat tensors for resuming on the same layout."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.update.optimizer import ShardedOptimizer
from harness.fsdp.update.stretches import FlatStretch

OPTIMIZER = "optimizer/"
NOTHING = "nothing"
"""In place of the entries of a stretch that no step has updated yet."""
STEP_DTYPE = torch.float64
"""Plain numbers of an optimizer's state (torch keeps `step` as a tensor or a number) are saved as this."""


def full_weights(buckets: Sequence[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """Main weights of every parameter, whole, on the CPU, one bucket in memory at a time. *Collective.*"""
    return _full(buckets, lambda bucket: bucket.main_shards, "weights")


def full_gradients(buckets: Sequence[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """Main gradients of every trained parameter, whole, on the CPU, after they were reduced. *Collective.*"""
    return _full([bucket for bucket in buckets if bucket.trainable], lambda bucket: bucket.grad_shards, "gradients")


def local_gradients(buckets: Sequence[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """Every trained parameter's main gradient, flat, of the rows that this rank keeps; empty where it has none."""
    for bucket in buckets:
        for slot in bucket.layout.slots:
            local = bucket.layout.local_slice(slot, bucket.cuts.layout_rank)
            memory = bucket.grad_shards[slot.segment].detach()
            yield slot.spec.name, memory[local.offset : local.offset + local.numel] if local.numel else memory[:0]


def _full(
    buckets: Sequence[Bucket], shards_of: Callable[[Bucket], list[Tensor]], what: str
) -> Iterator[tuple[str, Tensor]]:
    for bucket in buckets:
        tensor = bucket.context.tensor
        group = None if tensor is None else tensor.group
        slices = bucket.named_slices(bucket.gather_whole(shards_of(bucket), what))
        for slot, (name, view) in zip(bucket.layout.slots, slices, strict=True):
            yield name, bucket.portion_of(slot).join(view.detach(), group).to("cpu", copy=True)


def local_state(buckets: Sequence[Bucket], optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """This rank's main weights and optimizer state as flat tensors; keys name bucket, segment and range.

    A stretch that no step has updated yet has an empty tensor where others have state.
    """
    state = {
        f"weights/{bucket.name}:{index}": shard.detach()
        for bucket in buckets
        for index, shard in enumerate(bucket.main_shards)
    }
    moments = {
        f"optimizer/{name}/": {key: value for key, value in values.items() if value is not None}
        for name, values, _ in optimizer.named_state()
    }
    for stretch, values in moments.items():
        for key, value in values.items():
            state[stretch + key] = value if isinstance(value, Tensor) else torch.tensor(value, dtype=STEP_DTYPE)
        if not values and any(moments.values()):
            state[stretch + NOTHING] = torch.empty(0)
    return state


def load_local_state(buckets: Sequence[Bucket], optimizer: ShardedOptimizer, state: Mapping[str, Tensor]) -> None:
    """Put back what `local_state` gave on the same layout, wherever stretches were cut then and are now.

    Compute weights are the caller's to refresh.

    Raises:
        ValueError: a key is missing, unexpected, or of another shape or dtype; nothing was loaded.
    """
    weights = {
        f"weights/{bucket.name}:{index}": shard for bucket in buckets for index, shard in enumerate(bucket.main_shards)
    }
    saved = saved_stretches(state)
    problems = [f"missing {key}" for key in weights if key not in state]
    problems += [f"unexpected {key}" for key in state if key not in weights and not key.startswith(OPTIMIZER)]
    for key, shard in weights.items():
        problems += _mismatch(key, state[key], shard.numel(), shard.dtype) if key in state else []
    problems += check_stretches(saved, optimizer)
    if problems:
        raise ValueError("state does not fit this layout, nothing was loaded: " + "; ".join(problems[:8]))
    for key, shard in weights.items():
        shard.copy_(state[key])
    load_stretches(saved, optimizer)


# -- stretches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedStretch:
    """What was saved of one stretch. where: its bucket and segment. begin, end: its place in the segment's shard."""

    name: str
    where: str
    begin: int
    end: int
    values: dict[str, Tensor]

    def part(self, flat: FlatStretch, numbers_on: torch.device) -> dict[str, Tensor]:
        """Copies of what belongs to a stretch inside this one, where it belongs; plain numbers on a device."""
        begin, end = flat.stretch.start - self.begin, flat.stretch.end - self.begin
        return {
            key: value[begin:end].to(flat.weight.device, copy=True) if value.dim() else value.to(numbers_on, copy=True)
            for key, value in self.values.items()
            if key != NOTHING
        }


def saved_stretches(state: Mapping[str, Tensor]) -> list[SavedStretch]:
    """The stretches of a saved state, and those of its keys that name none, with no place."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        if key.startswith(OPTIMIZER):
            name, entry = key.removeprefix(OPTIMIZER).rsplit("/", 1)
            by_name.setdefault(name, {})[entry] = value
    return [_saved_stretch(name, values) for name, values in by_name.items()]


def _saved_stretch(name: str, values: dict[str, Tensor]) -> SavedStretch:
    found = re.fullmatch(r"(.*:\d+):(\d+)-(\d+)", name)
    return SavedStretch(name, *(found[1], int(found[2]), int(found[3])) if found else (name, 0, 0), values)


def _where(flat: FlatStretch) -> str:
    return f"{flat.bucket.name}:{flat.stretch.segment}"


def overlapping(
    saved: Iterable[SavedStretch], stretches: Iterable[FlatStretch]
) -> Iterator[tuple[SavedStretch, FlatStretch]]:
    """What was saved, with each stretch that has elements in common with it; in the order of `saved`.

    stretches: none overlaps another. There may be thousands, so not every pair is looked at.
    """
    by_place: defaultdict[str, list[FlatStretch]] = defaultdict(list)
    for flat in stretches:
        by_place[_where(flat)].append(flat)
    in_order = {where: sorted(found, key=lambda flat: flat.stretch.start) for where, found in by_place.items()}
    starts = {where: [flat.stretch.start for flat in found] for where, found in in_order.items()}
    ends = {where: [flat.stretch.end for flat in found] for where, found in in_order.items()}
    for each in saved:
        if each.where in in_order:
            first, last = bisect_right(ends[each.where], each.begin), bisect_left(starts[each.where], each.end)
            for flat in in_order[each.where][first:last]:
                yield each, flat


def check_stretches(saved: Sequence[SavedStretch], optimizer: ShardedOptimizer) -> list[str]:
    """What of saved stretches does not fit the optimizer's."""
    problems: list[str] = []
    complete = {key for each in saved for key in each.values if key != NOTHING}
    if saved:
        complete |= {key for _, values, _ in optimizer.named_state() for key in values}
    fits: defaultdict[int, list[FlatStretch]] = defaultdict(list)
    held: Counter[FlatStretch] = Counter()
    for each, flat in overlapping(saved, optimizer.stretches):
        fits[id(each)].append(flat)
        held[flat] += min(each.end, flat.stretch.end) - max(each.begin, flat.stretch.start)
    for each in saved:
        fitting = fits[id(each)]
        problems += [] if fitting else [f"unexpected {OPTIMIZER}{each.name}"]
        if NOTHING not in each.values:
            problems += [f"missing {OPTIMIZER}{each.name}/{key}" for key in complete - each.values.keys()]
        for key, value in each.values.items():
            if value.dim() and key != NOTHING and fitting:
                problems += _mismatch(
                    f"{OPTIMIZER}{each.name}/{key}", value, each.end - each.begin, fitting[0].weight.dtype
                )
    for flat in optimizer.stretches if saved else ():
        problems += [] if held[flat] == flat.stretch.end - flat.stretch.start else [f"missing {OPTIMIZER}{flat.name}"]
    return problems


def load_stretches(saved: Sequence[SavedStretch], optimizer: ShardedOptimizer) -> None:
    """Cut the optimizer's stretches where saved ones begin and end, and put back what was saved of each."""
    covering: defaultdict[FlatStretch, list[SavedStretch]] = defaultdict(list)
    for each, flat in overlapping(saved, optimizer.stretches):
        covering[flat].append(each)
    for flat in list(optimizer.stretches):
        pieces = optimizer.split_at(flat, {place for each in covering[flat] for place in (each.begin, each.end)})
        around = {piece: each for each, piece in overlapping(reversed(covering[flat]), pieces)}
        for piece in pieces:
            within = around.get(piece)
            numbers_on = where_numbers_lie(optimizer.group_of(piece), piece.weight)
            optimizer.put_state(piece, {} if within is None else within.part(piece, numbers_on))


def where_numbers_lie(group: Mapping[str, Any], weight: Tensor) -> torch.device:
    """Where torch's optimizers look for plain numbers of a weight's state, such as `step`: with the weight where a
    kernel reads them, else with the host, which then need not wait for a device."""
    return weight.device if group.get("fused") or group.get("capturable") else torch.device("cpu")


def _mismatch(key: str, value: Tensor, numel: int, dtype: torch.dtype) -> list[str]:
    if value.shape != (numel,):
        return [f"{key} has shape {tuple(value.shape)}, not {(numel,)}"]
    return [f"{key} has dtype {value.dtype}, not {dtype}"] if value.dtype != dtype else []
