"""Rules between settings, and on the world, before ranks start: one file a group, every violation at once.

A rule is a function of a `Request` that yields violations, and names the settings it reads. A rule is skipped where
`check_values` finds one of these out of range. Rules never raise and never change anything; only some of
`running` and those of `environment` look at the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType

from harness.config.errors import Violation
from harness.config.rules import engine, environment, running, sizes
from harness.config.rules.request import Request, Rule, check_values
from harness.config.schema import Config


def rules_of(*modules: ModuleType) -> tuple[Rule, ...]:
    """Rules of modules, also those in a tuple."""
    values = [value for module in modules for value in vars(module).values()]
    found = [each for value in values for each in (value if isinstance(value, tuple) else (value,))]
    return tuple(each for each in found if isinstance(each, Rule))


RULES = rules_of(sizes, engine, running, environment)
OF_THIS_MACHINE = rules_of(environment)
"""Rules that do not matter where nothing is to run here: under launch.dry_run, and to `plan`."""


def check(
    config: Config, overrides: Sequence[str] = (), beyond: Mapping[str, Violation] = MappingProxyType({})
) -> list[Violation]:
    """Args: beyond: settings out of range, and what is said of them."""
    request = Request(config, tuple(overrides))
    out_of_range = {**beyond, **check_values(request)}
    found = list(out_of_range.values())
    for rule in RULES:
        if config.launch.dry_run and rule in OF_THIS_MACHINE:
            continue
        if not any(path in out_of_range for path in rule.reads):
            found.extend(rule.apply(request))
    return found
