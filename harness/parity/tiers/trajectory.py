"""T2 over the steps: how far losses and norms may drift apart after runs that began alike.

At step 1 the weights and the data are the same, so the bound is that of one forward and backward (`envelope`). After it
two runs walk apart, and no bound of that kind exists: differences grow exponentially and end at the level of run-to-run
noise. The early steps carry the information, and the bounds say where it ends:

    kick       rounding leaves the updates of step 1 a relative error. SGD passes the gradient's error rho on. Adam's
               first update is a sign: it flips where the gradient is smaller than its error, which moves the update by
               2 sqrt(rho / pi) of its size; but flips sit where the gradient is small, so the loss sees them in second
               order only, (1 + 4 / pi) rho.
    lever      an error of the trajectory moves the loss by at most that share of what the trajectory moved it.
    growth     EXPECTED_GROWTH a step is what stable training shows (measured: 1.0 to 1.7). MOST_GROWTH is the most a
               step can do while training stays stable at all: an update multiplies a difference along a curvature h by
               |1 - lr * h|, and curvature beyond 2 / lr in size makes the run itself diverge.
    stability  where the control's own gradient norm bursts, no growth is bounded: from two steps before it on, single
               steps are not judged (`stable_until`)
    ceiling    once the expected drift passes LOSS_CEILING, a single pair knows nothing more about single steps: what
               lies above is in doubt, and only what even MOST_GROWTH cannot explain is refuted. A persistent gap of the
               later half is in doubt beyond LOSS_MARGIN; paired seeds decide that, not a bound.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.config.roundoff import RMS, UNIT
from harness.parity.outcome import Finding, Stage, grade
from harness.parity.record import Record
from harness.parity.tiers.envelope import REFUTED, Arithmetic, Envelope

EXPECTED_GROWTH = 1.5
MOST_GROWTH = 3.0
LOSS_CEILING = 0.01
"""Relative. Clean runs that have reached run-to-run noise differ by 1 to 5 % at single steps."""
NORM_CEILING = 0.1
LOSS_MARGIN = 1e-3
"""Relative, of a mean over the later half: the usual margin of an equivalence test over seeds."""
NORM_MARGIN = 0.05
UNSTABLE = 2.0
"""A gradient norm so many times the largest before it is that of a run which leaves stability, and differences with it:
one of SGD with momentum grew ninefold a step then."""
LEAD = 2
"""Steps by which differences grow before the norm does: they begin along the sharp direction as rounding."""
TAIL = 20
"""Runs shorter than this have no later half worth a mean."""


@dataclass(frozen=True)
class Kick:
    """Relative errors that the updates of the first step may differ by, as seen by the loss and by the weights."""

    loss: float
    weights: float


def kick(envelope: Envelope, optimizer: str, observed: float | None) -> Kick:
    """
    Args:
        envelope: of the pair.
        optimizer: `sgd`, `adam` or `adamw`.
        observed: distance of the whole gradients at step 1; None where none were captured.
    """
    rho = max(2 * (observed or 0.0), _fresh(envelope), 0.0 if observed is not None else envelope.distance)
    if optimizer == "sgd":
        return Kick(rho, rho)
    return Kick((1 + 4 / math.pi) * rho, min(1.0, 2 * math.sqrt(rho / math.pi)))


def _fresh(envelope: Envelope) -> float:
    """Gradient error a later step may add even where step 1 showed none: that of the reduction. With bf16 weights, that
    of the whole pass: one unit of a main weight can flip a compute weight, and then nothing is the same any more."""
    if envelope.is_low_precision:
        return envelope.error
    return math.hypot(_walk(envelope.arm), _walk(envelope.control))


def _walk(run: Arithmetic) -> float:
    return run.reduction + RMS * UNIT[run.main] * math.sqrt(run.global_microbatches)


NORM = "gradient norm"
"""Name of the check of the logged norm against the control's."""


def check(
    arm: Record, control: Record, envelope: Envelope, observed: float | None, last: int | None = None
) -> list[list[Finding]]:
    """Every step's finding, a list a kind: loss, gradient norm, weight norm, later half.

    Args:
        arm: the run under test.
        control: what it is held against; it has the same steps.
        envelope: of the pair.
        observed: distance of the whole gradients at step 1; None where none were captured.
        last: the last step to look at (before a value that is not finite); all where None.
    """
    push = kick(envelope, str(control.config["optimizer.name"]), observed)
    steady = stable_until(control.series("grad_norm"))
    bounded = steady if last is None else min(last, steady)
    kinds = [
        _losses(arm, control, envelope, push, bounded),
        _norms(arm, control, envelope, push, bounded),
        _weights(arm, control, envelope, push, bounded),
        *([finding] for finding in _tail(arm, control, envelope) if last is None),
    ]
    return [findings for findings in kinds if findings]


def stable_until(norms: Sequence[float | None]) -> int:
    """The last step for which bounds on growth hold, from a control's gradient norms: two steps before the first that
    is more than `UNSTABLE` times all before it; else the last step there is."""
    largest = math.inf
    for step, norm in enumerate(norms, start=1):
        if norm is not None and norm > UNSTABLE * largest:
            return max(1, step - LEAD)
        if norm is not None:
            largest = norm if math.isinf(largest) else max(largest, norm)
    return len(norms)


def _pairs(key: str, arm: Record, control: Record, last: int | None) -> list[tuple[int, float, float]]:
    series = zip(arm.series(key), control.series(key), strict=True)
    numbered = [(t, a, c) for t, (a, c) in enumerate(series, start=1) if a is not None and c is not None]
    return [entry for entry in numbered if last is None or entry[0] <= last]


def relative(left: float, right: float) -> float:
    """|left - right| over |right|."""
    if left == right:
        return 0.0
    return abs(left - right) / abs(right) if right else math.inf


def _finding(check: str, stage: Stage, step: int, observed: float, allowed: float, refuted: float) -> Finding:
    return Finding("T2", check, stage, grade(observed, allowed, refuted), observed, allowed, step=step)


def _losses(arm: Record, control: Record, envelope: Envelope, push: Kick, last: int | None) -> list[Finding]:
    findings, lever = [], 0.0
    first = control.series("loss")[0] or 0.0
    before = first
    for step, left, right in _pairs("loss", arm, control, last):
        lever = max(lever, abs(right - first), abs(right - before))
        before = right
        drift = push.loss * lever / abs(right) if right else 0.0
        allowed = envelope.loss + min(drift * growth(EXPECTED_GROWTH, step), LOSS_CEILING)
        refuted = REFUTED * (envelope.loss + envelope.rerouted_loss + drift * growth(MOST_GROWTH, step))
        stage = Stage.forward if step == 1 else Stage.optimizer  # later weights are what the updates before made
        findings.append(_finding("loss", stage, step, relative(left, right), allowed, max(refuted, allowed)))
    return findings


def growth(rate: float, step: int) -> float:
    """Growth at a later step of a difference made by the first update; 0 at step 1, where there was none."""
    return 0.0 if step < 2 else math.exp(min(700.0, (step - 2) * math.log(rate)))


def _norms(arm: Record, control: Record, envelope: Envelope, push: Kick, last: int | None) -> list[Finding]:
    findings = []
    for step, left, right in _pairs("grad_norm", arm, control, last):
        drift = push.weights * growth(EXPECTED_GROWTH, step)
        if drift > NORM_CEILING:
            break
        refuted = REFUTED * (envelope.norm + envelope.rerouted_norm + push.weights * growth(MOST_GROWTH, step))
        findings.append(_finding(NORM, Stage.gradient, step, relative(left, right), envelope.norm + drift, refuted))
    return findings


def _weights(arm: Record, control: Record, envelope: Envelope, push: Kick, last: int | None) -> list[Finding]:
    """The weights' norm: an update of another size changes it in first order, a direction that wanders in second."""
    findings = []
    for step, left, right in _pairs("param_norm", arm, control, last):
        path = path_length(control, envelope.control.parameters, step, right)
        wander = path * min(1.0, push.weights * growth(EXPECTED_GROWTH, step + 1))
        worst = path * min(1.0, push.weights * growth(MOST_GROWTH, step + 1))
        size = path * push.loss * math.sqrt(step)
        rounding = 4 * UNIT["fp32"]
        allowed = rounding + size + wander**2 / 2 + wander / math.sqrt(envelope.control.parameters)
        refuted = REFUTED * (rounding + size + worst)
        findings.append(
            _finding("weight norm", Stage.optimizer, step, relative(left, right), allowed, max(refuted, allowed))
        )
    return findings


def path_length(run: Record, parameters: int, step: int, norm: float) -> float:
    """Length of all updates up to a step over the weights' norm. Adam moves every weight by about lr; SGD moves all by
    lr times the clipped gradient, and momentum adds its past."""
    rates = [rate or 0.0 for rate in run.series("lr")[:step]]
    if run.config["optimizer.name"] != "sgd":
        return math.fsum(rates) * math.sqrt(parameters) / norm
    clip = run.config["optimizer.clip_norm"] or math.inf
    norms = [min(value or 0.0, clip) for value in run.series("grad_norm")[:step]]
    total = math.fsum(rate * value for rate, value in zip(rates, norms, strict=True))
    return total / (1 - float(run.config["optimizer.momentum"])) / norm


def _tail(arm: Record, control: Record, envelope: Envelope) -> list[Finding]:
    """Persistent gaps of the later half. They can raise a doubt, never refute: chaos and fault look alike by then."""
    count = len(control.steps)
    if count < TAIL:
        return []
    losses = _pairs("loss", arm, control, None)[count // 2 :]
    gap = abs(statistics.fmean(a - c for _, a, c in losses)) / abs(statistics.fmean(c for _, _, c in losses))
    found = [
        _finding("loss, mean of the later half", Stage.trajectory, count, gap, LOSS_MARGIN + envelope.loss, math.inf)
    ]
    ratios = [math.log(a / c) for _, a, c in _pairs("grad_norm", arm, control, None)[count // 2 :] if a > 0 and c > 0]
    if len(ratios) > 1:
        noise = 4 * _error_of_mean(ratios)
        allowed = max(NORM_MARGIN, noise) + envelope.norm
        check = "gradient norm, mean of the later half"
        found.append(_finding(check, Stage.trajectory, count, abs(statistics.fmean(ratios)), allowed, math.inf))
    return found


def _error_of_mean(values: Sequence[float]) -> float:
    """Standard error by means of about sqrt(n) consecutive batches, which keeps most of the steps' correlation."""
    size = max(1, round(math.sqrt(len(values))))
    means = [statistics.fmean(values[start : start + size]) for start in range(0, len(values) - size + 1, size)]
    return statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.inf
