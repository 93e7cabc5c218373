"""Rule: a typed setting has an effect under the choices beside it."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.capabilities import ENGINES
from harness.config.catalog import load_catalog
from harness.config.doc import as_typed, settings
from harness.config.errors import Violation
from harness.config.rules.request import Request, rule


@rule()
def typed_settings_have_an_effect(request: Request) -> Iterator[Violation]:
    for key in request.named:
        path = key if key in settings() else key.rpartition(".")[0]
        only = settings()[path].only if path in settings() else ()
        failing = [(each.path, each.choose) for each in only if not each.holds(request.value(each.path))]
        if failing:
            yield _without_effect(request, key, _shown(request, failing[0][0]), failing[0][1])


def _shown(request: Request, path: str) -> str:
    group, value = path.partition(".")[0], as_typed(request.value(path))
    named = group != "model" and value in load_catalog()[group]  # a family may have the name of an option
    return f"{group}={value}" if named else request.show(path)


@rule()
def engine_takes_its_settings(request: Request) -> Iterator[Violation]:
    engine = request.config.engine.name
    for key in request.named:
        if key.startswith("engine.") and key != "engine.name" and key not in request.can.settings:
            takers = " or ".join(f"engine={e.name}" for e, can in ENGINES.items() if key in can.settings)
            yield _without_effect(request, key, f"engine={engine.name}", takers)


def _without_effect(request: Request, key: str, because: str, where: str) -> Violation:
    return Violation(
        f"{key}={request.named[key]}", f"has no effect with {because}", fix=f"leave it out, or choose {where}"
    )
