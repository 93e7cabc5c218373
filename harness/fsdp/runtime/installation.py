"""Installation after an update: main weights become compute weights, here and on ranks that take them from here."""

from __future__ import annotations

from collections.abc import Sequence

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import Pending
from harness.fsdp.comm.events import Label
from harness.fsdp.comm.user_buffers import UserBuffers
from harness.fsdp.guards.replicas import ReplicaCheck
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.step import Step
from harness.fsdp.storage import edits
from harness.fsdp.storage.codec import Scales
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.parameter_access import by_engine


def install_weights(buckets: Sequence[ParamGroup]) -> list[Pending]:
    """Copy updated main weights into compute weights that are kept. *Collective.*

    Returns gathers to wait for before main weights change again.
    """
    pending = [each for bucket in buckets for each in bucket.install()]
    with events.waiting(*(Label("all_gather", bucket.name) for bucket in buckets if bucket.is_resident and pending)):
        for each in pending:
            each.wait()
    return pending


class WeightInstaller:
    """Installs updated main weights as compute weights.

    Args:
        buckets: all of the model's.
        gather: whose unsharded weights are stale after an update.
        user_buffers: told after the first step, where registration waits for it.
        replicas: compares, every few updates, weights that several ranks hold.
        step: told that weights have changed.
        scales: of FP8 layers, which follow from those; none in other models.
    """

    def __init__(
        self,
        buckets: Sequence[ParamGroup],
        gather: GatherPipeline,
        user_buffers: UserBuffers,
        replicas: ReplicaCheck,
        step: Step,
        scales: Sequence[Scales],
    ) -> None:
        self.buckets = buckets
        self.gather = gather
        self.user_buffers = user_buffers
        self.replicas = replicas
        self.step = step
        self.scales = scales
        self.pending: list[Pending] = []

    def bring_up_to_date(self) -> None:
        """Install main weights written since the last install. *Collective* if any were."""
        if any(bucket.is_stale for bucket in self.buckets):
            self.install(step_ended=self.step.has_ended)

    @by_engine
    def install(self, *, step_ended: bool = False) -> None:
        """Install main weights as compute weights and reshard. *Collective.*

        Args:
            step_ended: after an optimizer step, which ends a step of delayed scaling.

        Raises:
            RuntimeError: compute weights were edited in place and would be overwritten; or `unsharded()` holds some.
            ReplicaDrift: see `harness.fsdp.guards.replicas.check_equal`.
        """
        self.refuse_held()
        self.adopt_edits()
        self.gather.reshard_all()
        self.wait()
        self.step.weights_installed()
        for each in self.scales:
            each.refresh(step_ended=step_ended)
        if step_ended:
            self.gather.step_ended()
        self.pending = install_weights(self.buckets)
        for bucket in self.buckets:
            bucket.installed_version = bucket.main_version
        if self.user_buffers.due or self.replicas.is_due:
            self.wait()
        if self.user_buffers.due:
            self.user_buffers.step_done()
        self.replicas.after_step()

    def agree_on_scales(self) -> None:
        """Make scales of weights of which a rank knows a portion only, once all have their first values.

        *Collective* where tensor parallelism has cut weights of 8 bits.
        """
        cut = [each for each in self.buckets if each.codec.shares_tiles]
        if not cut:
            return
        for scales in self.scales:
            scales.refresh(step_ended=False)
        for each in install_weights(cut):
            each.wait()
        for bucket in cut:
            bucket.receive()

    def refuse_held(self) -> None:
        if self.gather.holds:
            raise RuntimeError(
                "weights cannot be updated or loaded while model.unsharded() or a method such as generate() holds them"
                " whole: call optimizer.step() and load_state_dict() outside"
            )

    @by_engine
    def adopt_edits(self) -> None:
        """Copy edits of unsharded weights to main weights; RuntimeError where that is impossible."""
        if not self.gather.holds:
            for bucket in self.buckets:
                if not bucket.computes_with_main_weights and bucket.views.edited():
                    edits.adopt(bucket)
                    edits.refuse_lost(bucket)

    def wait_for_readers(self) -> None:
        """Wait until neither ranks nor the device read main weights."""
        self.gather.wait_for_readers()
        self._wait_for_device()

    def _wait_for_device(self) -> None:
        for bucket in self.buckets:
            if bucket.let_host_write():
                return

    def before_edit(self) -> None:
        if self.pending or any(bucket.awaited is not None for bucket in self.buckets):
            self.wait()
        self.before_update()

    def before_update(self) -> None:
        """Called before an optimizer writes main weights.

        A forward may have run since the backward, and other ranks may still be in it. The device may still copy
        offloaded weights of the step before.
        """
        if self.gather.is_read:
            self.gather.wait_for_readers()
        self._wait_for_device()

    @by_engine
    def wait(self, *, writes: bool = False) -> None:
        """Wait until other ranks have taken this rank's weights.

        Args:
            writes: main weights are written next, outside a step.
        """
        if writes:
            self.wait_for_readers()
        for bucket in self.buckets:
            bucket.receive()
        with events.waiting():
            for each in self.pending:
                each.wait()
        self.pending = []
