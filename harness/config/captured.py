"""What a run captures in full: the steps that were listed, or those that are chosen where none were.

[Note: Chosen captures] With measure.capture_steps=null a run captures its first step, its last and, between them, 3,
10, 30, 100, 300, ...: what goes wrong early is placed to the step, what goes wrong late within a factor of three, and a
run of 10,000 steps captures nine. Of each it keeps the gradients, what was seen of them beside the engine, the update,
and the weights and moments before it, so that the optimizer's rule can be asked of whole tensors; and the weights it
ends with. With n weights of fp32, gradients in fp32 and Adam that is (4 + 8) n bytes for gradients and testimony, 4 n
for the update and 4 n + 8 n for what it begins with: 28 n a step, 20 n for the first, 4 n for the end.

All that lies on disk for every run of a study, passes through the first rank's memory and is waited for by the others.
So it is bounded by `measure.capture_limit_mib`: step 1's gradients where one step of gradients fits, and everything
else in the order of what it is worth (first update, last weights, last step, then 3, 10, ...) while all of it together
fits. At the default of 1 GiB a model of 8 M weights captures four steps, one of 250 M the gradients of the first, and
one of 270 M nothing: the sketches of every step (`measure.vouch`) do not grow with the model, and speak for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from harness.config.derived import optimizer_states, parameter_count
from harness.config.schema import Config, MeasureMode

TESTIMONY = 8
"""Bytes of a weight's local gradients, summed: fp64."""

MIB = 2**20


class Captured(NamedTuple):
    """What is captured in full.

    gradients, updates: steps, counted from 1, in order. final: whether the weights of the end are. num_bytes: of all of
    it. left_out: what is not, and why; empty where nothing was left out.
    """

    gradients: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()
    final: bool = False
    num_bytes: int = 0
    left_out: str = ""


def captured(cfg: Config) -> Captured:
    """What a run of this configuration captures."""
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
    """First, last, and between them 3, 10, 30, 100, ...; in the order of what they are worth."""
    between = [each for power in range(len(str(steps))) for each in (10**power, 3 * 10**power) if 1 < each < steps]
    return tuple(dict.fromkeys((1, steps, *between)))


def _chosen(cfg: Config) -> Captured:
    """Everything in the order of its worth, while it fits; a part that does not is passed over with all after it."""
    found = Captured((1,), num_bytes=_size(cfg, (1,), ()))
    limit = cfg.measure.capture_limit_mib
    for each in _parts(cfg):
        gradients = tuple(sorted({*found.gradients, *each.gradients}))
        updates = tuple(sorted({*found.updates, *each.updates}))
        final = found.final or each.final
        size = _size(cfg, gradients, updates) + final * parameter_count(cfg) * cfg.dtype.main_params.bytes
        if size > limit * MIB:
            said = f"with {each.left_out} it would be {size / MIB:,.0f} MiB, measure.capture_limit_mib={limit}"
            return found._replace(left_out=said)
        found = Captured(gradients, updates, final, size)
    return found


def _parts(cfg: Config) -> Iterator[Captured]:
    """What may be added to the gradients of step 1; `left_out` is its name. Updates that were listed stay as listed."""
    listed = cfg.measure.update_steps
    first, *others = spread(cfg.train.steps)
    if listed is None:
        yield Captured(updates=(first,), left_out="the update of step 1")
    elif listed:
        yield Captured(updates=tuple(listed), left_out="the updates that are listed")
    yield Captured(final=True, left_out="the weights of the end")
    for step in others:
        yield Captured((step,), () if listed is not None else (step,), left_out=f"step {step}")


def _size(cfg: Config, gradients: tuple[int, ...], updates: tuple[int, ...]) -> int:
    """Bytes of captured steps. Weights and moments before an update follow from the update before, if that is there;
    before step 1 moments are nought."""
    count, main = parameter_count(cfg), cfg.dtype.main_params.bytes
    anew = [step for step in updates if step - 1 not in updates]
    begins = len(anew) + optimizer_states(cfg) * sum(step > 1 for step in anew)
    return count * ((cfg.dtype.main_grads.bytes + TESTIMONY) * len(gradients) + main * (len(updates) + begins))
