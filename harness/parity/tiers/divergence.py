"""How two runs part whose steps are all checked, and steps of two equal runs.

docs/verdicts.md derives the bounds ("Two runs with every step checked"). Jumps and losses raise a doubt and refute
nothing.
"""

from __future__ import annotations

import math

import numpy as np

from harness.config.update_rule import KNOWN
from harness.parity.outcome import Finding, Stage, measured
from harness.parity.record import Record
from harness.parity.tensors import Float64
from harness.parity.tiers.apart import BURST, Apart, gradient_jumps, weight_jumps
from harness.parity.tiers.arithmetic import SAFETY
from harness.parity.tiers.comparable import is_one, matters
from harness.parity.tiers.envelope import Envelope
from harness.parity.tiers.trajectory import ROUNDED, Perturbation, Series
from harness.store.check_stream import Stream, tensor_columns

GIVEN = "{} given the weights"
WEIGHTS = "weights given those before"
JUMPS = (*(GIVEN.format(what) for what in ("local gradient", "gradient", "loss")), WEIGHTS)
"""Checks of a jump: they raise a doubt at the step where it begins, and refute nothing."""


UNEXPLAINED = "a jump: nothing that the two runs had come apart by before explains it"


def jumps(
    found: Apart,
    envelope: Envelope,
    push: Perturbation,
    last_stable: int,
    certain: int,
    *,
    wide: bool,
    first: int,
    begins: Stage,
    taken: Stage,
) -> list[list[Finding]]:
    """Jumps of gradients and weights, a list a kind.

    Args: last_stable: last step at which the control is stable. certain: last step up to which both are known right;
    weights are judged up to there, and while the control is stable. wide: main weights have more than 16 bits;
    otherwise weights are judged after `certain` alone. first: first step that is judged here. begins: stage in which
    one of the two may first use other weights. taken: last stage that gradients are recorded behind.
    """
    local = gradient_jumps(found, found.local, envelope, last_stable)
    reduced = gradient_jumps(found, found.reduced, envelope, last_stable)
    weights = weight_jumps(found, push, last_stable)
    asked = np.where(weights.steps <= certain, wide, weights.steps <= last_stable)
    seen, after = bool(len(local.steps)), Stage.clipping if len(reduced.steps) else begins
    kinds = []
    for check, jump, stage, since in (
        (GIVEN.format("local gradient"), local, Stage.gradient, begins),
        (GIVEN.format("gradient"), reduced, taken, Stage.reduction if seen else begins),
        (WEIGHTS, weights.at(asked), Stage.optimizer, after),
    ):
        judged = jump.at(jump.steps >= first)
        names = [found.names[tensor] for tensor in judged.tensors]
        limit = np.full(len(judged.steps), np.inf)
        series = Series(check, stage, judged.steps, judged.observed, judged.allowed, limit, since, UNEXPLAINED)
        kinds.append(series.findings(names.__getitem__))
    return [kind for kind in kinds if kind]


def losses(arm: Record, control: Record, envelope: Envelope, last: int, last_stable: int) -> list[Finding]:
    """Losses after step 1 up to `last` against the weights' distance, with a wider bound after `last_stable`."""
    left, right, slope = _by_distance(arm, control, last)
    with np.errstate(divide="ignore", invalid="ignore"):
        observed = np.where(left == right, 0.0, np.abs(left - right) / np.abs(right))
        slope *= np.where(np.arange(2, len(slope) + 2) <= last_stable, 1.0, math.sqrt(BURST))
    allowed = np.nan_to_num(envelope.loss + ROUNDED + slope, nan=np.inf)
    note = "a jump: the distance of the two runs' weights does not explain it"
    return Series(
        GIVEN.format("loss"),
        Stage.gradient,
        np.arange(2, len(slope) + 2),
        observed,
        allowed,
        np.full(len(observed), np.inf),
        Stage.forward,
        note,
    ).findings()


def first_update(arm: Record, control: Record) -> float:
    """Relative difference of the loss at step 2 that the distance of the weights after step 1 explains; 0 if unknown.

    A small gradient of Adam may be taken for another sign by a rounding, and one such element of a small model is more
    than `trajectory.perturbation` expects of all together.
    """
    slope = _by_distance(arm, control, 2)[2]
    return float(slope[0]) if len(slope) and np.isfinite(slope[0]) else 0.0


def _by_distance(arm: Record, control: Record, last: int) -> tuple[Float64, Float64, Float64]:
    """Losses of both from step 2 to `last`, and what the weights' distance before explains, relative to them."""
    if arm.stream is None or control.stream is None:
        return (np.empty(0),) * 3
    count = min(arm.stream.sketches, control.stream.sketches)
    pairs = [tuple(run.stream.column(f"after_{j}") for run in (arm, control) if run.stream) for j in range(count)]
    rows = min(last, *(len(each) for pair in pairs for each in pair))
    squares = np.mean([(left[:rows] - right[:rows]) ** 2 for left, right in pairs], axis=0)
    looked = arm.stream.looked[:rows] & control.stream.looked[:rows]
    distances = np.maximum.accumulate(np.sqrt(np.where(looked, np.nan_to_num(squares, nan=np.inf), 0.0)))
    distances[~looked] = np.inf
    values = [np.array(run.series(key)[:rows], float) for key in ("loss", "grad_norm") for run in (arm, control)]
    left, right, steep, steeper = (each[1:] for each in values)
    with np.errstate(divide="ignore", invalid="ignore"):
        return left, right, SAFETY * (steep + steeper) / 2 * distances[:-1] / np.abs(right)


ALIKE = "weights after equal gradients"
NOTE = "until then gradients, norms and weights were equal in every sketch; the update was not, or the moments it used"


def after_equal_gradients(arm: Record, control: Record) -> list[Finding]:
    if arm.stream is None or control.stream is None or not _one_configuration(arm, control):
        return []
    left, right = (_table(run.stream, run.length) for run in (arm, control) if run.stream)
    if left.shape[1:] != right.shape[1:] or arm.stream.tensors != control.stream.tensors:
        return []
    steps = _steps_of_equal_gradients(arm, control, left, right)
    return [_finding(arm, control, left[:steps], right[:steps])] if steps else []


def _one_configuration(arm: Record, control: Record) -> bool:
    keys = [key for key in arm.config.keys() | control.config.keys() if matters(key) and not key.startswith("fault.")]
    same_code = arm.provenance.get("sources_digest") == control.provenance.get("sources_digest")
    same = all(arm.config.get(key) == control.config.get(key) for key in keys) and not is_one(arm, control)
    return same and same_code and arm.config["optimizer.name"] in KNOWN


def _table(stream: Stream, length: int) -> Float64:
    """Columns [steps, tensors, columns] of the steps from the first on, up to one that was not kept."""
    steps, rows = stream.kept()
    follows = steps == np.arange(1, len(steps) + 1)
    return rows[: min(length, len(steps) if follows.all() else int(np.argmin(follows)))]


def _columns(sketches: int, kind: str) -> list[int]:
    return [at for at, name in enumerate(tensor_columns(sketches)) if name.startswith(f"{kind}_")]


def _steps_of_equal_gradients(arm: Record, control: Record, left: Float64, right: Float64) -> int:
    assert arm.stream is not None
    gradients = _columns(arm.stream.sketches, "reduced")
    steps = min(len(left), len(right))
    equal = (left[:steps, :, gradients] == right[:steps, :, gradients]).all((1, 2))  # what was not seen is not equal
    for key in ("loss", "grad_norm", "lr", "skipped"):
        equal &= [one == other for one, other in zip(*(run.series(key)[:steps] for run in (arm, control)), strict=True)]
    return steps if equal.all() else int(np.argmin(equal))


def _finding(arm: Record, control: Record, left: Float64, right: Float64) -> Finding:
    assert arm.stream is not None
    weights = _columns(arm.stream.sketches, "after")
    differs = ~(left[:, :, weights] == right[:, :, weights]).all(2)
    if not differs.any():
        return measured(ALIKE, Stage.optimizer, 0.0, 0.0, step=len(left), count=len(left))
    step = int(differs.any(1).argmax())
    *sketches, squares = weights
    with np.errstate(divide="ignore", invalid="ignore"):
        off = np.abs(left - right)[step][:, sketches].max(1) / np.sqrt(right[step][:, squares])
    tensor = int(np.where(differs[step], np.nan_to_num(off, nan=np.inf), -1.0).argmax())
    on_cpu = arm.config.get("cluster.device") == "cpu"
    return measured(
        ALIKE,
        Stage.optimizer,
        float(off[tensor]),
        0.0,
        0.0 if on_cpu else math.inf,
        step=step + 1,
        tensor=arm.stream.tensors[tensor].name,
        note=NOTE,
        since=Stage.clipping,
    )
