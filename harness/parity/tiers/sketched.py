"""T2 at step 1 against a baseline, which has sketches of the gradients and none of them whole.

Four sketches S_j tell the distance of two tensors by d^2 = mean over j of (S_j(a) - S_j(c))^2, too long by `DRAW` once
in 10^9 (`tiers.apart`). So d <= DRAW B where rounding explains B (`Envelope.tensor`), and twice that is refuted. The
norms of both were added up exactly, and differ by no more than the tensors do: | |a| - |c| | <= B |c|, without a
draw. A factor on a gradient therefore shows from B on, and anything else from DRAW B.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.parity.outcome import REFUTED, Finding, Grade, Stage, measured
from harness.parity.tiers.apart import DRAW, Apart
from harness.store.check_stream import Stream, tensor_columns

if TYPE_CHECKING:
    from harness.parity.tiers.envelope import Envelope

DISTANCE, LENGTH = "gradient distance, sketched", "length of a gradient"


def first_step(arm: Stream, control: Stream, found: Apart, envelope: Envelope) -> list[list[Finding]]:
    """Findings of step 1, a list a kind; in doubt at most where routes may be others, or gradients be lost."""
    import numpy as np

    unsure = envelope.flips or envelope.loses_gradients
    off = np.where(np.isnan(found.reduced[0]), found.local[0], found.reduced[0])
    lengths = [_lengths(stream) for stream in (arm, control)]
    kinds: list[list[Finding]] = [[], []]
    for name, numel, distance in zip(found.names, found.numel, off.tolist(), strict=True):
        bound, (left, right) = envelope.tensor(name, numel), (each[name] for each in lengths)
        longer = 0.0 if left == right else abs(left - right) / right if right else math.inf
        for kind, check, observed, allowed in ((0, DISTANCE, distance, DRAW * bound), (1, LENGTH, longer, bound)):
            refuted = math.inf if unsure else REFUTED * allowed
            if not math.isnan(observed):
                kinds[kind] += [measured(check, Stage.gradient, observed, allowed, refuted, step=1, tensor=name)]
    return [kind for kind in kinds if kind]


def _lengths(stream: Stream) -> dict[str, float]:
    """Norm of each reduced gradient of step 1; not a number where it was not seen."""
    squares = stream.kept()[1][0][:, tensor_columns(stream.sketches).index("reduced_squares")]
    return {each.name: math.sqrt(square) for each, square in zip(stream.tensors, squares.tolist(), strict=True)}


def blindness(envelope: Envelope) -> list[Finding]:
    """Doubt where a structural fault could hide beneath what the norm of all gradients refutes.

    One of N ranks that is missing, of gradients that are noise, shortens their mean by half of 1/N.
    """
    seen, needed = REFUTED * envelope.norm, envelope.smallest_fault / 2
    if seen <= needed:
        return []
    note = "rounding could hide one rank's contribution from sketches and norms; compare the runs themselves"
    return [Finding("T2", "resolution", Stage.gradient, Grade.doubt, seen, needed, step=1, note=note)]
