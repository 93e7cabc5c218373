"""Rules of a user's own engine: named, found, complete, with capabilities."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.adapter import describe
from harness.config.errors import Violation
from harness.config.rules.request import Request, Rule, rule
from harness.config.schema import EngineName


@rule()
def adapter_is_named(request: Request) -> Iterator[Violation]:
    engine = request.config.engine
    if engine.name is EngineName.ext and engine.adapter is None:
        yield Violation(
            "engine=ext", "needs a class of yours", "engine.adapter=package.module:Class", "see docs/adapter.md"
        )


@rule()
def adapter_is_an_engine(request: Request) -> Iterator[Violation]:
    engine = request.config.engine
    if engine.name is EngineName.ext and engine.adapter is not None:
        found = describe(engine.adapter)
        if isinstance(found, Violation):
            yield found


RULES: tuple[Rule, ...] = (adapter_is_named, adapter_is_an_engine)
