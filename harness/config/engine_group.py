"""The group `engine`: which engine, and what only some engines take."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from harness.fsdp.vocabulary import GradBuffer


class EngineName(Enum):
    """What shards the model and steps its optimizer."""

    native = "native"
    fsdp2 = "fsdp2"
    fsdp1 = "fsdp1"
    ddp = "ddp"
    megatron_fsdp = "megatron_fsdp"
    deepspeed = "deepspeed"
    single = "single"
    ext = "ext"


@dataclass
class EngineConfig:
    """Which engine, and what only some engines take."""

    name: EngineName = EngineName.native
    """Engine."""
    adapter: str | None = None
    """A class of your own that implements `harness.engines.protocol.Engine`, as `package.module:Class` (ext)."""
    prefetch: int = 1
    """Units gathered ahead of the one in use (native)."""
    prefetch_limit_bytes: int | None = None
    """Most bytes of weights gathered ahead of the unit in use; null: whatever prefetch allows (native)."""
    double_buffer: bool = False
    """Two fixed buffers for gathered weights and two for unreduced gradients: nothing is allocated after the first
    step, and more than two units alive are an error (native)."""
    unit_min_elements: int = 0
    """Neighbouring units are joined until they have so many elements; 0 joins none (native)."""
    accumulate_unsharded: bool = False
    """Under ZeRO-2 and 3, all microbatches but the last wait unreduced: one reduction a step, for a whole gradient in
    memory (native)."""
    grad_buffer: GradBuffer = GradBuffer.flat
    """flat: autograd writes gradients where they are sent from. concat: it allocates one each, which are copied
    together when they are reduced, and exist twice for that time (native)."""
    offload_optimizer: bool = False
    """Main weights, main gradients and optimizer state lie in host memory, where they are stepped (native)."""
    separate_gather_group: bool | None = None
    """Whether gathers have a communicator of their own; null: on CUDA (native)."""
    eager_limit_bytes: int | None = 262_144
    """Bytes a peer up to which gloo sends; longer data is read from the memory of a rank on this host. null: always
    sends (native)."""
    report_nan_in_param_grad: bool = False
    """Look for NaN and infinity in every gradient before its reduction; the error names tensor, rank and microbatch."""
    watchdog_timeout_s: float | None = None
    """Seconds a wait for a collective may last before all ranks end with one error naming ranks, unit and collective;
    null: as long as the backend waits (native)."""
    check_collectives: bool = False
    """Compare every collective over all ranks before its data moves; slow, for finding mismatches (native)."""
    check_replicas_every: int = 0
    """Steps after which ranks compare a hash of the weights that several of them hold; 0 never (native)."""
