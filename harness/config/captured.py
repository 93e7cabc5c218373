"""Steps and tensors that a run captures: those listed, or chosen ones.

docs/verdicts.md ("What is captured") says which are chosen, in which order of worth, and their size. All of it passes
through the first rank's memory while the others wait, so `measure.capture_limit_mib` bounds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.config.derived import optimizer_states, parameter_count
from harness.config.schema import Config, MeasureMode

RECOMPUTED = 4
"""Bytes of a weight's local gradients, summed: as their difference from the gradient, in fp32, or fp64 beside fp64."""

MIB = 2**20


class Captured(NamedTuple):
    """Captured steps (counted from 1, in order) and their size.

    left_out: reason for each omission; empty where there is none.
    """

    gradients: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()
    num_bytes: int = 0
    left_out: str = ""


def captured(cfg: Config) -> Captured:
    measure = cfg.measure
    listed = measure.capture_steps is not None
    if not listed and measure.mode is MeasureMode.bench:
        return Captured(left_out="a timed run does nothing beside its steps")
    if not parameter_count(cfg):
        return Captured(left_out="nobody counted the weights of the model")
    of_gradients = parameter_count(cfg) * cfg.dtype.main_grads.bytes
    if of_gradients > measure.capture_limit_mib * MIB:
        size = f"one step of gradients is {of_gradients / MIB:,.0f} MiB"
        return Captured(left_out=f"{size}, measure.capture_limit_mib={measure.capture_limit_mib}")
    if not listed:
        return _chosen(cfg)
    gradients, updates = tuple(sorted(measure.capture_steps or ())), tuple(sorted(measure.update_steps or ()))
    return Captured(gradients, updates, num_bytes=_size(cfg, gradients, updates))


def spread(steps: int) -> tuple[int, ...]:
    """First, last, and between them 100, 1000, ...; in order of worth."""
    between = [10**power for power in range(2, len(str(steps))) if 10**power < steps]
    return tuple(dict.fromkeys((1, steps, *between)))


def _chosen(cfg: Config) -> Captured:
    found = Captured((1,), num_bytes=_size(cfg, (1,), ()))
    limit, listed = cfg.measure.capture_limit_mib, cfg.measure.update_steps
    first, *others = spread(cfg.train.steps)
    updated = {"the update of step 1": (first,)} if listed is None else {"the updates that are listed": listed}
    parts: list[tuple[str, Sequence[int], Sequence[int]]]
    parts = [(named, (), steps) for named, steps in updated.items() if steps]
    parts += [(f"step {step}", (step,), (step,) if listed is None else ()) for step in others]
    for named, steps, changed in parts:
        gradients = tuple(sorted({*found.gradients, *steps}))
        updates = tuple(sorted({*found.updates, *changed}))
        size = _size(cfg, gradients, updates)
        if size > limit * MIB:
            said = f"with {named} it would be {size / MIB:,.0f} MiB, measure.capture_limit_mib={limit}"
            return found._replace(left_out=said)
        found = Captured(gradients, updates, size)
    return found


def _size(cfg: Config, gradients: tuple[int, ...], updates: tuple[int, ...]) -> int:
    """Bytes of captured steps.

    Weights and moments before an update follow from a captured update before; they are zero before step 1.
    """
    count, main = parameter_count(cfg), cfg.dtype.main_params.bytes
    anew = [step for step in updates if step - 1 not in updates]
    begins = len(anew) + optimizer_states(cfg) * sum(step > 1 for step in anew)
    gradient = cfg.dtype.main_grads.bytes
    return count * ((gradient + max(RECOMPUTED, gradient)) * len(gradients) + main * (len(updates) + begins))
