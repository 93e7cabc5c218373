"""A DTensor whose rows lie as this engine's layout puts them: unevenly, and on some ranks not at all.

Under tensor parallelism they are rows of this rank's portion of the parameter (see [Note: Under tensor parallelism]).

[Note: DTensors that do not lie] torch's `Shard(0)` means the cut of `torch.chunk`; what is cut otherwise gathers
wrongly without a word, because `full_tensor()` believes the placement. A `RowShard` knows its chunks: it tells
distributed checkpoint (DCP) where its rows belong without asking other ranks, gathers by them, and refuses every
operation whose result would depend on what the placement says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from harness.fsdp.storage.placement import Placement
from harness.fsdp.tensor_parallel.portion import Portion

aten = torch.ops.aten
ROW_BY_ROW = frozenset(
    {
        aten.detach.default,
        aten.clone.default,
        aten._to_copy.default,
        aten.copy_.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.zeros_like.default,
        aten.zero_.default,
    }
)
"""Operations that mean the same on a rank's rows as on the whole tensor, and keep the layout."""


Span = tuple[int, int]
"""Begin and end."""


@dataclass(frozen=True)
class _Ranks:
    """Process groups of a shard, which its copies share.

    rows: ranks whose rows make up the portion; None where this rank has all of them. portions: ranks whose portions
    make up the tensor; None without a tensor-parallel axis.
    """

    rows: dist.ProcessGroup | None
    portions: dist.ProcessGroup | None

    def __deepcopy__(self, _: object) -> _Ranks:
        return self


class Rows:
    """Which rows of a portion each rank has: this rank's, and those of all, which are found when they are asked for, as
    there may be thousands of ranks.

    Args:
        here: begin and end of this rank's rows. place: this rank among the ranks.
        everyones: finds begin and end of each rank's rows.
    """

    def __init__(self, here: Span, place: int, everyones: Callable[[], Sequence[Span]]) -> None:
        self.here = here
        self.place = place
        self._everyones = everyones

    @cached_property
    def everyones(self) -> tuple[Span, ...]:
        """Begin and end of each rank's rows."""
        return tuple(self._everyones())

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        same = isinstance(other, Rows) and (self.here, self.place) == (other.here, other.place)
        return same and self.everyones == cast(Rows, other).everyones

    def __hash__(self) -> int:
        return hash((self.here, self.place))


class RowShard(DTensor):
    """A DTensor with this rank's rows of a tensor, local shape [rows here, *rest]. Its `shape` is the whole tensor's.

    It is made by `RowShard.of` and shares the memory of the rows it was made of, so torch's distributed checkpoint
    loads in place.
    """

    _rows: Rows
    _ranks: _Ranks
    _portion: Portion

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self._ranks.rows

    @staticmethod
    def of(
        local: Tensor,
        portion: Portion,
        rows: Rows,
        group: dist.ProcessGroup | None,
        mesh: DeviceMesh,
        lies: Sequence[Placement],
        tensor_group: dist.ProcessGroup | None = None,
    ) -> RowShard:
        """Describe rows that lie here.

        Args:
            local: this rank's rows, shape [rows, *portion.here[1:]]; of a scalar, shape [] where it lies, else [0].
            portion: what this rank's tensor-parallel axis left of the tensor; the whole of it without such an axis.
            rows: of each rank of `group`; of a scalar (0, 1) where it lies.
            group: ranks whose rows make up the portion; None where this rank has all of them.
            mesh: ranks that keep the tensor, the tensor-parallel axis last.
            lies: the portion's placement on each data-parallel axis of the mesh.
            tensor_group: ranks whose portions make up the tensor; None without such an axis.
        """
        whole = torch.Size(portion.shape)
        meta = TensorMeta(whole, _strides(whole), local.dtype)
        spec = DTensorSpec(mesh, _placements(portion, lies, mesh.ndim), tensor_meta=meta)
        return _wrap(local, spec, rows, _Ranks(group, tensor_group), portion)

    def full_tensor(self, *, grad_placements: object = None) -> Tensor:
        """The whole tensor, as a copy on the same device. *Collective* among the ranks that share it.

        Raises:
            RuntimeError: it is a counter, and this rank has no row of its parameter.
        """
        if self.is_counter_elsewhere:
            raise RuntimeError(
                "a counter of which this rank has no copy: take it from a rank that has rows of the parameter"
            )
        portion = self._local_tensor.detach().clone() if self._group is None else self._whole_portion()
        if not self._portion.is_whole:
            portion = self._portion.join(portion.to(self._spec.mesh.device_type), self._ranks.portions)
        return portion

    def _whole_portion(self) -> Tensor:
        """All rows of this rank's portion. *Collective* among the ranks that share it."""
        local = self._local_tensor.to(self._spec.mesh.device_type)  # offloaded state lies where nothing is gathered
        tail = self._portion.here[1:]
        everyones = self._rows.everyones
        most = max(end - begin for begin, end in everyones)
        padded = local.new_zeros((most, *tail))
        padded[: local.shape[0] if local.dim() else 1].copy_(local)
        found = [torch.empty_like(padded) for _ in everyones]
        dist.all_gather(found, padded, group=self._group)
        rows = [(begin, part[: end - begin]) for (begin, end), part in zip(everyones, found, strict=True)]
        rows.sort(key=lambda each: each[0])
        return torch.cat([part for _, part in rows]).reshape(self._portion.here)

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
        return self._group is None and self._local_tensor.numel() != self._portion.numel

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy of this rank's rows that follows no update, as of the best weights so far."""
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone()
        copied: Tensor = memo[id(self)]
        return copied

    def untyped_storage(self) -> torch.UntypedStorage:
        """Memory of a tensor that this rank has whole; safetensors asks for it."""
        return self._whole("the memory").untyped_storage()

    def storage(self) -> Any:
        """Memory of a tensor that this rank has whole, typed."""
        return self._whole("the memory").storage()

    def data_ptr(self) -> int:
        """0, as of any DTensor: torch's `async_save` then copies what is inside."""
        return 0

    def fill_from(self, given: Tensor) -> None:
        """Copy this rank's rows of a whole tensor, of a DTensor (*collective*), or of a shard of the same layout."""
        if isinstance(given, RowShard) and given._lies == self._lies:
            self._local_tensor.copy_(given._local_tensor)
            return
        whole = self._portion.cut(given.full_tensor() if isinstance(given, DTensor) else given)
        begin, end = self._rows.here
        if begin < end:
            self._local_tensor.copy_(whole[begin:end] if self.shape else whole)

    # -- distributed checkpoint --------------------------------------------------------------------------------------

    @property
    def held(self) -> ChunkStorageMetadata | None:
        """Where this rank's rows belong; None where it has none."""
        begin, end = self._rows.here
        if begin == end or not self._local_tensor.numel():
            return None
        if not self.shape:
            return ChunkStorageMetadata(torch.Size([]), torch.Size([]))
        first, *rest = self._portion.offsets
        return ChunkStorageMetadata(
            torch.Size([first + begin, *rest]), torch.Size([end - begin, *self._portion.here[1:]])
        )

    @property
    def _lies(self) -> tuple[object, ...]:
        """What tells where its rows belong."""
        return self._rows, self._portion

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
        if func not in ROW_BY_ROW or not shards or any(each._lies != shards[0]._lies for each in shards):
            raise RuntimeError(_refusal(str(func)))
        plain = [each._local_tensor if isinstance(each, RowShard) else each for each in args]
        if func is aten.new_empty.default:
            if tuple(args[1]) != tuple(shards[0].shape):
                raise RuntimeError(_refusal(str(func)))
            plain[1] = plain[0].shape
        if func is aten.copy_.default and len(shards) != 2:
            raise RuntimeError(_refusal(str(func)))
        result = func(*plain, **(kwargs or {}))
        first = shards[0]
        if result is plain[0]:
            return first
        spec = _spec_like(first, result.dtype)
        return _wrap(result, spec, first._rows, first._ranks, first._portion)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override] # torch leaves it untyped
        begin, end = self._rows.here
        of = "" if self._portion.is_whole else f" of portion {list(self._portion.offsets)} + {list(self._portion.here)}"
        return f"RowShard(rows {begin}:{end}{of} of {tuple(self.shape)}, {self._local_tensor!r})"


def _wrap(
    local: Tensor,
    spec: DTensorSpec,
    rows: Rows,
    ranks: _Ranks,
    portion: Portion,
) -> RowShard:
    made: Any = DTensor.__new__(RowShard, local, spec, requires_grad=False)
    made._rows, made._ranks, made._portion = rows, ranks, portion
    return cast(RowShard, made)


def _placements(
    portion: Portion, lies: Sequence[Placement], num_axes: int
) -> tuple[Shard | Replicate | _StridedShard, ...]:
    """torch's words for where a tensor lies: rows of a portion that is itself a cut of rows are strided."""
    rows_are_cut = portion.dim == 0 and portion.size > 1
    rows: Shard | _StridedShard = _StridedShard(0, split_factor=portion.size) if rows_are_cut else Shard(0)
    found: list[Shard | Replicate | _StridedShard] = [rows if each is Placement.SHARD else Replicate() for each in lies]
    if len(found) < num_axes:
        found.append(Replicate() if portion.dim is None else Shard(portion.dim))
    return tuple(found)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's local part of a DTensor, sharing its memory. Any other tensor is returned as it is."""
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
