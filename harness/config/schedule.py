"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from harness.config.schema import Config, Schedule


def lr_at(config: Config, step: int) -> float:
    """Learning rate of step `step` (counted from 1): linear warm-up, then the schedule.

    Warm-up reaches the peak at step `warmup_steps`; cosine and linear reach `min_lr_ratio` of it at the last step.
    """
    train, peak = config.train, config.optimizer.lr
    if step <= train.warmup_steps:
        return peak * step / train.warmup_steps
    if train.schedule is Schedule.constant:
        return peak
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    remaining = 0.5 * (1.0 + math.cos(math.pi * done)) if train.schedule is Schedule.cosine else 1.0 - done
    return peak * (train.min_lr_ratio + (1.0 - train.min_lr_ratio) * remaining)
