"""One bucket's storage: flat tensors over a layout, and views of them. Nothing here copies behind the caller's back.

[Note: Four roles] A bucket holds compute weights, main weights and main gradients, each whole or as this rank's shard:

| strategy             | compute weights | main weights | main gradients |
|----------------------|-----------------|--------------|----------------|
| no_shard             | whole           | whole        | whole          |
| optim                | whole           | shard        | whole          |
| optim_grads          | whole           | shard        | shard          |
| optim_grads_params   | while in use    | shard        | shard          |

Where main and compute dtype are one, the main weights *are* (a part of) the whole compute weights. Under
optim_grads_params no compute shard is kept: a gather casts the main shard into this rank's place of the bucket.
A frozen bucket has weights only, stored once in the compute dtype.

[Note: First gradients] Flat gradient storage is not zeroed for autograd to add to: a parameter has no `.grad` until its
first gradient of a bucket has arrived, which is copied over whatever its place held. Later ones are added in place.
What never came is zeroed when the bucket is handed over. That saves a pass of writing and one of reading over all
gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.fsdp.layout import BucketLayout, ParamSpec, Slot, plan_bucket
from harness.fsdp.memory import BucketMemory, placeholder
from harness.fsdp.parts import Part
from harness.fsdp.policy import Dtypes, Strategy

InitialValue = Callable[[str, torch.Size], Tensor]
"""Full value of the parameter with this name; any dtype and device, shape as asked."""


@dataclass(frozen=True)
class BucketKey:
    """What parameters of one bucket have in common."""

    dtype: torch.dtype
    trainable: bool


@dataclass(frozen=True)
class BucketContext:
    """What all buckets of a model share."""

    strategy: Strategy
    rank: int
    num_ranks: int
    memory: BucketMemory


class Bucket:
    """Parameters of one unit with one compute dtype, all trained or all frozen.

    Args:
        name: unit and dtype, used in labels and messages.
        params: first names and parameters; their data is replaced.
        initial: full value of each parameter.
    """

    def __init__(
        self,
        name: str,
        key: BucketKey,
        params: list[tuple[str, nn.Parameter]],
        dtypes: Dtypes,
        context: BucketContext,
        initial: InitialValue,
    ) -> None:
        self.name = name
        self.dtypes = dtypes
        self.trainable = key.trainable
        self.params = params
        self.context = context
        split = context.strategy.shards_optimizer and (self.trainable or context.strategy.shards_params)
        specs = [ParamSpec(each, tuple(param.shape)) for each, param in params]
        self.layout: BucketLayout = plan_bucket(specs, context.num_ranks if split else 1, dtypes.align_elements)
        self.rank = context.rank if split else 0
        self._build_weights(initial)
        self._build_gradients()
        self.point_at_weights()
        self.drop_grads()
        self._versions = [param._version for _, param in params]

    # -- weights -------------------------------------------------------------------------------------------------

    def _build_weights(self, initial: InitialValue) -> None:
        memory, layout = self.context.memory, self.layout
        stored = self.dtypes.main if self.trainable else self.dtypes.compute
        make = torch.zeros if self.resident else torch.empty
        with memory.allocating():
            self.compute = make(layout.bucket_numel, dtype=self.dtypes.compute, device=memory.device)
        self._views = [self._view(self.compute, slot) for slot in layout.slots]
        if not self.resident:
            self.compute.untyped_storage().resize_(0)
        self._placeholders = [placeholder(p.shape, self.dtypes.compute, memory.device) for _, p in self.params]
        self.main_is_compute = stored == self.dtypes.compute and not self.context.strategy.shards_params
        if self.main_is_compute:
            self.main_pieces = self.own_pieces(self.compute)
            self.main_storage: Tensor | None = None
        else:
            self.main_storage = torch.zeros(layout.shard_numel, dtype=stored, device=memory.device)
            self.main_pieces = self.shard_pieces(self.main_storage)
        for slot, (name, param) in zip(layout.slots, self.params, strict=True):
            self._set_initial(slot, initial(name, param.shape))

    def _set_initial(self, slot: Slot, value: Tensor) -> None:
        """Put a parameter's full value into main and, where they are kept whole, compute weights."""
        if tuple(value.shape) != slot.spec.shape:
            raise ValueError(f"initial value of {slot.spec.name} has shape {tuple(value.shape)}, not {slot.spec.shape}")
        flat = value.detach().reshape(-1)
        local = self.layout.local_slice(slot, self.rank)
        piece = self.main_pieces[local.segment]
        piece[local.offset : local.offset + local.numel].copy_(flat[local.start : local.end])
        if not self.context.strategy.shards_params:
            begin, end = self.layout.bucket_range(slot)
            self.compute[begin:end].copy_(flat.to(self.main_pieces[0].dtype))

    @property
    def resident(self) -> bool:
        """Whether compute weights are kept whole between uses."""
        return not self.context.strategy.shards_params

    def fill_own(self) -> None:
        """Cast this rank's main weights into its place of the compute bucket."""
        if not self.main_is_compute:
            for target, piece in zip(self.own_pieces(self.compute), self.main_pieces, strict=True):
                target.copy_(piece)

    def allocate_weights(self) -> None:
        """Give a released bucket storage; contents undefined until gathered."""
        self.context.memory.refill(self.compute)

    def point_at_weights(self) -> None:
        """Let parameters be views of the compute bucket, or of one NaN while it has no storage."""
        hollow = self.compute.untyped_storage().nbytes() == 0 and self.compute.numel() > 0
        for (_, param), view, nothing in zip(self.params, self._views, self._placeholders, strict=True):
            param.data = nothing if hollow else view

    def release_weights(self) -> None:
        """Drop gathered weights; parameters become NaN placeholders."""
        self.context.memory.free(self.compute)
        self.point_at_weights()

    @property
    def gathered_bytes(self) -> int:
        """Bytes that every rank gives to a gather of the weights."""
        return sum(segment.shard_numel for segment in self.layout.segments) * self.dtypes.compute.itemsize

    def weight_parts(self) -> list[Part]:
        """The compute bucket cut for an all-gather."""
        return self.segment_parts(self.compute)

    def check_untouched(self) -> None:
        """Raise RuntimeError where somebody froze, unfroze, moved, cast or edited a parameter after it was sharded."""
        self.check_unedited()
        for (name, param), view, nothing in zip(self.params, self._views, self._placeholders, strict=True):
            if param.requires_grad != self.trainable:
                change = f"requires_grad is {param.requires_grad} now, and was {self.trainable}"
            elif param.dtype != view.dtype or param.data_ptr() not in (view.data_ptr(), nothing.data_ptr()):
                change = "its data is no longer the engine's (cast, moved or replaced)"
            else:
                continue
            raise RuntimeError(f"parameter {name} was changed after sharding: {change}; change it before sharding")

    def check_unedited(self) -> None:
        """Raise RuntimeError where a parameter was edited in place and the next update would lose it.

        Where the compute weights are the main weights an edit is kept. torch counts edits of the parameter itself (also
        under no_grad); one through `.data` leaves no trace and is lost.
        """
        for (name, param), version in zip(self.params, self._versions, strict=True):
            if param._version != version and not self.main_is_compute:
                raise RuntimeError(
                    f"parameter {name} was edited in place after sharding: its main weights ({self.dtypes.main}) do not"
                    " know, and would overwrite it with the next update; edit it before sharding"
                )

    # -- gradients -----------------------------------------------------------------------------------------------

    def _build_gradients(self) -> None:
        self.grad_bucket: Tensor | None = None
        self.holds_sums = False
        self._unwritten: set[int] = set()
        if not self.trainable:
            self.grad_pieces: list[Tensor] = []
            self.main_grads: Tensor | None = None
            return
        whole = not self.context.strategy.shards_grads
        numel = self.layout.bucket_numel if whole else self.layout.shard_numel
        make = torch.zeros if whole else torch.empty
        with self.context.memory.allocating():
            self.main_grads = make(numel, dtype=self.dtypes.grads, device=self.context.memory.device)
        self.grad_pieces = self.own_pieces(self.main_grads) if whole else self.shard_pieces(self.main_grads)
        if whole:
            self._view_gradients(self.main_grads)
        else:
            self.main_grads.untyped_storage().resize_(0)

    def claim_main_grads(self) -> bool:
        """Give the main gradients storage for the sums of a reduction; whether they hold sums to add to already."""
        held, self.holds_sums = self.holds_sums, True
        if not held and not self.accumulates_whole and self.main_grads is not None:
            self.main_grads.untyped_storage().resize_(self.main_grads.numel() * self.main_grads.itemsize)
        return held and not self.accumulates_whole

    def settle_main_grads(self) -> None:
        """Let the main gradients of a step without a backward be zeros."""
        self.settle_gradients()
        if self.trainable and not self.accumulates_whole and not self.holds_sums:
            self.claim_main_grads()
            for piece in self.grad_pieces:
                piece.zero_()

    def _view_gradients(self, bucket: Tensor) -> None:
        """Let `bucket` take gradients, whatever it holds now; see [Note: First gradients]."""
        self.grad_bucket = bucket
        self._grad_views = [self._view(bucket, slot) for slot in self.layout.slots]
        self._unwritten = set(range(len(self.params)))

    @property
    def accumulates_whole(self) -> bool:
        """Whether microbatches add up in a whole gradient buffer before anything is reduced."""
        return self.trainable and not self.context.strategy.shards_grads

    def expect_gradients(self) -> None:
        """Have autograd bring gradients in the dtype they are kept in; storage is found when the first one arrives."""
        dtype = self.dtypes.grads if self.accumulates_whole else self.dtypes.wire
        for _, param in self.params:
            if param.grad is None and param.grad_dtype != dtype:
                param.grad_dtype = dtype

    def prepare_gradients(self) -> None:
        """Find flat storage for the gradients of this backward, and bring in those that are here already."""
        if self.grad_bucket is None:
            bucket = self.context.memory.take(self.layout.bucket_numel, self.dtypes.wire)
            for begin, end in self.layout.gaps:
                bucket[begin:end].zero_()
            self._view_gradients(bucket)
        for index, (_, param) in enumerate(self.params):
            if param.grad is not None or index not in self._unwritten:
                self.adopt_gradient(index)
        self.expect_gradients()

    def adopt_gradient(self, index: int) -> None:
        """After autograd accumulated into parameter `index`: bring a gradient that landed elsewhere into the bucket."""
        _adopt(self.params[index][1], self._grad_views[index], fresh=index in self._unwritten)
        self._unwritten.discard(index)

    def take_gradients(self) -> Tensor:
        """Hand over the unreduced gradients; parameters lose `.grad` unless that is the main gradient itself."""
        bucket = self.grad_bucket
        if bucket is None:
            raise RuntimeError(f"bucket {self.name} has no gradients to reduce")
        self.settle_gradients()
        if not self.accumulates_whole:
            self.grad_bucket = None
            self._grad_views = []
            self.drop_grads()
        return bucket

    def settle_gradients(self) -> None:
        """Zero the places of parameters that no gradient came for."""
        for index in self._unwritten:
            self._grad_views[index].zero_()
        self._unwritten = set()

    def drop_grads(self) -> None:
        """Set every parameter's `.grad` to None."""
        for _, param in self.params:
            param.grad = None

    def zero_gradients(self) -> None:
        """Forget all accumulated gradients; a shard of them gives its memory back."""
        if self.main_grads is not None and self.accumulates_whole:
            self._view_gradients(self.main_grads)
        elif self.main_grads is not None:
            self.main_grads.untyped_storage().resize_(0)
        if self.trainable:
            self.drop_grads()  # a backward that was refused may have left one; views come back with the next backward
        self.holds_sums = False

    def discard_unreduced(self) -> None:
        """Drop what a backward that failed left in the temporary bucket."""
        if self.trainable and not self.accumulates_whole and self.grad_bucket is not None:
            self.context.memory.free(self.take_gradients())

    # -- views ---------------------------------------------------------------------------------------------------

    def segment_parts(self, bucket: Tensor) -> list[Part]:
        """A whole bucket cut by segment and owner."""
        parts = []
        for segment in self.layout.segments:
            begin = segment.bucket_offset
            bounds = tuple(rank * segment.shard_numel for rank in range(segment.num_ranks + 1))
            parts.append(Part(bucket[begin : begin + segment.numel], bounds))
        return parts

    def own_pieces(self, bucket: Tensor) -> list[Tensor]:
        """This rank's piece of each segment of a whole bucket."""
        return [part.chunk(self.rank) for part in self.segment_parts(bucket)]

    def shard_pieces(self, shard: Tensor) -> list[Tensor]:
        """The pieces of each segment in a shard."""
        return [shard[s.shard_offset : s.shard_offset + s.shard_numel] for s in self.layout.segments]

    def _view(self, bucket: Tensor, slot: Slot) -> Tensor:
        begin, _ = self.layout.bucket_range(slot)
        return bucket.as_strided(slot.spec.shape, _contiguous(slot.spec.shape), begin)

    def named_slices(self, bucket: Tensor) -> list[tuple[str, Tensor]]:
        """Every parameter's name and its view of a whole bucket."""
        return [(slot.spec.name, self._view(bucket, slot)) for slot in self.layout.slots]

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes this rank keeps until a step's gradients are forgotten, by role; padding is counted apart."""
        layout = self.layout
        whole, shard = layout.param_numel, layout.param_numel_on(self.rank)
        padding = 0
        roles = {"compute_weights": 0, "main_weights": 0, "main_grads": 0}
        for role, tensor, numel in (
            ("compute_weights", self.compute if self.resident else None, whole),
            ("main_weights", self.main_storage, shard),
            ("main_grads", self.main_grads, whole if self.accumulates_whole else shard),
        ):
            if tensor is not None:
                roles[role] = numel * tensor.itemsize
                padding += (tensor.numel() - numel) * tensor.itemsize
        return roles | {"padding": padding}


def _adopt(param: nn.Parameter, view: Tensor, *, fresh: bool) -> None:
    """Let `view` be the gradient of a parameter; one that autograd put elsewhere is moved there (`fresh`) or added."""
    early = param.grad
    if early is not None and early.data_ptr() == view.data_ptr() and early.dtype == view.dtype:
        return
    if param.grad_dtype != view.dtype:
        param.grad = None
        param.grad_dtype = view.dtype
    param.grad = view
    if fresh:
        view.zero_() if early is None else view.copy_(early.detach())
    elif early is not None:
        view.add_(early.detach())


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
