"""Settings of a bucket, and those that all buckets share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.mesh import Mesh
from harness.fsdp.policy import Dtypes, MixedPrecisionPolicy
from harness.fsdp.storage.memory import BucketMemory
from harness.fsdp.storage.placement import Placements
from harness.fsdp.vocabulary import GradBuffer, OuterStrategy, Strategy


class Accumulation(Enum):
    in_place = "autograd adds to the sums themselves"
    added = "added to the sums on this rank, and reduced once a step"
    reduced = "every backward's are reduced over the inner axis into the sums"


@dataclass(frozen=True)
class GradientPlan:
    """Shared by all buckets of a model.

    unsharded: microbatches under `no_sync` wait unreduced where the strategy splits gradients. integers: sums are int64
    (see `harness.fsdp.comm.fixed_point`). offload: device of main gradients, apart from the sums.
    """

    memory: BucketMemory
    buffer: GradBuffer = GradBuffer.flat
    unsharded: bool = False
    integers: bool = False
    offload: torch.device | None = None

    def accumulation(self, placements: Placements) -> Accumulation:
        if not placements.accumulates_locally:
            return Accumulation.reduced
        alike = not self.integers and self.buffer is GradBuffer.flat
        return Accumulation.in_place if alike else Accumulation.added


InitialValue = Callable[[str, torch.Size], Tensor]
"""Full value of the parameter with this name; any dtype and device, shape as asked."""


@dataclass(frozen=True)
class BucketKey:
    """dtype: as the module has them. fp8: encodings in 8 bits, 0, 1 or 2 (one for each direction)."""

    dtype: torch.dtype
    trainable: bool
    expert: bool = False
    fp8: int = 0

    @property
    def label(self) -> str:
        marks = ("" if self.trainable else "/frozen") + ("/experts" if self.expert else "")
        marks += ("", "/fp8", "/fp8x2")[self.fp8]
        return str(self.dtype).removeprefix("torch.") + marks

    def resolve(self, policy: MixedPrecisionPolicy) -> Dtypes:
        dtypes = policy.resolve(self.dtype) if self.trainable else Dtypes.frozen(self.dtype)
        return dtypes.in_8_bits() if self.fp8 else dtypes


@dataclass(frozen=True)
class BucketContext:
    plan: GradientPlan
    mesh: Mesh
    strategy: Strategy
    outer: OuterStrategy = OuterStrategy.no_shard
    tensor: Communicator | None = None

    @property
    def placements(self) -> Placements:
        return Placements.of(self.strategy, self.outer if self.mesh.has_outer else None)

    @property
    def main_device(self) -> torch.device:
        return self.plan.offload or self.plan.memory.device
