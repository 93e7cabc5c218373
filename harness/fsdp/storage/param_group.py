"""The owner of one bucket's storage: main weights, compute weights (unsharded while in use) and gradients.

Which buffers a bucket has, and how each lies, is read from its `Placements` ([Note: Placement]). Where main and compute
dtype are one, the main weights *are* (a part of) the compute weights that are kept between uses. Where none are kept, a
gather casts the main weights into this rank's place of the bucket. A frozen bucket has weights only, stored once in the
dtype that the module had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import Communicator, Pending
from harness.fsdp.comm.device import copy_together
from harness.fsdp.comm.events import OUTER, Label
from harness.fsdp.comm.mesh import Mesh
from harness.fsdp.comm.reduction import Reduction
from harness.fsdp.policy import Dtypes, MixedPrecisionPolicy
from harness.fsdp.storage.codec import Fp8Codec
from harness.fsdp.storage.cuts import Cuts
from harness.fsdp.storage.gradients import GradientPlan, Gradients
from harness.fsdp.storage.layout import ParamSpec, Slot
from harness.fsdp.storage.parameter_access import HOME, views_of
from harness.fsdp.storage.placement import SHARD, WHOLE, Axis, On, Placements, route
from harness.fsdp.tensor_parallel import TpShard, point_at
from harness.private_torch import version_of, without_torch_function

InitialValue = Callable[[str, torch.Size], Tensor]
"""Full value of the parameter with this name; any dtype and device, shape as asked."""


@dataclass(frozen=True)
class GroupKey:
    """dtype: of the compute weights. fp8: they are kept and gathered in 8 bits, as e4m3. stored: of frozen weights that
    are computed with in another dtype than the module has."""

    dtype: torch.dtype
    trainable: bool
    expert: bool = False
    fp8: bool = False
    stored: torch.dtype | None = None

    @property
    def label(self) -> str:
        marks = "frozen" * (not self.trainable), "experts" * self.expert, "fp8" * self.fp8, self.stored
        return "/".join(str(each) for each in (self.dtype, *marks) if each).replace("torch.", "")

    def resolve(self, policy: MixedPrecisionPolicy) -> Dtypes:
        stored = torch.promote_types(self.dtype, self.stored or self.dtype)
        frozen = Dtypes(self.dtype, stored, self.dtype, self.dtype, self.dtype)  # which have no gradients
        dtypes = policy.resolve(self.dtype) if self.trainable else frozen
        return replace(dtypes, compute=torch.float8_e4m3fn) if self.fp8 else dtypes


class ParamGroup:
    """Parameters of one unit with one compute dtype, all dense or all of experts, all trained or all frozen
    when they were sharded. What is trained may be frozen later: its gradients are absent then. What was frozen has
    storage for weights alone.

    Args:
        name: unit and key, used in labels and messages.
        params: first names and parameters; their data is replaced.
        initial: full value of each parameter; None leaves zeros for `set_value`.
    """

    def __init__(
        self,
        name: str,
        key: GroupKey,
        params: list[tuple[str, nn.Parameter]],
        dtypes: Dtypes,
        plan: GradientPlan,
        mesh: Mesh,
        placements: Placements,
        tp: Communicator | None,
        initial: InitialValue | None,
    ) -> None:
        self.name, self.key, self.params = name, key, params
        self.dtypes, self.trainable = dtypes, key.trainable
        self.label = Label("all_gather", name)
        for each, param in params:
            setattr(param, HOME, (each, name.removesuffix(f"/{key.label}")))
        # a weak reference to the bucket's `ShardedParameters`, once the model is built
        self.sharded: Callable[[], Any] = lambda: None
        self.plan, self.memory = plan, plan.memory
        self.mesh, self.placements, self.tp = mesh, placements, tp
        group = None if tp is None else tp.group
        # TP shard of each parameter, by name
        self.tp_shards = {each: TpShard.of(each, param, group) for each, param in params}
        self.installed_version = 0
        # all-gathers of updated weights, while nobody has waited for them; the last brings the weights
        self.awaited: list[Pending] = []
        self._updated_on: Any = None
        self._unsharding: Pending | None = None
        self._build(initial)

    def _build(self, initial: InitialValue | None) -> None:
        dtypes = self.dtypes
        specs = [ParamSpec(each, tp_shard.here) for each, tp_shard in self.tp_shards.items()]
        self.cuts = Cuts.plan(specs, self.mesh.place, self.placements, dtypes.align_elements)
        self.layout = self.cuts.layout
        self._build_compute_weights()
        self._build_main_weights()
        self.codec: Fp8Codec | None = None  # makes compute weights of main weights; None: a cast does
        if self.key.fp8:
            self.codec = Fp8Codec(self.params, self.cuts, self.views, dtypes.main)
        trained = [param for _, param in self.params]
        self.gradients = (
            Gradients(self.name, trained, self.cuts, self.placements, dtypes, self.plan) if self.trainable else None
        )
        if self.trainable:
            self.send_as(dtypes)
        if initial is not None:
            for slot in self.layout.slots:
                self.set_value(slot, initial(slot.spec.name, torch.Size(self.tp_shard_of(slot).shape)))
        with without_torch_function():
            for param, view in zip(trained, self.views, strict=True):
                point_at(param, view)
        if self.gradients is not None and self.codec is not None:
            self.gradients.first_may_wait = False  # in the dtype of the weight; it may come before a hook knows
            self.gradients.expect()

    def send_as(self, dtypes: Dtypes) -> None:
        """Raise ValueError where dtypes cannot be sent, as `Dtypes.as_integers`."""
        integers, mesh = self.plan.integers, self.mesh
        sent = dtypes if integers is None else dtypes.as_integers()
        self.dtypes = dtypes
        if self.gradients is not None:
            self.gradients.dtypes = dtypes
        # makes the sums of gradients along the inner axis; `outer` along the outer one, if there is one
        self.inner = Reduction(mesh.inner, sent, self.plan.numerics, integers, legs_apart=mesh.has_outer)
        self.outer = (
            Reduction(mesh.outer, sent, self.plan.numerics, integers) if mesh.outer and mesh.has_outer else None
        )

    @property
    def scales_as_it_sums(self) -> bool:
        """True if the last sum of a step is known to be the last, and multiplies by the factor while it is in cache."""
        return self.inner.numbers.scales_sums and self.placements.reduces_once

    @property
    def is_whole_everywhere(self) -> bool:
        """True if every rank of the model keeps all of its main weights."""
        has_all = self.placements.main_weights == WHOLE and not self.key.expert
        return has_all and all(tp_shard.is_whole for tp_shard in self.tp_shards.values())

    def tp_shard_of(self, slot: Slot) -> TpShard:
        return self.tp_shards[slot.spec.name]

    def counted(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Parts of its shards that this rank counts, so that each element of the model counts once."""
        if not self.cuts.is_counted_here:
            return []
        if all(tp_shard.is_counted_here for tp_shard in self.tp_shards.values()):
            return list(shards)
        slots = (slot for slot in self.layout.slots if self.tp_shard_of(slot).is_counted_here)
        return [each.of(shards) for each in map(self.cuts.own_slice, slots) if each.numel]

    # -- weights -------------------------------------------------------------------------------------------------

    def _build_compute_weights(self) -> None:
        memory, resting, dtype = self.memory, self.placements.resting_weights, self.dtypes.compute
        self.is_resident = resting == WHOLE  # compute weights are whole between uses
        make = partial(memory.weights, shm=self.mesh.gather.shm) if self.is_resident else memory.transient
        self.compute = make(self.layout.bucket_numel, dtype)  # unsharded compute weights
        self.is_whole = self.is_resident
        # compute weights between uses, unsharded or this inner shard's; None: there are none
        self.kept = self.compute if self.is_resident else None
        if self.placements.resting_weights_are_kept and not self.is_resident:
            self.kept = memory.weights(self.cuts.numel(resting), dtype, self.mesh.gather.shm)
        self.views = views_of(self.compute, self.layout)
        if not self.is_resident:
            memory.empty(self.compute)

    def _build_main_weights(self) -> None:
        stored = self.dtypes.main
        offload = self.plan.offload if self.trainable else None
        # main weights in storage of their own; None where they are the compute weights that are kept
        self.main_storage: Tensor | None = None
        is_user_buffer = self.memory.registers and SHARD in self.cuts.own
        is_sent = stored == self.dtypes.compute and offload is None and not is_user_buffer
        if self.kept is not None and is_sent:
            self.main_shards = self.cuts.own_shards(self.kept_shards())
        else:
            numel = self.cuts.numel(self.placements.main_weights)
            if is_sent:
                self.main_storage = self.memory.weights(numel, stored, self.mesh.gather.shm)
            else:
                self.main_storage = self.memory.unmoved(numel, stored, on_host=offload is not None)
            self.main_shards = self.cuts.split_own(self.main_storage)
        # main weights are (a part of) the whole compute weights, so that an edit of these is one of them
        self.computes_with_main_weights = self.is_resident and self.main_storage is None

    def kept_shards(self) -> list[Tensor]:
        assert self.kept is not None
        return self.cuts.inner_shards_of(self.kept, self.placements.resting_weights)

    def set_value(self, slot: Slot, value: Tensor) -> None:
        """Put a parameter's full value, or this rank's TP shard of it, into main and, where they are kept, compute
        weights."""
        try:
            flat = self.tp_shards[slot.spec.name].cut(value.detach()).reshape(-1)
        except ValueError as error:
            raise ValueError(f"initial value of {slot.spec.name}: {error}") from None
        local = self.cuts.own_slice(slot)
        local.of(self.main_shards).copy_(flat[local.start : local.end])
        stored = flat.to(self.main_shards[0].dtype)
        values = stored if self.codec is None else self.codec.encode_value(slot, stored)
        if self.is_resident:
            begin, end = self.layout.bucket_range(slot)
            self.compute[begin:end].copy_(values)
        elif self.kept is not None:
            local = self.cuts.inner_slice(slot)
            local.of(self.kept_shards()).copy_(values[local.start : local.end])
        self.installed_version = self.main_version

    # -- unshard and reshard -------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Start the all-gather of the weights, unless they are whole. *Collective.*"""
        if self.is_whole:
            return
        comm = self.mesh.gather
        self.memory.refill(self.compute)
        with comm.runtime.stream("gather"):
            self.receive()  # of the outer axis
            sources = self.cast_shards() if self.kept is None else self.kept_shards()
            in_place = comm.size > 1 and comm.reads(sources, self.dtypes.compute)
            if not in_place:
                copy_together(self.cuts.inner_shards(self.compute), sources, follows=False)
            parts = self.cuts.inner_parts(self.compute)
            self._unsharding = comm.all_gather(parts, self.label, own=sources if in_place else None)
            if comm.size == 1:  # nothing comes after the copy
                self._unsharding.incoming = [comm.runtime.record()]

    def wait_for_unshard(self) -> None:
        """Have the all-gather under way come in, for whoever runs next, and show the weights."""
        pending, self._unsharding = self._unsharding, None
        if pending is not None:
            with events.waiting(self.label):
                pending.wait()
            self.is_whole = True
        self.show(unsharded=self.is_whole)

    def reshard(self) -> None:
        """Drop gathered weights; nobody can read the parameters then."""
        self.is_whole = False
        self.memory.release(self.compute)
        self.show(unsharded=False)

    def show(self, *, unsharded: bool) -> None:
        """Let modules hold unsharded parameters; or sharded ones, as they have no values, or nothing runs."""
        sharded = self.sharded()
        if sharded is not None and sharded.shows_unsharded is not unsharded:
            sharded.show(unsharded=unsharded)

    def use(self) -> None:
        """A forward or a backward runs: show unsharded parameters, if the weights are whole."""
        sharded = self.sharded()
        if sharded is not None and not sharded.shows_unsharded and self.is_whole and not self.awaited:
            sharded.show(unsharded=True)

    def cast_shards(self) -> Sequence[Tensor]:
        """Sources of a copy into compute weights: main weights, which the copy casts, or their payload in 8 bits."""
        return self.main_shards if self.codec is None else self.codec.encode(self.main_shards)

    # -- edits of unsharded weights ------------------------------------------------------------------------------

    def refuse_lost_edits(self) -> None:
        """Raise RuntimeError for an edit in place that main weights do not have. Torch's counters tell it: one through
        `.data` in place inside a forward is lost."""
        if not self.computes_with_main_weights and (edited := self.sharded().edited()):
            raise RuntimeError(
                f"parameter {edited[0]} was edited in place while it was unsharded, between a forward and the end of"
                f" its backward: its main weights ({self.dtypes.main}) do not know, and would overwrite it. Edit it"
                " between steps, or inside `with model.unsharded():` before the forward"
            )

    def differing(self) -> list[Tensor]:
        """Masks of this rank's compute weights with other bits than main weights cast: bool, one a segment.

        Only while compute weights are unsharded. Empty where main weights are the compute weights.
        """
        if self.computes_with_main_weights:
            return []
        bits = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[self.compute.itemsize]
        pairs = zip(self._own_compute_weights(), self.cast_shards(), strict=True)
        return [seen.view(bits) != main.detach().to(seen.dtype).view(bits) for seen, main in pairs]

    def take_over(self, differing: Sequence[Tensor]) -> None:
        """Copy compute weights to main weights in these places; elsewhere main weights keep all their bits."""
        if self.codec is not None:
            if any(bool(places.any()) for places in differing):
                raise RuntimeError(
                    f"a weight of {self.name} was edited in place: it is kept in 8 bits, quantized from main weights"
                    f" ({self.dtypes.main}), which cannot follow. Change those instead, by load_state_dict()"
                )
            return
        for seen, main, places in zip(self._own_compute_weights(), self.main_shards, differing, strict=False):
            main.detach().copy_(torch.where(places, seen.to(main.dtype), main.detach()))

    def _own_compute_weights(self) -> list[Tensor]:
        own = self.cuts.own_shards(self.cuts.inner_shards(self.compute))
        return [shard.to(self.main_shards[0].device) for shard in own]

    # -- install -------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Bring updated main weights into the compute weights that are kept between uses, if any. *Collective.*

        See [Note: Weights on their way].
        """
        if self.kept is not None:
            if self.main_storage is not None:
                copy_together(self.cuts.own_shards(self.kept_shards()), self.cast_shards(), follows=False)
            if self.placements.install:
                self.awaited += self.gather_shards(self.compute, self.kept_shards(), self.placements.resting_weights)
            self._updated_on = self.mesh.gather.runtime.current
        self.installed_version = self.main_version

    def receive(self) -> None:
        """Have what others updated here, before the weights are used.

        Whoever uses weights that are kept whole on another stream waits for the stream that updated, and no more: so
        that one waits for the gathers, whoever asks first. Where each use gathers, no other stream reads them.
        """
        if not self.awaited:
            return
        awaited, self.awaited = self.awaited, []
        here = self.mesh.gather.runtime.as_on(self._updated_on) if self.is_resident else nullcontext()
        with here, events.waiting(self.label):
            for each in awaited:
                each.wait()
        self.installed_version = self.main_version  # what others updated is in the same storage

    @property
    def main_version(self) -> int:
        return version_of(self.main_shards[0])

    @property
    def is_stale(self) -> bool:
        """True if main weights were written to since they were installed last; not by what is on its way."""
        return not self.awaited and self.main_version != self.installed_version

    # -- whole tensors of others ---------------------------------------------------------------------------------

    def gather_shards(self, whole: Tensor, inner: Sequence[Tensor], target: On, what: str = "") -> list[Pending]:
        """Bring every rank's main shards together until they lie as `target` says. *Collective.*

        Only the last is under way when this returns. See [Note: Outer once].

        Args:
            whole: a tensor of the whole bucket; untouched where the target shards it over the inner axis.
            inner: this inner rank's shards, of `whole` or elsewhere, in which its own main shards lie already.
            what: added to the bucket's name in the label.
        """
        mesh, name = self.mesh, f"{self.name} {what}".rstrip()
        found: list[Pending] = []
        comms = {Axis.inner: mesh.gather, Axis.outer: mesh.outer}
        legs = [
            (leg.axis, comm)
            for leg in route(self.placements.main_weights, target)
            # one that moves nothing would be waited for in place of the one before it
            if (comm := comms[leg.axis]) is not None and comm.size > 1
        ]
        with mesh.gather.runtime.stream("gather") if len(legs) > 1 else nullcontext():  # compute waits for no leg
            for axis, comm in legs:
                for before in found:
                    before.wait()
                is_inner = axis is Axis.inner
                parts = self.cuts.inner_parts(whole) if is_inner else self.cuts.outer_parts(inner)
                found.append(comm.all_gather(parts, Label("all_gather", name if is_inner else name + OUTER)))
        return found

    def gather_whole(self, shards: Sequence[Tensor], what: str = "weights") -> Tensor:
        """All-gather of main weights or gradients: shape [bucket]. *Collective.* what: for the label."""
        whole = torch.zeros(self.layout.bucket_numel, dtype=shards[0].dtype, device=self.memory.device)
        inner = self.cuts.inner_shards(whole)
        for own, shard in zip(self.cuts.own_shards(inner), shards, strict=True):
            own.copy_(shard)
        with events.waiting(Label("all_gather", f"{self.name} {what}")):
            for pending in self.gather_shards(whole, inner, WHOLE, what):
                pending.wait()
        return whole

    @property
    def grad_shards(self) -> list[Tensor]:
        return [] if self.gradients is None else self.gradients.main_shards

    # -- views ---------------------------------------------------------------------------------------------------

    def named_slices(self, bucket: Tensor) -> list[tuple[str, Tensor]]:
        return list(zip((slot.spec.name for slot in self.layout.slots), views_of(bucket, self.layout), strict=True))

    def persistent_bytes(self) -> dict[str, int]:
        """Bytes this rank keeps until a step's gradients are forgotten, by role; padding is counted apart."""
        held = [
            ("compute_weights", self.kept, self.placements.resting_weights),
            ("main_weights", self.main_storage, self.placements.main_weights),
        ]
        held += [] if self.gradients is None else self.gradients.kept()
        found = dict.fromkeys(("compute_weights", "main_weights", "main_grads", "padding"), 0)
        for role, tensor, on in held:
            if tensor is not None:
                numel = self.cuts.param_numel(on)
                found[role] = found.get(role, 0) + numel * tensor.itemsize
                found["padding"] += (tensor.numel() - numel) * tensor.itemsize
        return found
