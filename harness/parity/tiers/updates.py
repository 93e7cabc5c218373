"""T2 at captured updates of every weight.

Adam divides by the gradient's own size, so a wrong gradient can leave no trace in the loss, and a wrong optimizer none
in the gradient; updates show both. An update's size errs by the perturbation of its gradient's distance (`trajectory`),
which grows over the steps, and by the rounding of stored weights, half a unit of weights of at most about 1. A tensor
whose gradient is rounding noise is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from harness.config.roundoff import UNIT
from harness.config.update_rule import Rule
from harness.parity.outcome import AHEAD, REFUTED, Finding, Stage, measured
from harness.parity.record import Record
from harness.parity.tiers.envelope import Envelope
from harness.parity.tiers.gradients import TensorPair
from harness.parity.tiers.stability import EXPECTED_GROWTH, MOST_GROWTH, growth
from harness.parity.tiers.trajectory import perturbation

CEILING = 0.5
"""Largest allowed error of an update's size at which it is judged."""


def check(
    step: int,
    pairs: Sequence[TensorPair],
    envelope: Envelope,
    runs: tuple[Record, Record],
    gradients: Mapping[str, TensorPair],
    grown: float = 0.0,
) -> list[Finding]:
    """Size of every tensor's update at a step.

    Args: pairs: common updates, all finite. gradients: of step 1 by name; the envelope's distance if missing. grown:
    bound by observed growth; infinite where unbounded.
    """
    found = []
    for pair in pairs:
        allowed, refuted = _bounds(step, pair, envelope, runs, gradients.get(pair.name))
        if allowed <= CEILING:
            found.append(_size(step, pair, allowed, max(refuted, REFUTED * grown), runs[1]))
    return found


def _bounds(
    step: int, pair: TensorPair, envelope: Envelope, runs: tuple[Record, Record], gradient: TensorPair | None
) -> tuple[float, float]:
    observed = gradient.distance if gradient is not None and math.isfinite(gradient.distance) else None
    push = perturbation(envelope, str(runs[1].config["optimizer.name"]), observed).weights
    unit = max(UNIT[str(run.config["dtype.main_params"])] for run in runs)
    rounding = unit * math.sqrt(pair.numel) / pair.norm if pair.norm else 0.0
    allowed = push * growth(EXPECTED_GROWTH, step + 1) + rounding
    return allowed, max(allowed, REFUTED * (push * growth(MOST_GROWTH, step + 1) + rounding))


def _size(step: int, pair: TensorPair, allowed: float, refuted: float, control: Record) -> Finding:
    ratio = pair.arm_norm / pair.norm if pair.norm else math.inf if pair.arm_norm else 1.0
    off, stage = abs(ratio - 1.0), Stage.optimizer
    why = partial(_explain, ratio, step, allowed, control)
    return measured("update size", stage, off, allowed, refuted, step=step, tensor=pair.name, note=why)


def _explain(ratio: float, step: int, allowed: float, control: Record) -> str:
    said = f"{ratio:.4g} x the control's"
    rule = Rule.of(control.config)
    if rule.name in ("sgd", "muon"):
        return said
    ahead = rule.corrected(step + 1) / rule.corrected(step)
    close = abs(ratio - ahead) <= max(allowed, 0.02 * ahead)
    return f"{said}: the bias correction of step {step + 1}, {AHEAD}" if close else said
