"""T2 over the steps: drift of losses and norms of runs that began alike.

At step 1 the weights and the data are the same, so the bound is that of one forward and backward (`envelope`). After it
two runs walk apart, and no bound of that kind exists: differences grow exponentially and end at the level of run-to-run
noise. The early steps carry the information, and the bounds say where it ends:

    perturbation
               rounding leaves the updates of step 1 a relative error. SGD passes the gradient's error rho on. Adam's
               first update is a sign: it flips where the gradient is smaller than its error, which moves the update by
               2 sqrt(rho / pi) of its size; but flips sit where the gradient is small, so the loss sees them in second
               order only, (1 + 4 / pi) rho. Muon's iteration runs in bfloat16, where what is rounded otherwise once is
               another draw of all its roundings: ITERATED of an update, which the loss sees in second order too.
    lever      an error of the trajectory moves the loss by at most that share of what the trajectory moved it.
    growth     EXPECTED_GROWTH a step is what stable training shows (measured: 1.0 to 1.7). MOST_GROWTH is the most a
               step can do while training stays stable at all: an update multiplies a difference along a curvature h by
               |1 - lr * h|, and curvature beyond 2 / lr in size makes the run itself diverge. Where a pair is seen to
               grow faster than that, what it was seen to grow by bounds it instead (`stability.grown`).
    stability  where the control's own gradient norm bursts or its loss climbs, no growth is bounded: from two steps
               before it on, a step whose losses differ by more than LOSS_CEILING is in doubt, and none is refuted
    ceiling    once the expected drift passes LOSS_CEILING, a single pair knows nothing more about single steps: what
               lies above is in doubt, and only what even MOST_GROWTH cannot explain is refuted. A persistent gap of the
               later half is in doubt beyond LOSS_MARGIN; paired seeds decide that, not a bound.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.config.roundoff import RMS, UNIT
from harness.parity.outcome import REFUTED, Finding, Stage, grade
from harness.parity.record import Record
from harness.parity.tiers.arithmetic import Arithmetic
from harness.parity.tiers.envelope import Envelope
from harness.parity.tiers.graded import Series
from harness.parity.tiers.stability import EXPECTED_GROWTH, MOST_GROWTH, grown, growths

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]
    Int64 = NDArray[np.int64]

LOSS_CEILING = 0.01
"""Relative. Clean runs at run-to-run noise differ by 1 to 5 % at single steps."""
NORM_CEILING = 0.1
LOSS_MARGIN = 1e-3
"""Relative, of a mean over the later half: the usual margin of an equivalence test over seeds."""
NORM_MARGIN = 0.05
TAIL = 20


@dataclass(frozen=True)
class Perturbation:
    """Relative errors of the first step's updates, as seen by the loss and by the weights."""

    loss: float
    weights: float
    signs: bool = True
    """True if an update is a sign, as Adam's first is, which flips where a gradient is small."""

    def given(self, gradients: Float64) -> Float64:
        """Perturbation of weights from the observed distance of gradients; at least that of rounding."""
        import numpy as np

        moved = np.minimum(1.0, 2 * np.sqrt(2 * gradients / math.pi)) if self.signs else 2 * gradients
        return np.maximum(self.weights, moved)


def perturbation(envelope: Envelope, optimizer: str, observed: float | None) -> Perturbation:
    """observed: distance of the whole gradients at step 1; None where none were captured."""
    rho = max(2 * (observed or 0.0), _fresh(envelope), 0.0 if observed is not None else envelope.distance)
    if optimizer == "sgd":
        return Perturbation(rho, rho, signs=False)
    drawn = ITERATED if optimizer == "muon" else 0.0
    return Perturbation((1 + 4 / math.pi) * rho + drawn**2, min(1.0, max(2 * math.sqrt(rho / math.pi), drawn)))


def _fresh(envelope: Envelope) -> float:
    """Gradient error of a later step even if step 1 showed none: that of the reduction.

    With bf16 weights, that of the whole pass: one unit of a main weight can flip a compute weight.
    """
    if envelope.is_low_precision:
        return envelope.error
    return math.hypot(_walk(envelope.arm), _walk(envelope.control))


def _walk(run: Arithmetic) -> float:
    return run.reduction + RMS * UNIT[run.main] * math.sqrt(run.global_microbatches)


ITERATED = 0.2
"""Relative distance of two orthogonalized matrices, of which one was rounded otherwise once. Measured: 0.01 to 0.1."""

LOSS = "loss"
NORM = "gradient norm"

ROUNDED = 4 * UNIT["fp32"]
"""Largest difference of a logged number of equal runs: a mean or a root of sums in fp32."""


@dataclass(frozen=True)
class Span:
    """Judged steps.

    last: before any non-finite value. last_stable: last with bounded growth.
    """

    last: int
    last_stable: int


def check(
    arm: Record, control: Record, envelope: Envelope, observed: float | None, span: Span, *, whole: bool = True
) -> list[list[Finding]]:
    """Findings of all steps, a list a kind: loss, gradient norm, weight norm, later half.

    Args: observed: distance of the whole gradients at step 1; None where none were captured. whole: include the later
    halves.
    """
    push = perturbation(envelope, str(control.config["optimizer.name"]), observed)
    kinds = [
        *(each.findings() for each in losses(arm, control, envelope, push, span)),
        _norms(arm, control, envelope, push, span).findings(),
        _weights(arm, control, envelope, push, span).findings(),
        *([finding] for finding in _tail(arm, control, envelope) if whole),
    ]
    return [findings for findings in kinds if findings]


def _pairs(key: str, arm: Record, control: Record, last: int) -> tuple[Int64, Float64, Float64]:
    import numpy as np

    left, right = (np.array(run.series(key)[:last], dtype=np.float64) for run in (arm, control))
    there = [a is not None and c is not None for a, c in zip(arm.series(key), control.series(key), strict=True)]
    places = np.flatnonzero(np.array(there[:last], dtype=bool) & (np.isfinite(left) | np.isfinite(right)))
    return places + 1, left[places], right[places]


def _relative(left: Float64, right: Float64) -> Float64:
    import numpy as np

    with np.errstate(divide="ignore", invalid="ignore"):
        off: Float64 = np.where(left == right, 0.0, np.abs(left - right) / np.abs(right))
    return off


def losses(arm: Record, control: Record, envelope: Envelope, push: Perturbation, span: Span) -> list[Series]:
    """Losses of step 1, and of the later ones, which depend on the updates before."""
    import numpy as np

    steps, left, right = _pairs("loss", arm, control, span.last)
    if not len(steps):
        return []
    moved = np.maximum(np.abs(right - right[0]), np.abs(np.diff(right, prepend=right[:1])))
    with np.errstate(divide="ignore", invalid="ignore"):
        levers = np.where(right != 0.0, np.maximum.accumulate(moved) / np.abs(right), 0.0)
    observed, drift = _relative(left, right), push.loss * levers
    allowed = envelope.loss + np.minimum(drift * growths(EXPECTED_GROWTH, steps), LOSS_CEILING)
    most = np.maximum(drift * growths(MOST_GROWTH, steps), np.where(steps > 2, grown(observed, ROUNDED), 0.0))
    refuted = np.maximum(allowed, REFUTED * (envelope.loss + envelope.rerouted_loss + most))
    hot = steps > span.last_stable
    allowed, refuted = (np.where(hot, bound, each) for bound, each in ((LOSS_CEILING, allowed), (np.inf, refuted)))
    allowed = np.where(hot, np.maximum(allowed, envelope.loss), allowed)
    first = int((steps == 1).sum())
    parts = ((slice(0, first), Stage.forward, None), (slice(first, None), Stage.optimizer, Stage.weights))
    return [
        Series(LOSS, stage, steps[part], observed[part], allowed[part], refuted[part], since)
        for part, stage, since in parts
    ]


def _norms(arm: Record, control: Record, envelope: Envelope, push: Perturbation, span: Span) -> Series:
    import numpy as np

    steps, left, right = _pairs("grad_norm", arm, control, min(span.last, span.last_stable))
    drift = push.weights * growths(EXPECTED_GROWTH, steps)
    judged = drift <= NORM_CEILING
    observed = _relative(left, right)
    most = np.maximum(push.weights * growths(MOST_GROWTH, steps), np.where(steps > 2, grown(observed, ROUNDED), 0.0))
    refuted = REFUTED * (envelope.norm + envelope.rerouted_norm + most)
    return Series(
        NORM, Stage.gradient, steps[judged], observed[judged], (envelope.norm + drift)[judged], refuted[judged]
    )


def _weights(arm: Record, control: Record, envelope: Envelope, push: Perturbation, span: Span) -> Series:
    import numpy as np

    steps, left, right = _pairs("param_norm", arm, control, min(span.last, span.last_stable))
    path = path_lengths(control, envelope.control.parameters)[steps - 1] / right
    wander = path * np.minimum(1.0, push.weights * growths(EXPECTED_GROWTH, steps + 1))
    worst = path * np.minimum(1.0, push.weights * growths(MOST_GROWTH, steps + 1))
    size = path * push.loss * np.sqrt(steps)
    allowed = ROUNDED + size + wander**2 / 2 + wander / math.sqrt(envelope.control.parameters)
    refuted = np.maximum(allowed, REFUTED * (ROUNDED + size + worst))
    return Series("weight norm", Stage.optimizer, steps, _relative(left, right), allowed, refuted, Stage.weights)


def path_lengths(run: Record, parameters: int) -> Float64:
    """Length of all updates up to each step.

    Adam moves every weight by about lr, Muon by no more in the mean square; SGD moves all by lr times the clipped
    gradient, and momentum adds its past.
    """
    import numpy as np

    rates = np.array([rate or 0.0 for rate in run.series("lr")])
    if run.config["optimizer.name"] != "sgd":
        lengths: Float64 = np.cumsum(rates) * math.sqrt(parameters)
        return lengths
    clip = run.config["optimizer.clip_norm"] or math.inf
    known = [value if value is not None and math.isfinite(value) else 0.0 for value in run.series("grad_norm")]
    norms = np.array([min(value, clip) for value in known])  # a step that was left out has none, and moves nothing
    lengths = np.cumsum(rates * norms) / (1 - float(run.config["optimizer.momentum"]))
    return lengths


def _tail(arm: Record, control: Record, envelope: Envelope) -> list[Finding]:
    count = control.length
    if count < TAIL:
        return []
    left, right = (run.series("loss")[count // 2 :] for run in (arm, control))
    known = [(a, c) for a, c in zip(left, right, strict=True) if a is not None and c is not None]
    gap = abs(statistics.fmean(a - c for a, c in known)) / abs(statistics.fmean(c for _, c in known))
    found = [
        _finding("loss, mean of the later half", Stage.trajectory, count, gap, LOSS_MARGIN + envelope.loss, math.inf)
    ]
    norms = zip(arm.series("grad_norm")[count // 2 :], control.series("grad_norm")[count // 2 :], strict=True)
    ratios = [math.log(a / c) for a, c in norms if a and c and a > 0 and c > 0]
    if len(ratios) > 1:
        noise = 4 * _error_of_mean(ratios)
        allowed = max(NORM_MARGIN, noise) + envelope.norm
        check = "gradient norm, mean of the later half"
        found.append(_finding(check, Stage.trajectory, count, abs(statistics.fmean(ratios)), allowed, math.inf))
    return found


def _finding(check: str, stage: Stage, step: int, observed: float, allowed: float, refuted: float) -> Finding:
    return Finding("T2", check, stage, grade(observed, allowed, refuted), observed, allowed, step=step)


def _error_of_mean(values: Sequence[float]) -> float:
    """Standard error by means of about sqrt(n) consecutive batches, which keeps most of the steps' correlation."""
    size = max(1, round(math.sqrt(len(values))))
    means = [statistics.fmean(values[start : start + size]) for start in range(0, len(values) - size + 1, size)]
    return statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.inf
