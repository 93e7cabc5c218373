"""Rule and request; and checks of single values: a few lists and names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

from harness.config.capabilities import Capabilities
from harness.config.doc import as_typed, settings
from harness.config.errors import Violation
from harness.config.own import capabilities_of
from harness.config.schema import Config
from harness.store.identity import slug

STEP_LISTS = ("measure.capture_steps", "measure.update_steps", "measure.trace_steps")

T3_MEASURES = ("loss", "grad_norm")

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,98}[a-z0-9_])?")


@dataclass(frozen=True)
class Request:
    config: Config
    overrides: tuple[str, ...] = ()

    @cached_property
    def named(self) -> dict[str, str]:
        return dict(o.split("=", 1) for o in self.overrides if "=" in o)

    @cached_property
    def can(self) -> Capabilities:
        return capabilities_of(self.config)

    def value(self, path: str) -> Any:
        return attrgetter(path)(self.config)

    def show(self, *paths: str) -> str:
        return " ".join(f"{path}={as_typed(self.value(path))}" for path in paths)

    def wrong(self, paths: str, problem: str, choices: str = "", fix: str = "") -> Violation:
        """Violation of one setting, or of several with spaces between."""
        return Violation(self.show(*paths.split()), problem, choices, fix)


@dataclass(frozen=True)
class Rule:
    reads: tuple[str, ...]
    apply: Callable[[Request], Iterator[Violation]]


def rule(*reads: str) -> Callable[[Callable[[Request], Iterator[Violation]]], Rule]:
    return lambda function: Rule(reads, function)


def refusal(
    when: Callable[[Config], Any], paths: str, problem: str, fix: str, choices: str = "", reads: str = ""
) -> Rule:
    """Rule of one violation, of the settings `paths`. Its texts are formats over the groups of a configuration."""

    def apply(request: Request) -> Iterator[Violation]:
        if when(request.config):
            texts = (each.format(**vars(request.config)) for each in (problem, choices, fix))
            yield request.wrong(paths, *texts)

    return Rule(tuple(reads.split()), apply)


def check_values(request: Request) -> dict[str, Violation]:
    return _lists(request) | _names(request) | _texts(request)


def _lists(request: Request) -> dict[str, Violation]:
    found = {}
    for path, count, usual in (
        ("optimizer.betas", "two", "[0.9,0.95]"),
        ("optimizer.ns_coefficients", "three", "[3.4445,-4.775,2.0315]"),
    ):
        if len(request.value(path)) != usual.count(",") + 1:
            found[path] = request.wrong(path, "is out of range", f"{count} numbers", f"{path}={usual}")
    for measure, margin in request.config.study.margins.items():
        path = f"study.margins.{measure}"
        if measure not in T3_MEASURES:
            found[path] = Violation(path, "is not a measure by which pairs of seeds are judged", ", ".join(T3_MEASURES))
        elif not 0 < margin < math.inf:
            found[path] = Violation(f"{path}={margin}", "is out of range", "above 0", f"{path}=0.001 is 0.1 %")
    for path in STEP_LISTS:
        steps = request.value(path) or ()
        if len(set(steps)) != len(steps):
            found[path] = request.wrong(path, "needs distinct steps, counted from 1", fix=f"{path}=[1]")
    return found


def _texts(request: Request) -> dict[str, Violation]:
    found = {}
    for path, setting in settings().items():
        value = request.value(path)
        texts = [value] if isinstance(value, str) else value if setting.type == list[str] else []
        if isinstance(value, dict) and setting.type == dict[str, str]:
            texts = [text for pair in value.items() for text in pair]
        if any(_CONTROL.search(text) for text in texts):
            problem = "holds a control character (a newline?)"
            found[path] = Violation(f"{path}={value!r}", problem, fix="one line of plain text")
    return found


def _names(request: Request) -> dict[str, Violation]:
    config = request.config
    choices = "100 lower-case letters and digits at most, and . _ - among them"
    return {
        path: Violation(
            f"{path}={name!r}", "must be a folder's name", choices, f"{path}={slug(name)[:100].strip('-.') or default}"
        )
        for path, name, default in (("study.name", config.study.name, "adhoc"), ("run.name", config.run.name, "null"))
        if name is not None and not _NAME.fullmatch(name)
    }
