"""Last weights, tensor by tensor: the largest possible distance of two runs that began alike.

Captured whole where both runs kept them (`harness.config.captured`), else as the last sketches of their streams tell;
the check's name says which.

[Note: Reach] Two runs under one schedule cannot come farther apart than both can walk, chaos or not:

    Adam, AdamW   one element moves by no more than lr C a step, with C = (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)), by
                  Cauchy and Schwarz over all pasts of a gradient, and at least 1 (Kingma & Ba 2015, section 2.1, give
                  the cases of one and of equal gradients). Decay, in the update or beside it, only pulls together.
    Muon          a matrix of m rows and n columns moves by lr S (1.1 s) sqrt(min(m, n)), with S its scale and s the
                  largest singular value of a result, which is no more than 1.1 s lr an element
    SGD           all of them together move by lr min(norm, clip) / (1 - momentum) a step (`trajectory.path_lengths`)
    storage       each step rounds each weight by u(main) of itself at most

    |a - c| of a tensor of n weights  <=  Adam: 2 C sqrt(n) sum(lr);  SGD: both runs' paths;  and 2 u T |c|

That needs no stability and no estimate of growth, so what lies beyond twice it is refuted even in hot training. It is
wide: a weight that was doubled, zeroed or exchanged shows, and one that a run shows to be wrong by itself is found long
before (`alone.ending`, `alone.every_step`). An optimizer of one's own has no reach that is known here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.config.roundoff import UNIT
from harness.config.update_rule import KNOWN, Rule
from harness.parity.outcome import Finding, Stage, measured
from harness.parity.record import Record
from harness.parity.tiers.apart import DRAW
from harness.parity.tiers.envelope import Envelope
from harness.parity.tiers.gradients import compare_tensor, names
from harness.parity.tiers.trajectory import path_lengths

if TYPE_CHECKING:
    from harness.parity.tiers.apart import Apart

END = "weights at the end"
SKETCHED = f"{END}, sketched"


def check(arm: Record, control: Record, envelope: Envelope, found: Apart | None) -> list[Finding]:
    """A finding a tensor; empty without last weights and sketches.

    Args: found: distances by the streams, if any.
    """
    import numpy as np

    if arm.final is not None and control.final is not None:
        pairs = [compare_tensor(name, arm.final, control.final) for name in names(arm.final, control.final)[0]]
        distances = [(pair.name, pair.numel, pair.distance, pair.norm) for pair in pairs]
        return _graded(END, arm.length, distances, (arm, control), envelope)
    if found is None or np.isnan(found.weights[-1]).all():
        return []
    last = int(found.steps[-1])
    distances = [*zip(found.names, found.numel, found.weights[-1].tolist(), found.norms[-1].tolist(), strict=True)]
    return _graded(SKETCHED, last, distances, (arm, control), envelope, DRAW)


def _graded(
    kind: str,
    step: int,
    distances: list[tuple[str, int, float, float]],
    runs: tuple[Record, Record],
    envelope: Envelope,
    draw: float = 1.0,
) -> list[Finding]:
    rounding = 2 * step * max(UNIT[str(run.config["dtype.main_params"])] for run in runs)
    made, farthest = [], reach(runs, envelope, step)
    is_shared = runs[1].config["optimizer.name"] != "sgd"  # by all elements alike; SGD may spend all on one
    for name, numel, distance, norm in distances:
        own = farthest * (math.sqrt(numel / envelope.control.parameters) if is_shared else 1.0)
        allowed = draw * (rounding + (own / norm if norm else math.inf))
        found = measured(kind, Stage.optimizer, distance, allowed, step=step, tensor=name, since=Stage.weights)
        made.append(found)
    return made


def reach(runs: tuple[Record, Record], envelope: Envelope, step: int) -> float:
    """Largest possible distance of all weights together after a step; see [Note: Reach]."""
    control = runs[1]
    if control.config["optimizer.name"] not in KNOWN:
        return math.inf
    paths = sum(float(path_lengths(run, envelope.control.parameters)[step - 1]) for run in runs)
    if control.config["optimizer.name"] == "sgd":
        return paths
    rule = Rule.of(control.config)
    return max(steepest(*rule.betas), rule.iteration.reach if rule.iteration else 0.0) * paths


def steepest(beta1: float, beta2: float) -> float:
    """Largest move of a weight under Adam, in units of lr."""
    if beta1 * beta1 >= beta2:
        return math.inf
    return max(1.0, (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1 * beta1 / beta2)))
