"""Rules between settings, and on the world, before ranks start: one file a group, every violation at once.

A rule is a function of a `Request` that yields violations, and names the settings it reads. A rule is skipped where
`numbers` finds one of these out of range. Rules never raise and never change anything; only those of `data`, `ckpt` and
`environment` look at the machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.config.errors import Violation
from harness.config.rules import (
    adapter,
    batch,
    ckpt,
    data,
    effect,
    eight_bits,
    engine,
    environment,
    fault,
    launch,
    loss_scale,
    measure,
    model,
    network,
    numbers,
    own,
    tensor_parallel,
)
from harness.config.rules.request import Request, Rule
from harness.config.schema import Config

RULES: tuple[Rule, ...] = (
    *model.RULES,
    *batch.RULES,
    *adapter.RULES,
    *own.RULES,
    *engine.RULES,
    *tensor_parallel.RULES,
    *eight_bits.RULES,
    *network.RULES,
    *loss_scale.RULES,
    *fault.RULES,
    *effect.RULES,
    *launch.RULES,
    *measure.RULES,
    *ckpt.RULES,
    *data.RULES,
    *environment.RULES,
)


def check(config: Config, overrides: Sequence[str] = ()) -> list[Violation]:
    request = Request(config, tuple(overrides))
    out_of_range = numbers.check(request)
    found = list(out_of_range.values())
    for rule in RULES:
        if not any(path in out_of_range for path in rule.reads):
            found.extend(rule.apply(request))
    return found
