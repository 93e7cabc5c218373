"""The groups `nccl_ub` and `sharp`: settings of NCCL.

They are in the signature: who sums, and in what order, can change numbers. `harness.fsdp.options` declares the engine's
own options, with the sentences of fields that have none here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from harness.config.number import number
from harness.fsdp.options import Options
from harness.fsdp.vocabulary import CtaPolicy, Fallback, Registration, SharpAxis


class NcclLog(Enum):
    none = "none"
    setup = "setup"
    choices = "choices"


@dataclass
class NcclUbConfig:
    """NCCL user buffers: collectives read and write the engine's buckets without a copy, on few thread blocks."""

    mode: Registration = Options.nccl_ub
    symmetric: bool = not Options.disable_symmetric_registration
    """Register buckets as symmetric windows, for which NCCL 2.27 has special kernels. false: they are
    registered only for NVLink SHARP and zero copy."""
    fallback: Fallback = Options.registration_fallback
    cta_policy: CtaPolicy = CtaPolicy.default
    """How many thread blocks NCCL uses for a collective."""
    min_ctas: int | None = number(None, 1, 64, "thread blocks")
    """Fewest thread blocks of a collective. null: NCCL chooses."""
    max_ctas: int | None = number(None, 1, 64, "thread blocks")
    """Most thread blocks of a collective. null: NCCL chooses."""


@dataclass
class SharpConfig:
    """SHARP: reductions inside NVLink switches and InfiniBand switches. Their order of sums is not guaranteed.

    default leaves both kinds to NCCL and to exported variables, as in other programs, and records what took effect.
    none turns both off, so that NCCL's thread blocks on the devices make all sums.
    """

    group: SharpAxis = SharpAxis.default
    """The communicator that uses InfiniBand SHARP; only one communicator of a run can."""
    nvlink: bool = True
    """Use NVLink SHARP (NVLS) for all communicators of the run, if group names an axis and the devices have it."""
    infiniband: bool = True
    """Use InfiniBand SHARP (CollNet) for the communicator that group names, if two or more machines share a switch."""
    algo: str | None = None
    """Value of NCCL_ALGO, such as CollnetDirect or ^NVLS. null: NCCL chooses."""
    nvls_ctas: int | None = number(None, 1, 64, "thread blocks")
    """Thread blocks of a collective over NVLink SHARP. null: NCCL chooses."""
    streaming: bool = True
    """Streaming aggregation of long messages (InfiniBand SHARP). A switch has room for two such flows."""
    overlap_gather: bool = False
    """Let gathers and reductions overlap in the SHARP plugin, as HPC-X 2.26 can (InfiniBand SHARP)."""
