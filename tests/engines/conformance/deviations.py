"""What peers are known to do differently, reported upstream, and not for an adapter to hide."""

from __future__ import annotations

from dataclasses import dataclass

from tests.engines.conformance.cases import Case


@dataclass(frozen=True)
class Deviation:
    """Asserted to be there, so that a release that mends it is noticed."""

    engine: str
    optimizer: str
    checks: tuple[str, ...]
    """Checks that fail for it, in every case it applies to."""
    report: str
    """Where it is written down."""

    def applies(self, case: Case) -> bool:
        """Whether a case meets it."""
        return (case.engine, case.optimizer) == (self.engine, self.optimizer)


KNOWN_DEVIATIONS: tuple[Deviation, ...] = ()
