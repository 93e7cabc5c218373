"""The groups `nccl_ub` and `sharp`: what a run asks of NCCL. Part of the typed schema.

They are in the signature: who sums, and in what order, can change numbers. What the engine itself takes is declared in
`harness.fsdp.options`; a field without a sentence here has its sentence there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from harness.config.number import number
from harness.fsdp.options import Options
from harness.fsdp.vocabulary import CtaPolicy, Fallback, Registration, SharpAxis


class NcclLog(Enum):
    """What NCCL writes into the attempt's folder: nothing, how it was set up, or every collective's choice as well."""

    none = "none"
    setup = "setup"
    choices = "choices"


@dataclass
class NcclUbConfig:
    """NCCL user buffers: collectives read and write the engine's buckets without a copy, on few thread blocks."""

    mode: Registration = Options.nccl_ub
    symmetric: bool = not Options.disable_symmetric_registration
    """Whether buckets are registered as symmetric windows, which NCCL 2.27 has kernels of its own for; false registers
    them for NVLink SHARP and zero-copy alone."""
    fallback: Fallback = Options.registration_fallback
    cta_policy: CtaPolicy = CtaPolicy.default
    """Thread blocks a collective takes."""
    min_ctas: int | None = number(None, 1, 64, "thread blocks")
    """Fewest thread blocks a collective takes; null leaves it to NCCL."""
    max_ctas: int | None = number(None, 1, 64, "thread blocks")
    """Most thread blocks a collective takes; null leaves it to NCCL."""


@dataclass
class SharpConfig:
    """Reductions inside the network, by NVLink switches and InfiniBand switches; nobody promises their order of sums.

    On NCCL, default leaves both kinds to it and to what the user exported, as other programs do, and records what took
    effect; none turns both off: what such a run sums, its own thread blocks have summed.
    """

    group: SharpAxis = SharpAxis.default
    """Whose communicator owns InfiniBand SHARP, of which a run has one."""
    nvlink: bool = True
    """NVLink SHARP (NVLS), for every communicator of the run, where group names an axis and the devices have it."""
    infiniband: bool = True
    """InfiniBand SHARP (CollNet), for the one communicator of group, where two machines or more share a switch."""
    algo: str | None = None
    """NCCL_ALGO as typed, such as CollnetDirect or ^NVLS; null leaves the choice to NCCL."""
    nvls_ctas: int | None = number(None, 1, 64, "thread blocks")
    """Thread blocks a collective takes over NVLink SHARP; null leaves it to NCCL."""
    streaming: bool = True
    """Streaming aggregation of long messages; a switch has room for two such flows (InfiniBand SHARP)."""
    overlap_gather: bool = False
    """Lets gathers run beside reductions in the SHARP plugin, as HPC-X 2.26 can (InfiniBand SHARP)."""
