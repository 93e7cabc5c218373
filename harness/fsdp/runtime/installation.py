"""Installation after an update: main weights become compute weights, here and on ranks that take them from here.

[Note: Weights on their way] After an update, a bucket that is kept whole between uses gets the parts that others
updated. On a device nobody waits for them at once: each unit waits for its own when it is used for the first time, so
that the forward begins beside the gathers of later units. Until then its parameters stay *resting* ([Note: The class of
a parameter]), inside the forward too: whoever touches one, wherever, waits for all first. On a CPU everything is
received as it is installed.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.fsdp.comm.device import DeviceRuntime
from harness.fsdp.comm.user_buffers import UserBuffers
from harness.fsdp.guards.replicas import ReplicaCheck
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.step import Step
from harness.fsdp.storage import edits
from harness.fsdp.storage.codec import Scales
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.parameter_access import by_engine


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
        runtime: DeviceRuntime,
    ) -> None:
        self.buckets = buckets
        self.gather = gather
        self.user_buffers = user_buffers
        self.replicas = replicas
        self.step = step
        self.scales = scales
        self.runtime = runtime

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
        self._install(self.buckets)
        if self.user_buffers.due or self.replicas.is_due:
            self.wait()
        if self.user_buffers.due:
            self.user_buffers.step_done()
        self.replicas.after_step()

    def _install(self, buckets: Sequence[ParamGroup]) -> None:
        for bucket in buckets:
            bucket.install()
        if not self.runtime.has_streams:
            for bucket in buckets:
                bucket.receive()

    def agree_on_scales(self) -> None:
        """Make scales of weights of which a rank knows a portion only, once all have their first values.

        *Collective* where tensor parallelism has cut weights of 8 bits.
        """
        cut = [each for each in self.buckets if each.codec.shares_tiles]
        for scales in self.scales if cut else ():
            scales.refresh(step_ended=False)
        self._install(cut)
        self.wait()

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

    def before_edit(self) -> None:
        """Main weights are written next, outside a step: wait for whoever takes or reads them."""
        self.wait()
        self.before_update()

    def before_update(self) -> None:
        """Called before an optimizer writes main weights.

        A forward may have run since the backward, and other ranks may still be in it. The device may still copy
        offloaded weights of the step before.
        """
        self.gather.wait_for_readers()
        self._wait_for_device()

    def _wait_for_device(self) -> None:
        if self.buckets[0].plan.offload is not None:
            self.runtime.synchronize()

    @by_engine
    def wait(self) -> None:
        """Wait until this rank has the weights that others updated."""
        for bucket in self.buckets:
            bucket.receive()
