"""DTensors that are cut by a `RaggedShard`: at row bounds of the engine's layout, on some ranks without a row.

Every rule of torch's sharding propagation takes a `Shard(0)` for the cut of `torch.chunk`. So a `RaggedTensor`
dispatches by rules of its own (`operations`), and `RaggedShard` tells torch's helpers (state dict, DCP) the actual cut.
`DTensorSpec` verifies that a shard is a `Shard(dim)`: torch makes no plain DTensor with a `RaggedShard`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from harness.fsdp.ragged.before_2_12 import spec_for
from harness.private_torch import (
    DTensorSpec,
    TensorMeta,
    UnevenShard,
    local_tensor,
    put_local_tensor,
    schema_of,
    spec_of,
    tree_leaves,
    tree_map_only,
    without_torch_function,
)

Span = tuple[int, int]
all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on


class RaggedShard(UnevenShard):
    """Rank r of one mesh axis has rows spans[r][0] to spans[r][1] of dimension 0; never equal to a `Shard`.

    Args:
        spans: by rank; or what computes them when first asked, since there may be thousands of ranks.
        name: parameter and unit, for error messages.
    """

    def __new__(cls, *_: object) -> RaggedShard:
        return cast(RaggedShard, cast(Any, super().__new__)(cls, 0))

    def __init__(self, spans: Sequence[Span] | Callable[[], Sequence[Span]], name: str = "") -> None:
        super().__init__(0)
        self._spans = spans
        self.name = name

    @property
    def spans(self) -> tuple[Span, ...]:
        if not isinstance(self._spans, tuple):
            self._spans = tuple(self._spans() if callable(self._spans) else self._spans)
        return self._spans

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, RaggedShard) and self.spans == other.spans)

    def __hash__(self) -> int:
        return hash(self.spans)

    def __reduce__(self) -> tuple[Any, ...]:
        return RaggedShard, (self.spans, self.name)

    def __deepcopy__(self, _: object) -> RaggedShard:
        return self

    def __repr__(self) -> str:
        return f"RaggedShard({', '.join(f'{begin}:{end}' for begin, end in self.spans)})"

    __str__ = __repr__

    def gather(self, local: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
        """All rows on every rank, shape [rows, *local.shape[1:]]. Collective over the axis."""
        most = max(end - begin for begin, end in self.spans)
        gap = local.new_zeros((most - len(local), *local.shape[1:]))
        padded = torch.cat([local, gap]) if len(gap) else local
        found = local.new_empty((len(self.spans), most, *local.shape[1:]))
        all_gather(found.flatten(0, 1), padded.contiguous(), group=mesh.get_group(axis))
        parts = sorted(zip(self.spans, found, strict=True), key=lambda each: each[0])
        return torch.cat([rows[: end - begin] for (begin, end), rows in parts])


BEFORE_WRITE = "_before_write"  # attribute of rows that other ranks may read: called before they are written to


def copied_data(name_of: Callable[[Any], str]) -> Any:
    """Property `data`, whose values are copied. Setting it raises RuntimeError for another shape, dtype or device."""

    def put(held: Tensor, value: Tensor) -> None:
        was, now = ((each.shape, each.dtype, each.device.type) for each in (held, value))
        if was != now:
            raise RuntimeError(
                f"{name_of(held)} was changed after sharding: it is {_kind(held)}, its `.data` was given"
                f" {_kind(value)}, and is no longer the engine's. Cast, move and reshape before sharding; values of"
                " another dtype are taken by parameter.copy_(values)"
            )
        with torch.no_grad():
            held.copy_(value)

    return property(lambda held: held.detach(), put)


class RaggedTensor(DTensor):
    """A DTensor over this rank's rows, local shape [rows here, *shape[1:]].

    A mesh has one axis with a `RaggedShard`, its last; the others replicate, or shard for tensor parallelism. A scalar
    lies on the rank whose span is 0:1, local shape []; elsewhere its local shape is [0].
    """

    rules: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]
    base: Tensor
    """The rows whose version counts edits of this tensor and of its views."""

    @staticmethod
    def of(local: Tensor, spec: Any, *, requires_grad: bool = False) -> RaggedTensor:
        made = cast(RaggedTensor, DTensor.__new__(RaggedTensor, local, spec, requires_grad=requires_grad))
        made.base = local
        return made

    @property
    def cut(self) -> RaggedShard:
        return cast(RaggedShard, self.placements[-1])

    def full_tensor(self, *, grad_placements: object = None) -> Tensor:
        """The whole tensor on every rank; its gradient's rows return here. Collective over the mesh."""
        if torch.is_grad_enabled() and self.requires_grad:
            return cast(Tensor, _Gather.apply(self))  # type: ignore[no-untyped-call]
        return self.whole()

    def whole(self) -> Tensor:
        spec, last = spec_of(self), self.device_mesh.ndim - 1
        local = local_tensor(self).detach().to(spec.mesh.device_type)  # offloaded state is gathered on the device
        rows = self.cut.gather(local if self.shape else local.reshape(-1), spec.mesh, last)
        if not any(isinstance(placement, Shard) for placement in spec.placements[:-1]):
            return rows.reshape(self.shape)  # without elements it may have another one
        placements = (*spec.placements[:-1], Replicate())
        rows = rows.reshape(self.place(but_rows=True)[0])  # without elements it may have another shape
        made = DTensor.from_local(rows, spec.mesh, placements, run_check=False, shape=self.shape, stride=self.stride())
        return made.full_tensor().contiguous()  # torch 2.11 gathers columns into rows of another stride

    def place(self, *, but_rows: bool = False) -> tuple[list[int], list[int]]:
        """(sizes, offsets) of what lies here. but_rows: as the other axes cut it."""
        sizes, offsets, here = list(self.shape), [0] * self.dim(), self.device_mesh.get_coordinate()
        assert here is not None
        for axis, each in enumerate(self.placements[:-1] if but_rows else self.placements):
            if isinstance(each, Shard):
                dim, most = each.dim, -(-sizes[each.dim] // self.device_mesh.size(axis))
                chunk = min(most * here[axis], sizes[dim]), min(most * (here[axis] + 1), sizes[dim])
                begin, end = each.spans[here[axis]] if isinstance(each, RaggedShard) else chunk
                sizes[dim], offsets[dim] = end - begin, offsets[dim] + begin
        return sizes, offsets

    def rows_of(self, whole: Tensor) -> Tensor:
        """This rank's view of a plain tensor that broadcasts to this one's shape."""
        if not self.shape:
            return whole if local_tensor(self).numel() else whole.reshape(1)[:0]
        sizes, offsets = self.place()
        for dim in range(-min(self.dim(), whole.dim()), 0):
            if whole.shape[dim] == self.shape[dim] and sizes[dim] < self.shape[dim]:
                whole = whole.narrow(dim, offsets[dim] if sizes[dim] else 0, sizes[dim])
        return whole

    def to_local(self, *, grad_placements: object = None) -> Tensor:
        if torch.is_grad_enabled() and self.requires_grad:
            return cast(Tensor, _ToLocal.apply(self))  # type: ignore[no-untyped-call]
        if before_write := getattr(self.base, BEFORE_WRITE, None):
            before_write()
        return self._rows()

    def _rows(self) -> Tensor:
        """The rows here, whose edits count: what dispatch makes of a view has a version counter of its own."""
        local, base = local_tensor(self), self.base
        return local if local is base else base.as_strided(local.shape, local.stride(), local.storage_offset())

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Through the whole tensor where placements differ. Collective over the mesh."""
        mesh = device_mesh or self.device_mesh
        if placements is not None and tuple(placements) == self.placements:
            return self
        whole = DTensor.from_local(self.full_tensor(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole if placements is None else whole.redistribute(mesh, placements, **options)

    data = copied_data(lambda held: held.cut.name or "a sharded parameter")

    def __deepcopy__(self, _: object) -> Tensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        return nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied

    @staticmethod
    def __tensor_unflatten__(inner: Any, flat: Any, size: Any, stride: Any) -> RaggedTensor:
        made = DTensor.__tensor_unflatten__(inner, flat, size, stride)
        return RaggedTensor.of(local_tensor(made), spec_of(made), requires_grad=made.requires_grad)

    def __reduce_ex__(self, _: Any) -> Any:
        return _restored, (local_tensor(self).detach(), spec_of(self), self.requires_grad)

    def untyped_storage(self) -> torch.UntypedStorage:
        raise RuntimeError(
            f"{self.cut.name or 'a sharded tensor'} has this rank's rows only: give the optimizer to"
            " fully_shard_optimizer(model, optimizer) before its step is compiled; save whole tensors on one rank,"
            " {name: value.full_tensor() for name, value in model.state_dict().items()} (collective), or what every"
            " rank has by torch.distributed.checkpoint"
        )

    def data_ptr(self) -> int:
        """0, so that torch's `async_save` copies the rows inside; a DTensor of rows at an offset has another."""
        return 0

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        sizes, offsets = self.place() if self.shape else ([], [])
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        return [chunk] if local_tensor(self).numel() else []

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(local_tensor(self))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, _: object) -> Tensor:
        return self._rows()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override] # a C function in torch
        return cls.rules(func, args, dict(kwargs or {}))


def _kind(tensor: Tensor) -> str:
    return f"{[*tensor.shape]} {tensor.dtype} on {tensor.device.type}"


def in_class(kind: type[DTensor], held: Any) -> Any:
    return DTensor.__new__(kind, local_tensor(held), spec_for(kind, spec_of(held)), requires_grad=False)


def plain_of(kind: type[DTensor], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
    return tree_map_only(kind, partial(in_class, DTensor), (args, dict(kwargs or {})))


class GatheredView(DTensor):
    """A view of a gathered copy: an edit of it would be lost, and is refused."""

    _name = "a sharded tensor"

    @staticmethod
    def of(view: Tensor, name: str) -> Tensor:
        made = in_class(GatheredView, view)
        made._name = name
        return cast(Tensor, made)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override] # a C function in torch
        if schema_of(func).is_mutable and isinstance(args[0], GatheredView):
            raise NotImplementedError(
                f"{func} writes to a copy of {args[0]._name}, gathered from several ranks, and would be lost: an"
                " optimizer that does this, as torch.optim.Muon, goes to fully_shard_optimizer(model, optimizer); else"
                " edit parameter.full_tensor() (collective), then parameter.copy_(it)"
            )
        given = tree_leaves((args, kwargs))
        if (plain := next((e for e in given if type(e) is Tensor and e.numel() > 1), None)) is not None:
            raise RuntimeError(meets_plain(plain, next(e._name for e in given if isinstance(e, GatheredView))))
        args_, kwargs_ = plain_of(GatheredView, args, kwargs)
        found = func(*args_, **kwargs_)
        if not func.is_view or not isinstance(args[0], GatheredView):
            return found
        return tree_map_only(Tensor, partial(cls.of, name=args[0]._name), found)


class Replicated(DTensor):
    """Computed of all rows, and known to autograd. A rank's own loss may be added to it, as in torch, whose backward
    raises then."""

    @staticmethod
    def of(value: Tensor) -> Tensor:
        if type(value) is not DTensor or not all(isinstance(each, Replicate) for each in value.placements):
            return value
        return cast(Tensor, in_class(Replicated, value))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            if any(type(each) is Tensor and each.requires_grad for each in tree_leaves((args, kwargs))):
                args, kwargs = tree_map_only(Replicated, _IntoLoss.apply, (args, dict(kwargs or {})))
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override] # a C function in torch
        args_, kwargs_ = plain_of(Replicated, args, kwargs)
        return tree_map_only(DTensor, cls.of, func(*args_, **kwargs_))


def meets_plain(plain: Tensor, name: str) -> str:
    return (
        f"a plain tensor of shape {[*plain.shape]} meets a sharded one, {name}: take parameter.full_tensor()"
        " (collective), or cut it by distribute_rows(tensor, like=parameter). In a forward, parameters are whole for"
        " modules of their own unit: where another unit uses one, `fully_shard` both together, as one unit"
    )


class _Gather(torch.autograd.Function):
    """The gradient is taken to be equal on all ranks, as torch's `redistribute` has it."""

    @staticmethod
    def forward(ctx: Any, sharded: RaggedTensor) -> Tensor:
        ctx.sharded = sharded.detach()
        return sharded.whole()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> RaggedTensor:
        like = ctx.sharded
        return RaggedTensor.of(like.rows_of(grads[0]).contiguous(), spec_of(like))


class _IntoLoss(torch.autograd.Function):
    """A `Replicated` as this rank's loss takes it; the gradient is the mean over ranks. *Collective* in
    the backward."""

    @staticmethod
    def forward(ctx: Any, total: Replicated) -> Tensor:
        ctx.mesh = total.device_mesh
        return local_tensor(total).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> DTensor:
        grad = grads[0].clone()
        for axis in range(ctx.mesh.ndim):
            dist.all_reduce(grad, group=ctx.mesh.get_group(axis))
        return replicated(grad / ctx.mesh.size(), ctx.mesh)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sharded: RaggedTensor) -> Tensor:
        ctx.spec = spec_of(sharded)
        return local_tensor(sharded).view_as(local_tensor(sharded))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> RaggedTensor:
        return RaggedTensor.of(grads[0].contiguous(), ctx.spec)


def distribute_rows(full: Tensor, like: DTensor) -> RaggedTensor:
    """A copy of a whole tensor with the cut of another one. No communication."""
    made = RaggedTensor.of(local_tensor(like), spec_like(full, like.device_mesh, like.placements))
    return RaggedTensor.of(made.rows_of(full.detach()).clone(), spec_of(made))


def _restored(local: Tensor, spec: Any, requires_grad: bool) -> RaggedTensor:
    return RaggedTensor.of(local, spec, requires_grad=requires_grad)


def spec_like(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Any:
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    made = DTensorSpec(mesh, tuple(Shard(0) if isinstance(p, RaggedShard) else p for p in placements), tensor_meta=meta)
    object.__setattr__(made, "placements", tuple(placements))  # torch verifies that a `Shard` equals `Shard(dim)`
    return made


def wrap_rows(result: Any, like: RaggedTensor) -> Any:
    """Rows cut as those of `like`; the shape follows from the rows' shape."""
    if isinstance(result, tuple | list):
        return type(result)(wrap_rows(each, like) for each in result)
    spec, local = spec_of(like), local_tensor(like)
    if result.dtype == like.dtype and result.shape == local.shape:
        return RaggedTensor.of(result, spec)
    tail = like.shape[1:] if result.shape[1:] == local.shape[1:] else result.shape[1:]
    whole = torch.empty([*like.shape[:1], *tail], dtype=result.dtype, device="meta")
    return RaggedTensor.of(result, spec_like(whole, spec.mesh, spec.placements))


def replicated(value: Tensor, mesh: DeviceMesh, alike: DTensor | None = None) -> DTensor:
    """alike: a DTensor of the same shape, dtype and mesh, whose spec is shared."""
    meta = TensorMeta(value.shape, value.stride(), value.dtype)
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta) if alike is None else spec_of(alike)
    return DTensor.__new__(DTensor, value, spec, requires_grad=False)


def set_apart(param: Any) -> None:
    made = param
    if isinstance(param, DTensor):
        made.base = local_tensor(param).clone()
        put_local_tensor(param, made.base)
    else:
        param.data = param.detach().clone()
