"""What a sharded model is made of, and what can be told of it without running a step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from harness.fsdp.comm.device import DeviceRuntime
from harness.fsdp.comm.mesh import Everyone, Meshes
from harness.fsdp.comm.user_buffers import UserBuffers
from harness.fsdp.guards.nonfinite import GradientGuard
from harness.fsdp.guards.watches import Watches
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.gradient_sync import GradientSync
from harness.fsdp.runtime.hooks import Hooks
from harness.fsdp.runtime.installation import WeightInstaller
from harness.fsdp.runtime.reduce import ReducePipeline
from harness.fsdp.runtime.step import Step
from harness.fsdp.runtime.trainability import Trainability
from harness.fsdp.runtime.units import Unit, buckets_of
from harness.fsdp.runtime.whole_weights import WholeWeights
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.memory import BucketMemory


@dataclass(frozen=True)
class Components:
    """The parts of one sharded model, wired to each other by `harness.fsdp.construction.build`.

    divisor: what a step's summed gradients are divided by. guard: None where nobody looks for gradients that are not
    finite. units: in forward order, the root first.
    """

    runtime: DeviceRuntime
    meshes: Meshes
    memory: BucketMemory
    user_buffers: UserBuffers
    divisor: float
    units: list[Unit]
    step: Step
    guard: GradientGuard | None
    gather: GatherPipeline
    reduce: ReducePipeline
    hooks: Hooks
    weights: WeightInstaller
    gradients: GradientSync
    trainability: Trainability
    watches: Watches
    whole: WholeWeights

    @property
    def everyone(self) -> Everyone:
        return self.meshes.everyone

    @property
    def is_closed(self) -> bool:
        """True if hooks were taken off, so that the module is the program's alone."""
        return not self.hooks.is_installed

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of all units, in model order."""
        return list(buckets_of(self.units))

    def persistent_bytes(self, module: nn.Module) -> dict[str, int]:
        """Bytes this rank keeps, by role; see `harness.fsdp.model.ShardedModel.persistent_bytes`."""
        total = {"compute_weights": 0, "main_weights": 0, "main_grads": 0, "padding": 0, "optimizer": 0}
        for bucket in self.buckets:
            for role, num_bytes in bucket.persistent_bytes().items():
                total[role] = total.get(role, 0) + num_bytes
        scales = sum(bucket.codec.scale_bytes for bucket in self.buckets)
        total["buffers"] = sum(buffer.nbytes for buffer in module.buffers()) + scales
        return total

    def transport(self) -> dict[str, str]:
        """How data moves between ranks on each axis of the dense mesh; keys of the outer one begin with outer_."""
        dense = self.meshes.dense
        outer = {f"outer_{key}": value for key, value in dense.outer.transport().items()} if dense.outer else {}
        return dense.inner.transport() | outer

    def counters(self) -> dict[str, int]:
        """Peaks and totals so far; see `harness.fsdp.model.ShardedModel.counters`."""
        return {
            "transient_peak_bytes": self.memory.peak_bytes,
            "gathered_units_peak": self.gather.num_alive_peak,
            "peer_read_bytes": sum(memory.bytes_read for memory in self.meshes.peer_memories),
        }

    def reset_counters(self) -> None:
        """Begin `counters` anew: peaks from what is alive now, totals from 0."""
        self.memory.reset_peak()
        self.gather.reset_peak()
        for memory in self.meshes.peer_memories:
            memory.bytes_read = 0

    def close(self) -> None:
        """Take hooks off and end threads, once what is under way has landed, here and on ranks that take it from here.

        After an alarm of the watchdog nothing lands any more, and nothing is waited for.
        """
        try:
            if not self.watches.is_over:
                self.reduce.drain()
                self.reduce.wait_until_sent()
                self.gather.wait_for_others()
                self.weights.wait()
        finally:
            self.watches.close()
            self.hooks.remove()
            self.reduce.close()
            self.user_buffers.close()
            for mesh in self.meshes:
                mesh.close()
