"""DTensors over the memory of buckets: rows of a parameter in a rank's shard, with mesh and placements."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from harness.fsdp.comm.mesh import all_values
from harness.fsdp.ragged import RaggedShard, RaggedTensor
from harness.fsdp.ragged.operations import CHECK_AND_UNSCALE, check_and_unscale
from harness.fsdp.ragged.tensor import plain_of, spec_like
from harness.fsdp.storage.cuts import Cuts
from harness.fsdp.storage.layout import LocalSlice, Slot
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.placement import SHARD, On
from harness.private_torch import schema_of


class PortionGradient(DTensor):
    """Gradient of a TP shard that no data-parallel axis cuts: torch's rule for GradScaler asks the first alone."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override] # a C function in torch
        if func.name() == CHECK_AND_UNSCALE:
            return check_and_unscale(func, args, kwargs or {})
        args_, kwargs_ = plain_of(cls, args, kwargs)
        found = func(*args_, **kwargs_)
        return args[0] if isinstance(found, Tensor) and schema_of(func).is_mutable else found


class DTensorFactory:
    """Makes `DTensor`s of one model's buckets; a DeviceMesh is made once for each grid of ranks.

    *Collective* where there is a tensor-parallel axis: its ranks exchange their grids.
    """

    def __init__(self, buckets: Sequence[ParamGroup]) -> None:
        self._meshes: dict[tuple[int, tuple[str, ...]], DeviceMesh] = {}
        self._found: dict[str, tuple[Placement, ...]] = {}  # by the name of a parameter
        for bucket in (each for each in buckets if each.tp is not None):
            self._mesh(bucket)

    def rows(self, bucket: ParamGroup, slot: Slot, memory: Tensor, begins_at: int = 0) -> Tensor:
        """A parameter's rows in `memory`, which begins so many elements into the shard of its segment; plain where
        nothing cuts it."""
        local = bucket.layout.local_slice(slot, bucket.cuts.layout_rank)
        flat = memory.detach()[local.offset - begins_at :][: local.numel] if local.numel else memory.detach()[:0]
        shape = torch.Size(slot.spec.shape)
        begin, end = _rows(slot, local)
        view = flat.view((end - begin, *shape[1:])) if shape else flat.view(() if local.numel else 0)
        mesh, placements = self._mesh(bucket), self._placements(bucket, slot)
        whole = torch.empty(bucket.tp_shard_of(slot).shape, dtype=view.dtype, device="meta")
        if isinstance(placements[-1], RaggedShard):
            return RaggedTensor.of(view, spec_like(whole, mesh, placements))
        if bucket.tp is None:
            return view.reshape(whole.shape)
        view = view.reshape(bucket.tp_shard_of(slot).here)  # without elements it may have another shape
        return DTensor.from_local(view, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())

    def _placements(self, bucket: ParamGroup, slot: Slot) -> tuple[Placement, ...]:
        if slot.spec.name not in self._found:
            tp_shard, axes = bucket.tp_shard_of(slot), _axes(bucket)
            tensor: Placement = Replicate() if tp_shard.dim is None else Shard(tp_shard.dim)
            others = [tensor if axis == "tensor" else Replicate() for axis in axes]
            if SHARD in bucket.cuts.own:
                # no bucket: torch keeps what keeps placements, in caches and as gradients
                others[-1] = RaggedShard(partial(_spans, bucket.cuts, slot), slot.spec.name)
            self._found[slot.spec.name] = tuple(others)
        return self._found[slot.spec.name]

    def _mesh(self, bucket: ParamGroup) -> DeviceMesh:
        """The mesh of a bucket's axes. *Collective* over the tensor-parallel one the first time."""
        mesh, tensor, axes = bucket.mesh, bucket.tp, _axes(bucket)
        if (made := self._meshes.get((id(mesh), axes))) is not None:
            return made
        comms = {"outer": mesh.outer, "inner": mesh.inner, "everyone": mesh.everyone, "tensor": tensor}
        found = [comm for axis in axes if (comm := comms[axis]) is not None]
        groups, kind = [comm.group for comm in found], mesh.inner.runtime.device.type
        if len(axes) == 1:
            return self._meshes.setdefault((id(mesh), axes), DeviceMesh.from_group(groups[0], kind))
        grid = torch.tensor(dist.get_process_group_ranks(mesh.everyone.group)).view(1, -1, mesh.inner.size)
        if tensor is not None:
            grid = all_values(tensor, grid[0].to(tensor.runtime.device), "ranks of a grid").cpu()
        wanted, dims = " ".join(axes).replace("everyone", "outer inner").split(), ["tensor", "outer", "inner"]
        grid = grid.permute([dims.index(each) for each in dict.fromkeys([*wanted, *dims])])
        grid = grid.reshape([comm.size for comm in found])
        made = DeviceMesh.from_group(groups, kind, mesh=grid, mesh_dim_names=axes)
        return self._meshes.setdefault((id(mesh), axes), made)


def refuse_split_experts(buckets: Sequence[ParamGroup]) -> None:
    if split := [b.name for b in buckets if b.key.expert and b.mesh.everyone.size < dist.get_world_size()]:
        raise NotImplementedError(
            f"{', '.join(split[:3])}: each rank of an expert-parallel group holds experts of its own under one name, so"
            " the model's names do not say which is which: to resume on the same layout, keep on each rank what"
            " p.to_local() gives of model.parameters(), and optimizer.state_dict()"
        )


def laid_as(param: Tensor, given: Tensor) -> Tensor:
    """A tensor's values in memory of its own, laid as a parameter is. *Collective* where one is a DTensor laid
    otherwise."""
    target = torch.zeros_like(param, dtype=given.dtype, requires_grad=False)
    return target.copy_(as_target(given, target))


def as_target(value: Any, target: Any) -> Any:
    """A value that `target.copy_` takes: distributed as a DTensor of torch's own placements is, or unsharded.
    *Collective* where it is a DTensor."""
    if isinstance(target, RaggedTensor) or not (isinstance(target, DTensor) or isinstance(value, DTensor)):
        return value
    unsharded = value.full_tensor() if isinstance(value, DTensor) else value
    if not isinstance(target, DTensor):
        return unsharded
    mesh = target.device_mesh
    return distribute_tensor(unsharded.to(mesh.device_type), mesh, target.placements, src_data_rank=None)


def _rows(slot: Slot, local: LocalSlice) -> tuple[int, int]:
    return local.start // slot.spec.row_numel, local.end // slot.spec.row_numel


def _axes(bucket: ParamGroup) -> tuple[str, ...]:
    """The last one cuts rows, if any does. The tensor-parallel one stands before it: rows are those of its shards."""
    own, tensor = bucket.cuts.own, () if bucket.tp is None else ("tensor",)
    if own == On(SHARD, SHARD):
        return (*tensor, "everyone")
    outer = () if bucket.mesh.outer is None else ("outer",)
    return ("inner", *tensor, *outer) if own.outer is SHARD else (*outer, *tensor, "inner")


def _spans(cuts: Cuts, slot: Slot) -> list[tuple[int, int]]:
    """Rows of a parameter on each rank of the axis that cuts rows."""
    outer, inner = cuts.layout.outer, cuts.place.inner_size if cuts.own.inner is SHARD else 1
    return [_rows(slot, cuts.layout.local_slice(slot, i * outer + o)) for o in range(outer) for i in range(inner)]
