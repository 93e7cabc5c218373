"""Non-finite values: a NaN or an infinity is never within a tolerance and never equal to another.

In one run only it is a difference, unless the control was unstable by then. In both at the same place the later
evidence is void: UNDECIDED.

[Note: Left out] A dynamic loss scale tries larger factors until gradients overflow, and skips that update, which has no
norm by design. In both runs at the same step nothing is wrong. In one of them, the two have not made the same updates:
both are right, and later steps are unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from harness.parity.outcome import Finding, Grade, Stage
from harness.parity.record import Record
from harness.parity.tiers.gradients import TensorPair

LOGGED = (("loss", Stage.forward), ("grad_norm", Stage.gradient), ("param_norm", Stage.optimizer))


def check(
    arm: Record, control: Record, pairs: Mapping[int, Sequence[TensorPair]], last_stable: int | None = None
) -> list[Finding]:
    """Findings of non-finite values, the earliest step first.

    Args: last_stable: last step at which the control was stable (`stability.stable_until`); all where None.
    """
    found = [finding for step in sorted(pairs) for finding in _captured(step, pairs[step])]
    for key, stage in LOGGED:
        found += _logged(key, stage, arm, control)
    found += _left_out(arm, control)
    placed = [
        _after_stability(each) if last_stable is not None and (each.step or 0) > last_stable else each for each in found
    ]
    return sorted(placed, key=lambda finding: finding.step or 0)


def _after_stability(finding: Finding) -> Finding:
    if finding.grade is not Grade.bad:
        return finding
    return replace(finding, grade=Grade.doubt, note="in one run only, after the control had left stability")


def first_step(findings: Sequence[Finding]) -> int | None:
    return min((finding.step for finding in findings if finding.step is not None), default=None)


def _captured(step: int, pairs: Sequence[TensorPair]) -> list[Finding]:
    odd = [pair for pair in pairs if not (pair.finite and pair.control_finite)]
    odd.sort(key=lambda pair: pair.finite == pair.control_finite)
    return [
        _finding("gradient", Stage.gradient, step, pair.finite, pair.control_finite, tensor=pair.name)
        for pair in odd[:1]
    ]


def _logged(key: str, stage: Stage, arm: Record, control: Record) -> list[Finding]:
    if not _any(arm.series(key)) and not _any(control.series(key)):
        return []
    excused = arm.skipped | control.skipped if key == "grad_norm" else frozenset()
    for step, (left, right) in enumerate(zip(arm.series(key), control.series(key), strict=True), start=1):
        fine, control_fine = (value is None or math.isfinite(value) for value in (left, right))
        if not (fine and control_fine) and step not in excused:
            return [_finding(key, stage, step, fine, control_fine)]
    return []


def _left_out(arm: Record, control: Record) -> list[Finding]:
    step = min(arm.skipped ^ control.skipped, default=None)
    if step is None:
        return []
    said = {True: "left out", False: "made"}
    observed, allowed = (said[step in run.skipped] for run in (arm, control))
    note = "under a dynamic loss scale, in one run only: nothing after it can be compared"
    return [Finding("T1", "update is made", Stage.gradient, Grade.doubt, observed, allowed, step=step, note=note)]


def _any(series: Sequence[float | None]) -> bool:
    import numpy as np

    return not bool(np.isfinite(np.array([0.0 if value is None else value for value in series], np.float64)).all())


def _finding(what: str, stage: Stage, step: int, fine: bool, control_fine: bool, tensor: str | None = None) -> Finding:
    both = not fine and not control_fine
    return Finding(
        tier="T1",
        check=f"{what} is finite",
        stage=stage,
        grade=Grade.doubt if both else Grade.bad,
        observed="finite" if fine else "not finite",
        allowed="finite" if control_fine else "not finite",
        step=step,
        tensor=tensor,
        note="in both runs: nothing after it can be compared" if both else "in one run only",
    )
