"""One bucket's weights: flat tensors over a layout, and views of them. Nothing here copies behind the caller's back.

[Note: Four roles] A bucket holds compute weights, main weights and main gradients, each whole or as this rank's shard:

| strategy             | compute weights | main weights | main gradients |
|----------------------|-----------------|--------------|----------------|
| no_shard             | whole           | whole        | whole          |
| optim                | whole           | shard        | whole          |
| optim_grads          | whole           | shard        | shard          |
| optim_grads_params   | while in use    | shard        | shard          |

A shard is one of the inner axis. Where the outer axis splits the optimizer state, main weights are 1/outer of what this
table says, and under optim_grads_params the compute weights of the whole inner shard are kept beside them, so that only
one gather a step goes over the outer axis (see [Note: Two axes]).

Where main and compute dtype are one, the main weights *are* (a part of) the compute weights that are kept. Under
optim_grads_params without an outer split no compute shard is kept: a gather casts the main shard into this rank's place
of the bucket. A frozen bucket has weights only, stored once in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from harness.fsdp.comm.communicator import Pending
from harness.fsdp.comm.events import OUTER, Label
from harness.fsdp.comm.mesh import Mesh
from harness.fsdp.comm.parts import Part
from harness.fsdp.policy import Dtypes
from harness.fsdp.storage.cuts import Cuts
from harness.fsdp.storage.gradients import GradientPlan, Gradients, view_of
from harness.fsdp.storage.layout import LocalSlice, ParamSpec, Slot, plan_bucket
from harness.fsdp.storage.memory import placeholder
from harness.fsdp.vocabulary import OuterStrategy

InitialValue = Callable[[str, torch.Size], Tensor]
"""Full value of the parameter with this name; any dtype and device, shape as asked."""


@dataclass(frozen=True)
class BucketKey:
    """What parameters of one bucket have in common."""

    dtype: torch.dtype
    trainable: bool
    expert: bool = False

    @property
    def label(self) -> str:
        """How it is told apart within its unit."""
        marks = ("" if self.trainable else "/frozen") + ("/experts" if self.expert else "")
        return str(self.dtype).removeprefix("torch.") + marks


@dataclass(frozen=True)
class BucketContext:
    """What all buckets of one mesh share.

    plan: how gradients wait, and the inner strategy. outer: what the outer axis splits.
    """

    plan: GradientPlan
    mesh: Mesh
    outer: OuterStrategy = OuterStrategy.no_shard

    @property
    def main_device(self) -> torch.device:
        """Where main weights, main gradients and optimizer state lie."""
        return self.plan.offload or self.plan.memory.device


class Bucket:
    """Parameters of one unit with one compute dtype, all trained or all frozen, all dense or all of experts.

    Args:
        name: unit and key, used in labels and messages.
        params: first names and parameters; their data is replaced.
        initial: full value of each parameter; None leaves zeros for `set_value`.
    """

    def __init__(
        self,
        name: str,
        key: BucketKey,
        params: list[tuple[str, nn.Parameter]],
        dtypes: Dtypes,
        context: BucketContext,
        initial: InitialValue | None,
    ) -> None:
        self.name = name
        self.key = key
        self.dtypes = dtypes
        self.trainable = key.trainable
        self.params = params
        self.context = context
        self.strategy = context.plan.strategy
        self.memory = context.plan.memory
        self.cuts = self._cut()
        self.layout = self.cuts.layout
        self._build_weights()
        self.gradients: Gradients | None = None
        if self.trainable:
            self.gradients = Gradients(name, [param for _, param in params], self.cuts, dtypes, context.plan)
        for slot, (each, param) in zip(self.layout.slots, params, strict=True):
            if initial is not None:
                self.set_value(slot, initial(each, param.shape))
        self.point_at_weights()
        self._versions: list[int] = []
        self.forget_edits()

    def _cut(self) -> Cuts:
        place = self.context.mesh.place
        inner = self.strategy.shards_optimizer and (self.trainable or self.strategy.shards_params)
        outer = self.context.outer is OuterStrategy.optim and self.trainable
        specs = [ParamSpec(each, tuple(param.shape)) for each, param in self.params]
        num_outer = place.outer_size if outer else 1
        num_ranks = (place.inner_size if inner else 1) * num_outer
        layout = plan_bucket(specs, num_ranks, self.dtypes.align_elements, num_outer)
        return Cuts(layout, place, splits_inner=inner, splits_outer=outer and place.outer_size > 1)

    @property
    def is_whole_everywhere(self) -> bool:
        """Whether every rank of the model keeps all of its main weights."""
        return not (self.cuts.splits_inner or self.cuts.splits_outer or self.key.expert)

    # -- weights -------------------------------------------------------------------------------------------------

    def _build_weights(self) -> None:
        layout, memory, cuts = self.layout, self.memory, self.cuts
        stored = self.dtypes.main if self.trainable else self.dtypes.compute
        self.compute = memory.bucket(layout.bucket_numel, self.dtypes.compute, resident=self.resident)
        self._views = [view_of(self.compute, layout.bucket_range(slot)[0], slot) for slot in layout.slots]
        if not self.resident:
            memory.empty(self.compute)
        self._placeholders = [placeholder(p.shape, self.dtypes.compute, memory.device) for _, p in self.params]
        self.kept: Tensor | None = None
        """Compute weights of this inner shard, where the outer axis splits the main weights and they are not whole."""
        if cuts.splits_outer and not self.resident:
            self.kept = memory.persistent(layout.inner_numel, self.dtypes.compute)
        self.main_is_compute = (
            stored == self.dtypes.compute
            and (self.resident or self.kept is not None)
            and (self.context.plan.offload is None or not self.trainable)
        )
        self.main_storage: Tensor | None = None
        if self.main_is_compute:
            self.main_pieces = cuts.own(self.kept_pieces)
        else:
            device = self.context.main_device if self.trainable else memory.device
            self.main_storage = torch.zeros(layout.shard_numel, dtype=stored, device=device)
            self.main_pieces = cuts.pieces_of_own(self.main_storage)

    @property
    def kept_pieces(self) -> list[Tensor]:
        """Compute weights of this inner rank that are there between uses, a segment each."""
        if self.kept is not None:
            return self.cuts.pieces_of_inner(self.kept)
        return self.cuts.inner_pieces(self.compute)

    def set_value(self, slot: Slot, value: Tensor) -> None:
        """Put a parameter's full value into main and, where they are kept, compute weights."""
        if tuple(value.shape) != slot.spec.shape:
            raise ValueError(f"initial value of {slot.spec.name} has shape {tuple(value.shape)}, not {slot.spec.shape}")
        flat = value.detach().reshape(-1)
        local = self.layout.local_slice(slot, self.cuts.position)
        piece = self.main_pieces[local.segment]
        piece[local.offset : local.offset + local.numel].copy_(flat[local.start : local.end])
        through = flat.to(self.main_pieces[0].dtype)
        if self.resident:
            begin, end = self.layout.bucket_range(slot)
            self.compute[begin:end].copy_(through)
        elif self.kept is not None:
            pieces = self.kept_pieces
            for local in self.inner_slices(slot):
                pieces[local.segment][local.offset : local.offset + local.numel].copy_(through[local.start : local.end])

    def inner_slices(self, slot: Slot) -> list[LocalSlice]:
        """What this inner rank keeps of a parameter; offsets are within its inner piece."""
        place, outer = self.cuts.place, self.layout.outer
        first = (place.inner_rank if self.cuts.splits_inner else 0) * outer
        found = []
        for step in range(outer):
            local = self.layout.local_slice(slot, first + step)
            shift = step * self.layout.segments[local.segment].shard_numel
            found.append(replace(local, offset=local.offset + shift))
        return found

    @property
    def resident(self) -> bool:
        """Whether compute weights are kept whole between uses."""
        return not self.strategy.shards_params

    def fill_kept(self) -> None:
        """Cast this rank's main weights into the compute weights that are kept."""
        if not self.main_is_compute and (self.resident or self.kept is not None):
            for target, piece in zip(self.cuts.own(self.kept_pieces), self.main_pieces, strict=True):
                target.copy_(piece)

    def given(self) -> list[Tensor]:
        """What this rank gives to a gather of the weights, in the compute dtype, a segment each."""
        if self.kept is not None:
            return self.kept_pieces
        return [piece.detach().to(self.compute.device, self.dtypes.compute) for piece in self.main_pieces]

    @property
    def gives_copies(self) -> bool:
        """Whether that takes memory of its own."""
        return self.kept is None and (
            self.dtypes.compute != self.dtypes.main or self.context.main_device != self.memory.device
        )

    def fill_own(self) -> None:
        """Put what this rank gives into its place of the whole compute weights."""
        sources = self.main_pieces if self.kept is None else self.kept_pieces
        for target, piece in zip(self.cuts.inner_pieces(self.compute), sources, strict=True):
            target.copy_(piece)

    @property
    def has_room(self) -> bool:
        """Whether the weights could be given storage now, and be told apart from those of other units."""
        return self.memory.has_room(self.compute)

    def allocate_weights(self) -> None:
        """Give a released bucket storage; contents undefined until gathered."""
        self.memory.refill(self.compute)

    def point_at_weights(self) -> None:
        """Let parameters be views of the compute bucket, or of one NaN while it has no storage."""
        hollow = not self.memory.is_filled(self.compute)
        for (_, param), view, nothing in zip(self.params, self._views, self._placeholders, strict=True):
            param.data = nothing if hollow else view

    def release_weights(self) -> None:
        """Drop gathered weights; parameters become NaN placeholders."""
        self.memory.free(self.compute)
        self.point_at_weights()

    @property
    def gathered_bytes(self) -> int:
        """Bytes that every rank gives to a gather of the weights."""
        return sum(segment.inner_numel for segment in self.layout.segments) * self.dtypes.compute.itemsize

    def gather_pieces(self, whole: Tensor | None, inner: Sequence[Tensor], what: str = "") -> list[Pending]:
        """Bring every rank's own pieces together: along the outer axis into `inner`, then the inner one into `whole`.

        When this returns the first have come in and the second are under way. See [Note: Two axes]. *Collective.*

        Args:
            whole: None where the second is made later, unit by unit.
            what: added to the bucket's name in the label.
        """
        mesh, name = self.context.mesh, f"{self.name} {what}".rstrip()
        found: list[Pending] = []
        if self.cuts.splits_outer and mesh.outer is not None:
            found.append(mesh.outer.all_gather(self.cuts.outer(inner), Label("all_gather", name + OUTER)))
            found[0].receive()
        if whole is not None and (self.cuts.splits_inner or self.cuts.splits_outer):
            found.append(mesh.gather.all_gather(self.cuts.inner(whole), Label("all_gather", name)))
        return found

    def weight_parts(self) -> list[Part]:
        """The compute bucket cut for an all-gather of the inner axis."""
        return self.cuts.inner(self.compute)

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

    def forget_edits(self) -> None:
        """Take parameters as they are now for unedited: the engine itself has written to them."""
        self._versions = [param._version for _, param in self.params]

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

    @property
    def grad_pieces(self) -> list[Tensor]:
        """This rank's main gradients, a segment each; none of a frozen bucket."""
        return [] if self.gradients is None else self.gradients.main_pieces

    # -- views ---------------------------------------------------------------------------------------------------

    def named_slices(self, bucket: Tensor) -> list[tuple[str, Tensor]]:
        """Every parameter's name and its view of a whole bucket."""
        return [
            (slot.spec.name, view_of(bucket, self.layout.bucket_range(slot)[0], slot)) for slot in self.layout.slots
        ]

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes this rank keeps until a step's gradients are forgotten, by role; padding is counted apart."""
        layout = self.layout
        own = layout.param_numel_on(self.cuts.position)
        inner = sum(local.numel for slot in layout.slots for local in self.inner_slices(slot))
        padding = 0
        roles = {"compute_weights": 0, "main_weights": 0, "main_grads": 0}
        for role, tensor, numel in (
            ("compute_weights", self.compute if self.resident else None, layout.param_numel),
            ("compute_weights", self.kept, inner),
            ("main_weights", self.main_storage, own),
        ):
            if tensor is not None:
                roles[role] += numel * tensor.itemsize
                padding += (tensor.numel() - numel) * tensor.itemsize
        gradients = {} if self.gradients is None else self.gradients.bytes_kept(own, inner)
        return roles | gradients | {"padding": padding + gradients.get("padding", 0)}
