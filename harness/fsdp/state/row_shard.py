"""A DTensor whose rows lie as this engine's layout puts them: unevenly, and on some ranks not at all.

[Note: DTensors that do not lie] torch's `Shard(0)` means the cut of `torch.chunk`; what is cut otherwise gathers
wrongly without a word, because `full_tensor()` believes the placement. A `RowShard` knows its chunks: it tells
distributed checkpoint (DCP) where its rows belong without asking other ranks, gathers by them, and refuses every
operation whose result would depend on what the placement says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from harness.fsdp.storage.placement import Placement

aten = torch.ops.aten
ROW_BY_ROW = frozenset(
    {
        aten.detach.default,
        aten.clone.default,
        aten._to_copy.default,
        aten.copy_.default,
        aten.empty_like.default,
        aten.zeros_like.default,
        aten.zero_.default,
    }
)
"""Operations that mean the same on a rank's rows as on the whole tensor, and keep the layout."""


class RowShard(DTensor):
    """This rank's rows of a tensor, shape [rows here, *rest]; `shape` is the whole tensor's.

    Made by `RowShard.of`. Shares memory with what it was made of: DCP loads straight into it.
    """

    _rows: tuple[tuple[int, int], ...]
    _group: dist.ProcessGroup | None
    _place: int

    @staticmethod
    def of(
        local: Tensor,
        shape: Sequence[int],
        rows: Sequence[tuple[int, int]],
        place: int,
        group: dist.ProcessGroup | None,
        mesh: DeviceMesh,
        lies: Sequence[Placement],
    ) -> RowShard:
        """Describe rows that lie here.

        Args:
            local: this rank's rows, shape [rows, *shape[1:]]; of a scalar, shape [] where it lies, else [0].
            shape: of the whole tensor.
            rows: begin and end of each rank's rows, by rank of `group`; of a scalar (0, 1) where it lies.
            place: this rank among them.
            group: ranks whose rows make up the tensor; None where this rank has all of them.
            mesh: ranks that keep the tensor. lies: its placement on each axis of the mesh.
        """
        whole = torch.Size(shape)
        meta = TensorMeta(whole, _strides(whole), local.dtype)
        placements = tuple(Shard(0) if each is Placement.SHARD else Replicate() for each in lies)
        return _wrap(local, DTensorSpec(mesh, placements, tensor_meta=meta), tuple(rows), group, place)

    def full_tensor(self, *, grad_placements: object = None) -> Tensor:
        """The whole tensor, a copy on the device it lies on. *Collective* among the ranks that share it.

        Raises:
            RuntimeError: it is a counter, and this rank has no row of its parameter.
        """
        if self.is_counter_elsewhere:
            raise RuntimeError(
                "a counter of which this rank has no copy: take it from a rank that has rows of the parameter"
            )
        if self._group is None:
            return self._local_tensor.detach().clone()
        local = self._local_tensor.to(self._spec.mesh.device_type)  # offloaded state lies where nothing is gathered
        tail = self.shape[1:]
        most = max(end - begin for begin, end in self._rows)
        padded = local.new_zeros((most, *tail))
        padded[: local.shape[0] if local.dim() else 1].copy_(local)
        found = [torch.empty_like(padded) for _ in self._rows]
        dist.all_gather(found, padded, group=self._group)
        rows = [(begin, part[: end - begin]) for (begin, end), part in zip(self._rows, found, strict=True)]
        rows.sort(key=lambda each: each[0])
        return torch.cat([part for _, part in rows]).reshape(self.shape)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Any] | None = None, **_: object
    ) -> DTensor:
        """The whole tensor as an ordinary DTensor, replicated: what torch's `full_state_dict=True` asks for.
        *Collective* among the ranks that share it.

        Raises:
            RuntimeError: for any other placement, which cannot say where these rows lie.
        """
        if placements is None or not all(isinstance(each, Replicate) for each in placements):
            raise RuntimeError(_refusal("redistribute to anything but Replicate()"))
        return DTensor.from_local(self.full_tensor(), self._spec.mesh, placements, run_check=False)

    @property
    def is_counter_elsewhere(self) -> bool:
        """Whether this rank has no copy of the counter that this stands for."""
        return self._group is None and self._local_tensor.numel() != self.shape.numel()

    # -- as plain tensors --------------------------------------------------------------------------------------------

    def _whole(self, what: str) -> Tensor:
        """The tensor itself, where this rank has all of it."""
        if self._local_tensor.shape != self.shape:
            raise RuntimeError(
                f"{what} of a sharded tensor would have this rank's rows only: take whole tensors on all ranks,"
                " {name: value.full_tensor() for name, value in model.state_dict().items()} or torch's"
                " get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)), and"
                " save them on one; or save what every rank has by torch.distributed.checkpoint"
            )
        return self._local_tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._whole("pickling (torch.save)").detach().clone().__reduce_ex__(protocol)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Memory of a tensor that this rank has whole; safetensors asks for it."""
        return self._whole("the memory").untyped_storage()

    def storage(self) -> Any:
        """Memory of a tensor that this rank has whole, typed."""
        return self._whole("the memory").storage()

    def data_ptr(self) -> int:
        """Address of a tensor that this rank has whole."""
        return self._whole("the memory").data_ptr()

    def fill_from(self, given: Tensor) -> None:
        """Copy this rank's rows of a whole tensor, of a DTensor (*collective*), or of a shard of the same layout."""
        if isinstance(given, RowShard) and given._rows == self._rows and given._place == self._place:
            self._local_tensor.copy_(given._local_tensor)
            return
        whole = given.full_tensor() if isinstance(given, DTensor) else given
        begin, end = self._rows[self._place]
        if begin < end:
            self._local_tensor.copy_(whole[begin:end] if self.shape else whole)

    # -- distributed checkpoint --------------------------------------------------------------------------------------

    @property
    def held(self) -> ChunkStorageMetadata | None:
        """Where this rank's rows belong; None where it has none."""
        begin, end = self._rows[self._place]
        if begin == end or not self._local_tensor.numel():
            return None
        if not self.shape:
            return ChunkStorageMetadata(torch.Size([]), torch.Size([]))
        tail = self.shape[1:]
        return ChunkStorageMetadata(torch.Size([begin] + [0] * len(tail)), torch.Size([end - begin, *tail]))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What DCP loads here."""
        return [] if self.held is None else [self.held]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """What DCP saves of it from here."""
        if self.held is None:
            return []
        data = TensorWriteData(
            chunk=self.held, properties=TensorProperties.create_from_tensor(self._local_tensor), size=self.shape
        )
        return [WriteItem(index=MetadataIndex(fqn, self.held.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, _: object) -> Tensor:
        """The rows themselves."""
        return self._local_tensor

    # -- operations --------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch types its default as a C function
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run what means the same row by row; refuse the rest.

        Raises:
            RuntimeError: the operation would need to know where the other rows are.
        """
        shards = [each for each in args if isinstance(each, RowShard)]
        if func not in ROW_BY_ROW or not shards or any(each._rows != shards[0]._rows for each in shards):
            raise RuntimeError(_refusal(str(func)))
        plain = [each._local_tensor if isinstance(each, RowShard) else each for each in args]
        if func is aten.copy_.default and len(shards) != 2:
            raise RuntimeError(_refusal(str(func)))
        result = func(*plain, **(kwargs or {}))
        first = shards[0]
        if result is plain[0]:
            return first
        return _wrap(result, _spec_like(first, result.dtype), first._rows, first._group, first._place)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override] # torch leaves it untyped
        begin, end = self._rows[self._place]
        return f"RowShard(rows {begin}:{end} of {tuple(self.shape)}, {self._local_tensor!r})"


def _wrap(
    local: Tensor,
    spec: DTensorSpec,
    rows: tuple[tuple[int, int], ...],
    group: dist.ProcessGroup | None,
    place: int,
) -> RowShard:
    made: Any = DTensor.__new__(RowShard, local, spec, requires_grad=False)
    made._rows, made._group, made._place = rows, group, place
    return cast(RowShard, made)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, over its memory; any other tensor itself."""
    held: Any = tensor.detach()
    return held.to_local() if isinstance(held, DTensor) else tensor.detach()


def _spec_like(shard: RowShard, dtype: torch.dtype) -> DTensorSpec:
    spec = shard._spec
    return DTensorSpec(
        spec.mesh, spec.placements, tensor_meta=TensorMeta(shard.shape, _strides(torch.Size(shard.shape)), dtype)
    )


def _strides(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _refusal(what: str) -> str:
    return (
        f"{what} on a tensor whose rows lie unevenly over ranks would trust a placement that cannot say where they are:"
        " take full_tensor() for the whole of it (collective), or to_local() for this rank's rows"
    )
