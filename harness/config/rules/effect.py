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
    engine, taken = request.config.engine.name, request.can.settings
    for key, value in request.named.items():
        path = key if key in settings() else key.rpartition(".")[0]
        only = settings()[path].only if path in settings() else ()
        failing = next((each for each in only if not each.holds(request.value(each.path))), None)
        if failing is not None:
            because, where = _shown(request, failing.path), failing.choose
        elif key.startswith("engine.") and key != "engine.name" and key not in taken:
            because = f"engine={engine.name}"
            where = " or ".join(f"engine={each.name}" for each, can in ENGINES.items() if key in can.settings)
        else:
            continue
        fix = f"leave it out, or choose {where}"
        yield Violation(f"{key}={value}", f"has no effect with {because}", fix=fix)


def _shown(request: Request, path: str) -> str:
    group, value = path.partition(".")[0], as_typed(request.value(path))
    named = group != "model" and value in load_catalog()[group]  # a family may have the name of an option
    return f"{group}={value}" if named else request.show(path)
