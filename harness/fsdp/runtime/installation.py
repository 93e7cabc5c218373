"""What follows an update: main weights become compute weights, on this rank and on those that take them from it."""

from __future__ import annotations

from collections.abc import Sequence

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import Pending
from harness.fsdp.comm.events import Label
from harness.fsdp.comm.user_buffers import UserBuffers
from harness.fsdp.guards.replicas import ReplicaCheck
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.step import Step
from harness.fsdp.runtime.weight_scales import WeightScales
from harness.fsdp.storage import edits
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.parameter_access import by_engine


def install_weights(buckets: Sequence[Bucket]) -> list[Pending]:
    """After an update: bring main weights into compute weights that are kept (others are cast when gathered).

    Returns what must be waited for before this rank changes them again, where others may still take them from it. What
    buckets await is theirs to be received; see [Note: Weights on their way].
    """
    pending = [each for bucket in buckets for each in bucket.install()]
    with events.waiting(*(Label("all_gather", bucket.name) for bucket in buckets if bucket.is_resident and pending)):
        for each in pending:
            each.receive()
    return pending


class WeightInstaller:
    """Brings updated main weights into the compute weights of one model.

    Args:
        buckets: all of the model's.
        gather: whose unsharded weights are stale after an update.
        user_buffers: told after the first step, where registration waits for it.
        replicas: compares, every few updates, weights that several ranks hold.
        step: told that weights have changed.
        scales: of FP8 weights, which follow from those.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        gather: GatherPipeline,
        user_buffers: UserBuffers,
        replicas: ReplicaCheck,
        step: Step,
        scales: WeightScales,
    ) -> None:
        self.buckets = buckets
        self.gather = gather
        self.user_buffers = user_buffers
        self.replicas = replicas
        self.step = step
        self.scales = scales
        self.pending: list[Pending] = []
        """Gathers in which other ranks may still take this rank's weights."""

    def bring_up_to_date(self) -> None:
        """Install main weights that were written to since the last time, by an optimizer, a load or an edit.
        *Collective* if there are any: all ranks write to the same parameters."""
        if any(bucket.is_stale for bucket in self.buckets):
            self.install(step_ended=self.step.has_ended)

    @by_engine
    def install(self, *, step_ended: bool = False) -> None:
        """Bring main weights into the compute weights; unsharded ones are dropped. *Collective.*

        Args:
            step_ended: it was the optimizer that changed them, which ends a step of delayed scaling.

        Raises:
            RuntimeError: compute weights were edited in place, which the main weights would overwrite; or some are held
                whole by `gathered` or a method that runs as a forward.
            ReplicaDrift: see `harness.fsdp.guards.replicas.check_equal`.
        """
        self.refuse_held()
        self.adopt_edits()
        self.gather.reshard_all()
        self.wait()
        self.step.weights_installed()
        self.scales.refresh(step_ended=step_ended)
        if step_ended:
            self.gather.recomputation.agree()
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
        cut = [each for each in self.buckets if each.eight_bit is not None and each.eight_bit.has_tiles_elsewhere]
        if not cut:
            return
        self.scales.refresh(step_ended=False)
        for each in install_weights(cut):
            each.wait()
        for bucket in cut:
            bucket.receive()

    def refuse_held(self) -> None:
        """Raise RuntimeError where weights are held whole, which an update would not reach."""
        if self.gather.holds:
            raise RuntimeError(
                "weights cannot be updated or loaded while model.unsharded() or a method such as generate() holds them"
                " whole: call optimizer.step() and load_state_dict() outside"
            )

    @by_engine
    def adopt_edits(self) -> None:
        """Let main weights, which are used next, know edits of unsharded ones; RuntimeError where they cannot."""
        if not self.gather.holds:
            for bucket in self.buckets:
                if not bucket.computes_with_main_weights and bucket.views.edited():
                    edits.adopt(bucket)
                    edits.refuse_lost(bucket)

    def wait_for_readers(self) -> None:
        """Wait until main weights are read neither by other ranks nor by a device, and may be written."""
        self.gather.wait_for_readers()
        self._wait_for_device()

    def _wait_for_device(self) -> None:
        """Have the device read no main weights any more that lie on the host."""
        for bucket in self.buckets:
            if bucket.let_host_write():
                return

    def before_edit(self) -> None:
        """The program writes to sharded parameters next."""
        if self.pending or any(bucket.awaited is not None for bucket in self.buckets):
            self.wait()
        self.before_update()

    def before_update(self) -> None:
        """An optimizer writes main weights next.

        The gradients it waited for came after all reading in their backward. A program may run a forward between that
        and `step()`, and other ranks may still be in it. A device may still copy what another optimizer, or the same
        one, has just updated on the host: nothing has waited for that where no gradients came in between.
        """
        if self.gather.is_read:
            self.gather.wait_for_readers()
        self._wait_for_device()

    @by_engine
    def wait(self, *, writes: bool = False) -> None:
        """Wait until other ranks have taken this rank's weights, so that these may change.

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
