"""What peers are known to do differently, reported upstream, and not for an adapter to hide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.engines.conformance.cases import Case


@dataclass(frozen=True)
class Deviation:
    """Asserted to be there, so that a release that mends it is noticed."""

    engine: str
    when: Callable[[Case], bool]
    """Which of the engine's cases meet it."""
    checks: tuple[str, ...]
    """Checks that fail for it; at least one does in every such case."""
    report: str
    """Where it is written down."""

    def applies(self, case: Case) -> bool:
        """Whether a case meets it."""
        return case.engine == self.engine and self.when(case)


KNOWN_DEVIATIONS: tuple[Deviation, ...] = (
    Deviation(
        "deepspeed",
        lambda case: case.strategy != "no_shard",
        ("non-finite",),
        "docs/records/upstream/deepspeed_skips_nonfinite.md",
    ),
    Deviation(  # a step on zero gradients before the first: Adam counts it, momentum holds its weight decay
        "megatron_fsdp",
        lambda case: True,
        ("update", "weights", "loss", "gradient norm"),
        "docs/records/upstream/adam_first_updates.md",
    ),
    Deviation(
        "megatron_fsdp",
        lambda case: case.outer == "optim",
        ("gradient", "gradient scale"),
        "docs/records/upstream/hfsdp_sums_gradients.md",
    ),
)
