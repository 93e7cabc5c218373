"""DTensors that are cut by a `RaggedShard`.

[Note: Ragged shards] torch's `Shard(0)` means the cut of `torch.chunk`. DTensors that are cut otherwise gather wrongly
without a word, because every rule of torch's sharding propagation trusts the placement. A `RaggedTensor` therefore
dispatches by rules of its own (`operations`), and `RaggedShard` tells torch's helpers (state dict, DCP) the truth.
torch refuses to make a plain DTensor with a `RaggedShard` (its `DTensorSpec` verifies that a shard is a `Shard(dim)`),
so that its own rules never see one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves, tree_map_only

from harness.fsdp.ragged.placement import RaggedShard, Span

BEFORE_WRITE = "_before_write"
"""Attribute of rows that other ranks may read: called before they are written to."""


class RaggedSpec(DTensorSpec):
    """A spec whose last placement is a `RaggedShard`."""

    def _verify_shard_order(self, shard_order: object) -> None:
        """torch's holds for placements that equal `Shard(dim)` alone."""


class RaggedTensor(DTensor):
    """A DTensor over this rank's rows, local shape [rows here, *shape[1:]].

    A mesh has one axis with a `RaggedShard`, its last; the others replicate, or shard for tensor parallelism. A scalar
    lies on the rank whose span is 0:1, local shape []; elsewhere its local shape is [0].
    """

    rules: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]
    """Runs an aten operation; set by `operations`, which need this class."""

    @staticmethod
    def of(local: Tensor, spec: DTensorSpec, *, requires_grad: bool = False) -> RaggedTensor:
        """Wrap the rows without a copy; torch's distributed checkpoint loads in place."""
        made = DTensor.__new__(RaggedTensor, local, spec, requires_grad=requires_grad)
        return cast(RaggedTensor, made)

    @property
    def base(self) -> Tensor:
        """The rows whose version counts edits of this tensor and of its views."""
        found: Tensor = self.__dict__.get("_base_rows", self._local_tensor)
        return found

    @base.setter
    def base(self, rows: Tensor) -> None:
        self.__dict__["_base_rows"] = rows

    @property
    def cut(self) -> RaggedShard:
        """The placement on the last axis."""
        return cast(RaggedShard, self._spec.placements[-1])

    @property
    def span(self) -> Span:
        """Rows of this rank, counted in the tensor-parallel shard."""
        mesh = self._spec.mesh
        return self.cut.spans[mesh.get_local_rank(mesh.ndim - 1)]

    @property
    def cuts_rows_alone(self) -> bool:
        """No tensor-parallel axis cuts it, too."""
        return all(isinstance(each, Replicate) for each in self._spec.placements[:-1])

    def full_tensor(self, *, grad_placements: object = None) -> Tensor:
        """The whole tensor on every rank; its gradient's rows return here. Collective over the mesh."""
        if torch.is_grad_enabled() and self.requires_grad:
            return cast(Tensor, _Gather.apply(self))  # type: ignore[no-untyped-call]
        return self.whole()

    def whole(self) -> Tensor:
        """The whole tensor on every rank, without a gradient. Collective over the mesh."""
        spec, last = self._spec, self._spec.mesh.ndim - 1
        local = self._local_tensor.detach().to(spec.mesh.device_type)  # offloaded state is gathered on the device
        if not self.shape:
            return self.cut.gather(local.reshape(-1), spec.mesh, last).reshape(())
        rows = self.cut.gather(local, spec.mesh, last)
        if not any(isinstance(placement, Shard) for placement in spec.placements[:-1]):
            return rows
        placements = (*spec.placements[:-1], Replicate())
        sizes, _ = compute_local_shape_and_global_offset(self.shape, spec.mesh, placements)
        rows = rows.reshape(sizes)  # without elements it may have another shape
        return DTensor.from_local(
            rows, spec.mesh, placements, run_check=False, shape=self.shape, stride=self.stride()
        ).full_tensor()

    def rows_of(self, whole: Tensor) -> Tensor:
        """This rank's part of a plain tensor that broadcasts to this one's shape; a view."""
        if not self.shape:
            begin, end = self.span
            return whole if begin < end else whole.reshape(1)[:0]
        sizes, offsets = compute_local_shape_and_global_offset(self.shape, self._spec.mesh, self._spec.placements)
        for dim in range(max(self.dim() - whole.dim(), 0), self.dim()):
            at = dim - self.dim()
            if whole.shape[at] == self.shape[dim] and sizes[dim] < self.shape[dim]:
                whole = whole.narrow(at, offsets[dim] if sizes[dim] else 0, sizes[dim])
        return whole

    def to_local(self, *, grad_placements: object = None) -> Tensor:
        """This rank's rows, sharing memory; differentiable."""
        if torch.is_grad_enabled() and self.requires_grad:
            return cast(Tensor, _ToLocal.apply(self))  # type: ignore[no-untyped-call]
        if before_write := getattr(self.base, BEFORE_WRITE, None):
            before_write()
        return self._local_tensor

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """As torch's; by way of the whole tensor where the placements differ. Collective over the mesh."""
        mesh = device_mesh or self._spec.mesh
        if placements is not None and tuple(placements) == self._spec.placements:
            return self
        whole = DTensor.from_local(self.full_tensor(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole if placements is None else whole.redistribute(mesh, placements, **options)

    @property
    def data(self) -> Tensor:
        """The rows without autograd. A whole or sharded tensor that is assigned is copied; a DTensor would lose it."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        check_data(value, self, self.cut.name or "a sharded parameter")
        with torch.no_grad():
            self.copy_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied: Any = self.detach().clone().requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                copied._is_param = True
            memo[id(self)] = copied
        return cast(Tensor, memo[id(self)])

    @staticmethod
    def __tensor_unflatten__(inner: Any, flat: Any, size: Any, stride: Any) -> RaggedTensor:
        made = DTensor.__tensor_unflatten__(inner, flat, size, stride)
        return RaggedTensor.of(made._local_tensor, made._spec, requires_grad=made.requires_grad)

    def __reduce_ex__(self, _: Any) -> Any:
        return _restored, (self._local_tensor.detach(), self._spec, self.requires_grad)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Asked for by writers of whole tensors, such as safetensors.

        Raises:
            RuntimeError: this rank has rows of it alone.
        """
        raise RuntimeError(
            f"a file of {self.cut.name or 'a sharded tensor'} would have this rank's rows only: save whole tensors on"
            " one rank, {name: value.full_tensor() for name, value in model.state_dict().items()} (collective), or what"
            " every rank has by torch.distributed.checkpoint"
        )

    def storage(self) -> Any:
        """As `untyped_storage`."""
        return self.untyped_storage()

    def data_ptr(self) -> int:
        """0, so that torch's `async_save` copies the rows inside; a DTensor of rows at an offset has another."""
        return 0

    # -- distributed checkpoint ----------------------------------------------------------------------------------------

    def _chunk(self) -> ChunkStorageMetadata | None:
        """Offsets and sizes of this rank's rows; None where it has none."""
        if not self._local_tensor.numel():
            return None
        if not self.shape:
            return ChunkStorageMetadata(torch.Size([]), torch.Size([]))
        sizes, offsets = compute_local_shape_and_global_offset(self.shape, self._spec.mesh, self._spec.placements)
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        chunk = self._chunk()
        return [] if chunk is None else [chunk]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, _: object) -> Tensor:
        return self._local_tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch types its default as a C function
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return cls.rules(func, args, dict(kwargs or {}))


def check_data(value: Tensor, held: Tensor, name: str) -> None:
    """Raise RuntimeError where `.data` is given another shape, dtype or device, which it would change."""
    was, now = ((each.shape, each.dtype, each.device.type) for each in (held, value))
    if was != now:
        raise RuntimeError(
            f"{name} was changed after sharding: it is {_told(held)}, its `.data` was given {_told(value)}, and is no"
            " longer the engine's. Cast, move and reshape before sharding; values of another dtype are taken by"
            " parameter.copy_(values)"
        )


def _told(tensor: Tensor) -> str:
    return f"{[*tensor.shape]} {tensor.dtype} on {tensor.device.type}"


class GatheredView(DTensor):
    """A replicated view of a sharded tensor's gathered copy: an edit of it would be lost, and is refused."""

    @staticmethod
    def of(view: Tensor, name: str) -> GatheredView:
        """Wrap a replicated DTensor."""
        plain = cast(DTensor, view)
        made: Any = DTensor.__new__(GatheredView, plain._local_tensor, plain._spec, requires_grad=False)
        made._name = name
        return cast(GatheredView, made)

    def _plain(self) -> DTensor:
        make: Any = DTensor
        plain: DTensor = make(self._local_tensor, self._spec, requires_grad=False)
        return plain

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch types its default as a C function
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable and isinstance(args[0], GatheredView):
            name = getattr(args[0], "_name", "a sharded tensor")
            raise NotImplementedError(
                f"{func} on a view of {name}: its rows lie on several ranks and the view is a copy; edit"
                " parameter.full_tensor() (collective), then parameter.copy_(it)"
            )
        plain = next((e for e in tree_leaves((args, kwargs)) if type(e) is Tensor and e.numel() > 1), None)
        if plain is not None:
            held = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, GatheredView))
            raise RuntimeError(meets_plain(plain, getattr(held, "_name", "a sharded tensor")))
        args_, kwargs_ = tree_map_only(GatheredView, cls._plain, (args, dict(kwargs or {})))
        found = func(*args_, **kwargs_)
        if not func.is_view or not isinstance(args[0], GatheredView):
            return found
        name = getattr(args[0], "_name", "a sharded tensor")
        return cls.of(found, name) if isinstance(found, Tensor) else [cls.of(each, name) for each in found]


class Replicated(DTensor):
    """A result over all rows that autograd knows. A loss, which is plain and another one on each rank, may be added to
    it: torch adds them to other DTensors too, and raises in the backward."""

    @staticmethod
    def of(value: Tensor) -> Tensor:
        """A DTensor as this class, if all ranks have it whole."""
        if type(value) is not DTensor or not all(isinstance(each, Replicate) for each in value._spec.placements):
            return value
        made: Any = DTensor.__new__(Replicated, value._local_tensor, value._spec, requires_grad=False)
        return cast(Tensor, made)

    def _plain(self) -> DTensor:
        make: Any = DTensor
        made: DTensor = make(self._local_tensor, self._spec, requires_grad=False)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if any(type(each) is Tensor and each.requires_grad for each in tree_leaves((args, kwargs))):
                args, kwargs = tree_map_only(Replicated, _IntoLoss.apply, (args, dict(kwargs or {})))
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch types its default as a C function
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args_, kwargs_ = tree_map_only(Replicated, Replicated._plain, (args, dict(kwargs or {})))
        return tree_map_only(DTensor, cls.of, func(*args_, **kwargs_))


def meets_plain(plain: Tensor, name: str) -> str:
    """An error's text: a plain tensor, another one on each rank maybe, is combined with a sharded one."""
    return (
        f"a plain tensor of shape {[*plain.shape]} meets a sharded one, {name}: take parameter.full_tensor()"
        " (collective), or cut it by distribute_rows(tensor, like=parameter). In a forward, parameters are whole for"
        " modules of their own unit: where another unit uses one, `fully_shard` both together, as one unit"
    )


class _Gather(torch.autograd.Function):
    """`full_tensor()`, whose gradient is taken to be equal on all ranks, as torch's `redistribute` has it."""

    @staticmethod
    def forward(ctx: Any, sharded: RaggedTensor) -> Tensor:
        ctx.sharded = sharded.detach()
        return sharded.whole()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> RaggedTensor:
        like = ctx.sharded
        return RaggedTensor.of(like.rows_of(grads[0]).contiguous(), like._spec)


class _IntoLoss(torch.autograd.Function):
    """A `Replicated` as this rank's loss takes it; the gradient is the mean over ranks. *Collective* in
    the backward."""

    @staticmethod
    def forward(ctx: Any, total: Replicated) -> Tensor:
        ctx.mesh = total._spec.mesh
        return total._local_tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> DTensor:
        grad = grads[0].clone()
        for axis in range(ctx.mesh.ndim):
            dist.all_reduce(grad, group=ctx.mesh.get_group(axis))
        return replicated(grad / ctx.mesh.size(), ctx.mesh)


class _ToLocal(torch.autograd.Function):
    """`to_local()`, whose gradient is this rank's rows."""

    @staticmethod
    def forward(ctx: Any, sharded: RaggedTensor) -> Tensor:
        ctx.spec = sharded._spec
        return sharded._local_tensor.view_as(sharded._local_tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> RaggedTensor:
        return RaggedTensor.of(grads[0].contiguous(), ctx.spec)


def distribute_rows(full: Tensor, like: DTensor) -> RaggedTensor:
    """A copy of a whole tensor, cut as another is: same mesh and placements. Without communication."""
    made = RaggedTensor.of(like._local_tensor, spec_like(full, like._spec.mesh, like._spec.placements))
    return RaggedTensor.of(made.rows_of(full.detach()).clone(), made._spec)


def _restored(local: Tensor, spec: RaggedSpec, requires_grad: bool) -> RaggedTensor:
    """A tensor that `torch.load` reads."""
    return RaggedTensor.of(local, spec, requires_grad=requires_grad)


def spec_like(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> RaggedSpec:
    """The spec of a whole tensor of that shape, strides and dtype."""
    return RaggedSpec(mesh, tuple(placements), tensor_meta=TensorMeta(whole.shape, whole.stride(), whole.dtype))


def wrap_rows(result: Any, like: RaggedTensor, cut: RaggedShard | None = None) -> Any:
    """Rows of a result as a tensor that is cut as `like`, or by `cut`; the whole shape follows from the rows' shape."""
    if isinstance(result, tuple | list):
        return type(result)(wrap_rows(each, like, cut) for each in result)
    spec = like._spec
    if cut is None and result.dtype == like.dtype and result.shape == like._local_tensor.shape:
        return RaggedTensor.of(result, spec)
    rows = like.shape[:1] if cut is None else [max(end for _, end in cut.spans)]
    tail = like.shape[1:] if result.shape[1:] == like._local_tensor.shape[1:] else result.shape[1:]
    whole = torch.empty([*rows, *tail], dtype=result.dtype, device="meta")
    return RaggedTensor.of(
        result, spec_like(whole, spec.mesh, spec.placements if cut is None else (*spec.placements[:-1], cut))
    )


def replicated(value: Tensor, mesh: DeviceMesh, alike: DTensor | None = None) -> DTensor:
    """A DTensor that every rank has whole. alike: one of its shape, dtype and mesh, whose spec it shares."""
    meta = TensorMeta(value.shape, value.stride(), value.dtype)
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta) if alike is None else alike._spec
    make: Any = DTensor
    made: DTensor = make(value, spec, requires_grad=False)
    return made


def local_of(param: Tensor) -> Tensor:
    """This rank's rows, plain."""
    held: Any = param
    return held._local_tensor if isinstance(param, RaggedTensor) else param


def set_apart(param: Any) -> None:
    """Let a tensor, sharded or not, have a copy of its values on this rank."""
    if isinstance(param, DTensor):
        param._local_tensor = param._local_tensor.clone()
    else:
        param.data = param.detach().clone()
