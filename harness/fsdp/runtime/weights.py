"""Weights of a model outside its passes: installed after an update, and unsharded for the program itself.

[Note: Weights on their way] After an update, a bucket that is kept whole between uses gets the parts that others
updated. On a device each unit waits for its own when it is used for the first time, so that the forward begins beside
the gathers of later units. Until then its parameters stay sharded. On a CPU everything is received as it is installed.

What was edited inside `unsharded()` is told on leaving, by torch's counters and where this rank's own part is no longer
what the main weights give when cast (through numpy, say). If any rank saw an edit, each takes over the elements of its
part that differ, so that others keep the bits that the compute dtype does not have, and all install.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from harness.fsdp.comm.mesh import Meshes
from harness.fsdp.comm.user_buffers import UserBuffers
from harness.fsdp.guards.replicas import check_equal, held_by_several
from harness.fsdp.runtime.hooks import Hooks
from harness.fsdp.runtime.units import Unit, buckets_of, rest
from harness.fsdp.storage.codec import refresh_scales
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.parameter_access import by_engine


class Weights:
    """Installs updated main weights as compute weights; unshards units for the program, and takes over its edits.

    Args:
        user_buffers: told after the first step, where registration waits for it.
        check_every: updates between comparisons of weights that several ranks hold; 0: never.
    """

    def __init__(self, hooks: Hooks, meshes: Meshes, user_buffers: UserBuffers, check_every: int) -> None:
        self.hooks, self.units, self.gather, self.step = hooks, hooks.units, hooks.gather, hooks.step
        self.buckets = buckets_of(hooks.units)
        self.meshes, self.runtime = meshes, meshes.dense.everyone.runtime
        self.user_buffers, self.check_every = user_buffers, check_every
        self._in_8_bits = [(each.codec, each.main_shards, each.mesh) for each in self.buckets if each.codec is not None]
        self._num_installs = 0
        self._on_way: Sequence[ParamGroup] = ()  # whose update nobody has waited for

    @property
    def module(self) -> nn.Module:
        return self.units[0].module

    # -- install ---------------------------------------------------------------------------------------------------

    def bring_up_to_date(self) -> None:
        """Install main weights written since the last install. *Collective* if any were."""
        if any(bucket.is_stale for bucket in self.buckets):
            self.install()

    @by_engine
    def install(self) -> None:
        """Install main weights as compute weights and reshard. *Collective.*

        RuntimeError: compute weights were edited in place and would be overwritten; or `unsharded()` holds some.
        ReplicaDrift: see `harness.fsdp.guards.replicas.check_equal`.
        """
        self.refuse_held()
        self.refuse_edits()
        self.gather.reshard_all()
        self.wait()
        self.step.num_updates += 1
        refresh_scales(self._in_8_bits, self.meshes)
        for bucket in self.buckets:
            bucket.install()
        self._on_way = self.buckets
        if not self.runtime.has_streams:
            self.wait()
        self._num_installs += 1
        compares = self.check_every and self._num_installs % self.check_every == 0
        if self.user_buffers.due or compares:
            self.wait()
        if self.user_buffers.due:
            self.user_buffers.register()
        for comm, replicas in held_by_several(self.buckets, self.meshes) if compares else ():
            check_equal(replicas, comm, f"after update {self._num_installs}")

    @by_engine
    def wait(self) -> None:
        on_way, self._on_way = self._on_way, ()
        for bucket in on_way:
            bucket.receive()

    # -- before main weights are written -----------------------------------------------------------------------------

    def refuse_held(self) -> None:
        if self.gather.holds:
            raise RuntimeError(
                "weights cannot be updated or loaded while model.unsharded() or a method such as generate() holds them"
                " whole: call optimizer.step() and load_state_dict() outside"
            )

    @by_engine
    def refuse_edits(self) -> None:
        """RuntimeError where unsharded weights were edited, which main weights do not have."""
        if not self.gather.holds:
            for bucket in self.buckets:
                bucket.refuse_lost_edits()

    def before_edit(self) -> None:
        """Called before an optimizer, or the program, writes main weights.

        A forward may have run since the backward, and other ranks may still be in it. The device may still copy
        offloaded weights of the step before.
        """
        self.wait()
        self.gather.wait_for_readers()
        if self.buckets[0].plan.offload is not None:
            self.runtime.synchronize()

    # -- unsharded for the program -----------------------------------------------------------------------------------

    @contextmanager
    def unsharded(self, wanted: nn.Module | None = None) -> Iterator[None]:
        units = self._units_of(wanted)
        self.hooks.recover()
        if self.hooks.is_inside:
            raise RuntimeError("unsharded() inside the model's forward or backward: weights that run are whole already")
        self.hooks.check_module()
        self.refuse_edits()
        self.bring_up_to_date()
        self.wait()
        held, buckets = self.gather.hold(units), buckets_of(units)
        self.gather.wait_for_peers()  # the program may edit what they read
        for bucket in buckets_of(held):
            bucket.views.forget_edits()  # those from before
        for bucket in buckets:
            bucket.use()
            bucket.views.sharded().count_edits()
        try:
            yield
            edited = self._take_edits(buckets)
        finally:
            self.gather.let_go(held)
            rest(held)
        if edited:
            self.install()

    def _units_of(self, wanted: nn.Module | None) -> list[Unit]:
        """Raises ValueError where a parameter of it is not the model's."""
        if wanted is None:
            return list(self.units)
        params = {id(param) for param in wanted.parameters()}
        found = [unit for unit in self.units if params & _params_in(unit)]
        if not params <= set().union(*map(_params_in, found)):
            raise ValueError("unsharded() was given a module that is not the sharded model's, or a part of it")
        return found

    def _take_edits(self, buckets: Sequence[ParamGroup]) -> bool:
        """Have each rank take over edits of its own part; true if any rank made some. *Collective.*"""
        differing = [bucket.differing() for bucket in buckets]
        seen = any(bucket.views.edited() for bucket in buckets) or any(
            bool(places.any()) for each in differing for places in each
        )
        flag = torch.tensor(int(seen), device=self.runtime.device)
        is_edited = bool(self.meshes.dense.everyone.sum_scalars(flag, "edits of gathered weights"))
        for bucket, places in zip(buckets, differing, strict=True):
            if is_edited:
                bucket.take_over(places)
            bucket.views.forget_edits()
        return is_edited


def _params_in(unit: Unit) -> set[int]:
    params = (param for bucket in unit.buckets for _, param in bucket.params)
    return {id(param) for param in params} | {id(param) for bucket in unit.buckets for param in bucket.views.at_rest}
