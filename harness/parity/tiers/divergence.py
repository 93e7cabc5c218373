"""How two runs part whose steps are all checked: by chaos, each right given its own past, or by something else.

Where every step of both runs was seen to be right, a difference between them is no difference of what they do. What the
streams cannot see is the forward and the backward of a later step: that they compute the model; and what an optimizer
did to elements that nobody followed. There three questions remain, all asked of what is known of the weights' distance
D:

    gradients  do they jump, given the weights?  (`apart`)
    weights    do they jump, given those before?  (`apart`)
    losses     a loss differs by no more than its gradient along the way between the two: by the trapezoid rule
               L(a) - L(c) = (g(a) + g(c)) / 2 . (a - c), up to the third order, and so by at most the mean of the two
               gradients' norms times D. The factor SAFETY covers the third order and the error of D.

Their answers raise a doubt and refute nothing: once gradients differ (`alike`), a difference alone, where all witnesses
pass, is never DIFFERENT. Where
the control is no longer stable (`stability.stable_until`) curvature bursts, and K and the gradient between the two with
it: they are asked with that much more room (`apart.BURST`, its root for a gradient).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.parity.outcome import Finding, Stage
from harness.parity.record import Record
from harness.parity.tiers.apart import BURST, Apart, Jump, apart, gradient_jumps, weight_jumps
from harness.parity.tiers.arithmetic import SAFETY
from harness.parity.tiers.envelope import Envelope
from harness.parity.tiers.graded import Series
from harness.parity.tiers.trajectory import ROUNDED, Perturbation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]

GIVEN = "{} given the weights"
WEIGHTS = "weights given those before"
JUMPS = (*(GIVEN.format(what) for what in ("local gradient", "gradient", "loss")), WEIGHTS)
"""Checks of a jump: they raise a doubt at the step where it begins, and refute nothing."""


@dataclass(frozen=True)
class Divergence:
    """Growth of the distance of two runs by their streams.

    found: distances. last_stable: last step at which the control is stable. first_captured: gradients of step 1 were
    captured by both, and are judged elsewhere. gathers_twice: one of the two gathers weights again in the backward.
    """

    found: Apart
    envelope: Envelope
    push: Perturbation
    last_stable: int
    first_captured: bool
    gathers_twice: bool

    @classmethod
    def of(
        cls,
        arm: Record,
        control: Record,
        envelope: Envelope,
        push: Perturbation,
        last_stable: int,
        *,
        first_captured: bool,
    ) -> Divergence | None:
        """None where one of the two has no stream, or they have no sketch in common."""
        if arm.stream is None or control.stream is None:
            return None
        found = apart(arm.stream, control.stream)
        twice = arm.gathers_twice or control.gathers_twice
        return None if found is None else cls(found, envelope, push, last_stable, first_captured, twice)

    @property
    def sees_gradients(self) -> bool:
        import numpy as np

        return bool(self.found.steps[0] == 1 and not np.isnan(self.found.local[0]).all())

    def check(self, certain: int, *, wide: bool = True) -> list[list[Finding]]:
        """Jumps, a list a kind.

        Args: certain: last step up to which both are known right; weights are judged up to there, and while the control
        is stable. wide: main weights have more than 16 bits; otherwise weights are judged after `certain` alone.
        """
        import numpy as np

        local = gradient_jumps(self.found, self.found.local, self.envelope, self.last_stable)
        reduced = gradient_jumps(self.found, self.found.reduced, self.envelope, self.last_stable)
        weights = weight_jumps(self.found, self.push, self.last_stable)
        asked = np.where(weights.steps <= certain, wide, weights.steps <= self.last_stable)
        begins = Stage.gather if self.gathers_twice else Stage.forward
        seen, after = bool(len(local.steps)), Stage.clipping if len(reduced.steps) else begins
        kinds = [
            self._graded(GIVEN.format("local gradient"), local, Stage.gradient, begins),
            self._graded(GIVEN.format("gradient"), reduced, Stage.reduction, Stage.reduction if seen else begins),
            self._graded(WEIGHTS, weights.at(asked), Stage.optimizer, after),
        ]
        return [kind for kind in kinds if kind]

    def _graded(self, check: str, jump: Jump, stage: Stage, since: Stage) -> list[Finding]:
        import numpy as np

        judged = jump.steps > int(self.first_captured)
        steps, observed, allowed = jump.steps[judged], jump.observed[judged], jump.allowed[judged]
        series = Series(
            check,
            stage,
            steps,
            observed,
            allowed,
            np.full(len(steps), np.inf),
            since,
            note="a jump: nothing that the two runs had come apart by before explains it",
        )
        tensors = jump.tensors[judged]
        return series.findings(lambda at: self.found.names[int(tensors[at])])


def losses(arm: Record, control: Record, envelope: Envelope, last: int, last_stable: int) -> list[Finding]:
    """Losses after step 1 up to `last` against the weights' distance, with a wider bound after `last_stable`."""
    import numpy as np

    if arm.stream is None or control.stream is None:
        return []
    count = arm.stream.sketches
    pairs = [tuple(run.stream.column(f"after_{j}") for run in (arm, control) if run.stream) for j in range(count)]
    rows = min(last, *(len(each) for pair in pairs for each in pair))
    squares = np.mean([(left[:rows] - right[:rows]) ** 2 for left, right in pairs], axis=0)
    distances = np.maximum.accumulate(np.sqrt(np.nan_to_num(squares, nan=np.inf)))
    values = [np.array(run.series(key)[:rows], float) for key in ("loss", "grad_norm") for run in (arm, control)]
    left, right, steep, steeper = (each[1:] for each in values)
    with np.errstate(divide="ignore", invalid="ignore"):
        observed = np.where(left == right, 0.0, np.abs(left - right) / np.abs(right))
        slope = SAFETY * (steep + steeper) / 2 * distances[:-1] / np.abs(right)
        slope *= np.where(np.arange(2, rows + 1) <= last_stable, 1.0, math.sqrt(BURST))
    allowed = np.nan_to_num(envelope.loss + ROUNDED + slope, nan=np.inf)
    note = "a jump: the distance of the two runs' weights does not explain it"
    return Series(
        GIVEN.format("loss"),
        Stage.gradient,
        np.arange(2, rows + 1),
        observed,
        allowed,
        np.full(len(observed), np.inf),
        Stage.forward,
        note,
    ).findings()
