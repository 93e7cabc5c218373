"""All of a model's state by the module's own names, as tensors that know where their rows belong.

Keys are `weights/<parameter>` (main weights; of frozen parameters the compute weights) and
`optimizer/<parameter>/<entry>`. Tensors with the parameter's shape are `RowShard`s over the engine's own memory;
counters such as `step`, of which a flat stretch has one for all its parameters, are plain tensors of shape [], one a
parameter, and belong to the caller until `adopt` takes them back. `fp8/<layer>.<buffer>` is what delayed scaling knows,
whole on every rank and in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.mesh import Mesh
from harness.fsdp.state.row_shard import Rows, RowShard
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.bucket_context import BucketContext
from harness.fsdp.storage.layout import LocalSlice, Slot
from harness.fsdp.storage.placement import REPLICATE, SHARD, On
from harness.fsdp.tensor_parallel.portion import Portion
from harness.fsdp.update.blank import COUNTERS, begins_with_gradient, blank, entries_of
from harness.fsdp.update.optimizer import ShardedOptimizer
from harness.fsdp.update.stretches import FlatStretch, is_moment

WEIGHTS, OPTIMIZER = "weights/", "optimizer/"
COUNTER_DTYPE = torch.float32
"""Dtype of counters that an optimizer keeps as plain numbers; torch keeps its own as fp32 tensors."""


@dataclass
class ShardedState:
    """tensors: key -> the state itself, or a copy of a counter. `adopt` is called when counters were written to."""

    tensors: dict[str, Tensor]
    _optimizer: ShardedOptimizer | None = None

    def adopt(self) -> None:
        """Take the counters back. Stretches whose parameters were not updated equally often are cut."""
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


def _key(slot: Slot, entry: str) -> str:
    return f"{OPTIMIZER}{slot.spec.name}/{entry}"


class ShardMap:
    """Makes `RowShard`s of one model's buckets; a DeviceMesh is made once for each grid of ranks.

    *Collective* where there is a tensor-parallel axis: its ranks tell each other of their grids.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._meshes: dict[int, DeviceMesh] = {}
        self._rows: WeakKeyDictionary[Bucket, _RowsOf] = WeakKeyDictionary()
        for context in (bucket.context for bucket in buckets if bucket.context.tensor is not None):
            self._mesh(context)

    def state(self, buckets: Sequence[Bucket], optimizer: ShardedOptimizer | None) -> ShardedState:
        """Everything, by key.

        Raises:
            NotImplementedError: ranks hold different experts under one name.
        """
        found = ShardedState({WEIGHTS + name: shard for name, shard in self.weights(buckets).items()}, optimizer)
        if optimizer is not None:
            self._add_optimizer(found, buckets, optimizer)
        return found

    def weights(self, buckets: Sequence[Bucket]) -> dict[str, RowShard]:
        """Main weights by parameter name.

        Raises:
            NotImplementedError: ranks hold different experts under one name.
        """
        refuse_split_experts(buckets)
        return {
            slot.spec.name: self._shard(bucket, slot, bucket.main_shards[slot.segment], 0)
            for bucket in buckets
            for slot in bucket.layout.slots
        }

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
            return
        for entry, value in state.items():
            if is_moment(value, flat.weight):
                found.tensors[_key(slot, entry)] = self._shard(bucket, slot, value, flat.stretch.start)
            elif value is not None:
                found.tensors[_key(slot, entry)] = _counter(value)

    def _nothing(self, bucket: Bucket, slot: Slot, dtype: torch.dtype | None) -> RowShard:
        """No row of a moment, or (None) no copy of a counter: nothing to save here, and nothing to load."""
        if dtype is not None:
            return self._shard(bucket, slot, torch.empty(0, dtype=dtype, device=bucket.context.main_device), 0)
        mesh = self._mesh(bucket.context)
        nothing = torch.empty(0, dtype=COUNTER_DTYPE)
        return RowShard.of(nothing, Portion(()), Rows((0, 0), 0, lambda: [(0, 0)]), None, mesh, [REPLICATE] * mesh.ndim)

    def _shard(self, bucket: Bucket, slot: Slot, memory: Tensor, begins_at: int) -> RowShard:
        """A parameter's rows in `memory`, which begins that many elements into the rank's shard of the segment."""
        layout, cuts, mesh = bucket.layout, bucket.cuts, bucket.context.mesh
        portion, tensor = bucket.portion_of(slot), bucket.context.tensor
        local = layout.local_slice(slot, cuts.layout_rank)
        flat = memory.detach()[local.offset - begins_at :][: local.numel] if local.numel else memory.detach()[:0]
        shape = torch.Size(slot.spec.shape)
        sharers = self._rows_of(bucket)
        rows = sharers.of(slot)
        begin, end = rows.here
        view = flat.view((end - begin, *shape[1:])) if shape else flat.view(() if local.numel else 0)
        lies = (cuts.own.outer, cuts.own.inner) if mesh.outer is not None else (cuts.own.inner,)
        tensor_group = None if tensor is None else tensor.group
        return RowShard.of(view, portion, rows, sharers.group, self._mesh(bucket.context), lies, tensor_group)

    def _rows_of(self, bucket: Bucket) -> _RowsOf:
        if bucket not in self._rows:
            self._rows[bucket] = _RowsOf(bucket)
        return self._rows[bucket]

    def _mesh(self, context: BucketContext) -> DeviceMesh:
        if id(context.mesh) not in self._meshes:
            self._meshes[id(context.mesh)] = _device_mesh(context.mesh, context.tensor)
        return self._meshes[id(context.mesh)]


def refuse_split_experts(buckets: Sequence[Bucket]) -> None:
    """Raise NotImplementedError where one name stands for other experts on other ranks: no key tells them apart."""
    split = [
        bucket.name
        for bucket in buckets
        if bucket.key.expert and bucket.context.mesh.everyone.size < dist.get_world_size()
    ]
    if split:
        raise NotImplementedError(
            f"{', '.join(split[:3])}: each rank of an expert-parallel group holds experts of its own under one name, so"
            " the model's names do not say which is which; ShardedModel.local_state() resumes on the same layout"
        )


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


def _rows(slot: Slot, local: LocalSlice) -> tuple[int, int]:
    return local.start // slot.spec.row_numel, local.end // slot.spec.row_numel


class _RowsOf:
    """Which ranks have which rows of a bucket's parameters; a parameter's weight and moments share what is found.

    group: ranks whose rows make up a parameter; None: this one has all of them.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.group, self._positions = _sharers(bucket)
        self._place = 0 if self.group is None else dist.get_rank(self.group)
        self._layout = bucket.layout
        self._here = bucket.cuts.layout_rank
        self._found: dict[str, Rows] = {}

    def of(self, slot: Slot) -> Rows:
        """Rows of a parameter."""
        name = slot.spec.name
        if name not in self._found:
            here = _rows(slot, self._layout.local_slice(slot, self._here))
            self._found[name] = Rows(here, self._place, lambda: self._everyones(slot))
        return self._found[name]

    def _everyones(self, slot: Slot) -> list[tuple[int, int]]:
        return [_rows(slot, self._layout.local_slice(slot, position)) for position in self._positions]


def _sharers(bucket: Bucket) -> tuple[dist.ProcessGroup | None, list[int]]:
    """Ranks whose rows make up a tensor of the bucket, and the place of each in its layout."""
    cuts, mesh = bucket.cuts, bucket.context.mesh
    inner, outer = range(cuts.place.inner_size), range(cuts.place.outer_size)
    width = cuts.layout.outer
    own = cuts.own
    if own == On(SHARD, SHARD):
        ranks = dist.get_process_group_ranks(mesh.everyone.group)
        grid = _grid(mesh)
        where = {rank: i * width + o for o, row in enumerate(grid) for i, rank in enumerate(row)}
        return mesh.everyone.group, [where[rank] for rank in ranks]
    if own.inner is SHARD and cuts.place.inner_size > 1:
        return mesh.inner.group, [i * width for i in inner]
    if own.outer is SHARD and mesh.outer is not None:
        return mesh.outer.group, list(outer)
    return None, [cuts.layout_rank]


def _grid(mesh: Mesh) -> list[list[int]]:
    """Global ranks, outer by inner: those of an inner group are contiguous in `everyone`, which is outer-major."""
    ranks = dist.get_process_group_ranks(mesh.everyone.group)
    size = mesh.inner.size
    grid = [ranks[begin : begin + size] for begin in range(0, len(ranks), size)]
    column = [row[mesh.place.inner_rank] for row in grid]
    outer = [dist.get_rank()] if mesh.outer is None else dist.get_process_group_ranks(mesh.outer.group)
    if grid[mesh.place.outer_rank] != dist.get_process_group_ranks(mesh.inner.group) or column != outer:
        raise NotImplementedError(
            f"ranks {ranks} are not in outer-major order: state by name is handed out for grids whose inner groups are"
            " neighbours in hybrid_fsdp_group"
        )
    return grid


def _device_mesh(mesh: Mesh, tensor: Communicator | None) -> DeviceMesh:
    """The ranks that keep a tensor: outer, inner and tensor-parallel axis, those that there are. *Collective* over the
    last one."""
    kind = mesh.inner.runtime.device.type
    axes = {"outer": mesh.outer, "inner": mesh.inner, "tensor": tensor}
    groups = {name: comm.group for name, comm in axes.items() if comm is not None}
    if list(groups) == ["inner"]:
        return DeviceMesh.from_group(mesh.inner.group, kind)
    grid = torch.tensor(_grid(mesh) if mesh.outer is not None else dist.get_process_group_ranks(mesh.inner.group))
    if tensor is not None:
        grid = grid.to(tensor.runtime.device)
        grids = [torch.empty_like(grid) for _ in range(tensor.size)]
        dist.all_gather(grids, grid, group=tensor.group)
        grid = torch.stack(grids, dim=-1).cpu()
    return DeviceMesh.from_group(list(groups.values()), kind, mesh=grid, mesh_dim_names=tuple(groups))
