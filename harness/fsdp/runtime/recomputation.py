"""In which units a forward runs again in the backward, as all ranks know it; see [Note: Two payloads]."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.runtime.units import Unit
from harness.fsdp.storage.sides import BACKWARD, BOTH, FORWARD

PURPOSE = "recomputed forwards"
_RANKING = (0, BACKWARD, BOTH)


class Recomputation:
    """Which directions a backward gathers weights for, learned in the first step that has one.

    Args:
        units: of the model, in the same order on every rank.
        everyone: all ranks that gather together.
    """

    def __init__(self, units: Sequence[Unit], everyone: Communicator) -> None:
        gathered = (unit for unit in units if any(not bucket.is_resident for bucket in unit.buckets))
        self._seen = {unit: 0 for unit in gathered if unit.has_two_sides}
        self._everyone = everyone
        self._agreed: dict[Unit, int] = {}

    def note(self, unit: Unit, direction: int) -> None:
        """A backward has come to a unit, or asked for weights of a direction of it."""
        self._seen[unit] |= direction

    def directions(self, unit: Unit) -> int:
        """Directions that a backward gathers a unit's weights for: all until ranks have agreed on less."""
        return self._agreed.get(unit, BOTH)

    def agree(self) -> None:
        """A step has ended. *Collective* until ranks have agreed, in models with such units."""
        if not self._seen or self._agreed:
            return
        told = [_RANKING.index(BOTH if each & FORWARD else each) for each in self._seen.values()]
        known = torch.tensor(told, dtype=torch.int32, device=self._everyone.runtime.device)
        found = self._everyone.largest(known, PURPOSE).tolist()
        if any(found):
            self._agreed = {unit: _RANKING[most] or BOTH for unit, most in zip(self._seen, found, strict=True)}
