"""What is known of a bucket before it has storage: what its parameters have in common, and what all buckets share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.mesh import Mesh
from harness.fsdp.policy import Dtypes, MixedPrecisionPolicy
from harness.fsdp.storage.gradients import GradientPlan
from harness.fsdp.storage.placement import Placements
from harness.fsdp.vocabulary import OuterStrategy, Strategy

InitialValue = Callable[[str, torch.Size], Tensor]
"""Full value of the parameter with this name; any dtype and device, shape as asked."""


@dataclass(frozen=True)
class BucketKey:
    """What parameters of one bucket have in common.

    dtype: as the module has them. fp8: encodings in 8 bits that weights are kept and gathered in, one or one for each
    direction; 0: none.
    """

    dtype: torch.dtype
    trainable: bool
    expert: bool = False
    fp8: int = 0

    @property
    def label(self) -> str:
        """The bucket's name within its unit."""
        marks = ("" if self.trainable else "/frozen") + ("/experts" if self.expert else "")
        marks += ("", "/fp8", "/fp8x2")[self.fp8]
        return str(self.dtype).removeprefix("torch.") + marks

    def resolve(self, policy: MixedPrecisionPolicy) -> Dtypes:
        """The dtypes of its buffers; raises as `MixedPrecisionPolicy.resolve`."""
        dtypes = policy.resolve(self.dtype) if self.trainable else Dtypes.frozen(self.dtype)
        return dtypes.in_8_bits() if self.fp8 else dtypes


@dataclass(frozen=True)
class BucketContext:
    """What all buckets of one mesh share.

    plan: how gradients wait. strategy: what the inner axis splits. outer: what the outer axis splits, if there is one.
    tensor: the axis over which parameters were cut before; see [Note: Under tensor parallelism].
    """

    plan: GradientPlan
    mesh: Mesh
    strategy: Strategy
    outer: OuterStrategy = OuterStrategy.no_shard
    tensor: Communicator | None = None

    @property
    def placements(self) -> Placements:
        """How the buffers of a bucket lie: those of a frozen one, too, which may be trained later."""
        return Placements.of(self.strategy, self.outer if self.mesh.has_outer else None)

    @property
    def main_device(self) -> torch.device:
        """Where main weights, main gradients and optimizer state lie."""
        return self.plan.offload or self.plan.memory.device
