"""From plain values to the typed root, by pydantic: every wrong key, kind and range at once."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from harness.config.doc import settings
from harness.config.errors import BadRequest, Violation, refuse
from harness.config.hints import explain_key, explain_range, explain_setting, explain_unsaid
from harness.config.schema import Config

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MISSING = "???"
"""OmegaConf's mark for a value that an option must set."""

_RANGES = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number")


class Wrong(NamedTuple):
    """path: of the setting. beyond: the value is of the right kind, but out of range."""

    path: str
    violation: Violation
    beyond: bool = False


@functools.cache
def _reader() -> TypeAdapter[Config]:
    from pydantic import TypeAdapter  # late: some commands read no configuration

    return TypeAdapter(Config)


def read(values: Mapping[str, Any]) -> Config | list[Wrong]:
    """Typed root of plain values, with defaults for settings and groups that are not there; or all that is wrong."""
    from pydantic import ValidationError

    try:
        return _reader().validate_python(values)
    except ValidationError as error:
        found = (_wrong(each["type"], each["loc"], values) for each in error.errors(include_url=False))
        return [*dict.fromkeys(found)]


def load_config(values: Mapping[str, Any]) -> Config:
    """Typed root of a frozen `config.yaml`.

    Raises `BadRequest`: unknown keys, values of another kind or out of range, or a missing mandatory one, as in runs
    of another version.
    """
    found = read(values)
    if isinstance(found, list):
        raise BadRequest(each.violation for each in found)
    return _with_family(found, values)


def _with_family(config: Config, values: Mapping[str, Any]) -> Config:
    """Raises `BadRequest`: an old run does not say its model's family, and nothing may be assumed of a model."""
    if "family" not in values.get("model", {"family": ...}):
        choices = ", ".join(settings()["model.family"].choices)
        raise refuse("model.family", "is not said, and nothing can be assumed", choices=choices)
    return config


def load_within(values: Mapping[str, Any]) -> tuple[Config, dict[str, Violation]]:
    """As `load_config`; settings out of range do not raise, and have their defaults, so that rules can be applied."""
    found = read(values)
    if not isinstance(found, list):
        return _with_family(found, values), {}
    if not all(each.beyond for each in found):
        raise BadRequest(each.violation for each in found)
    kept = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    for group, _, key in (each.path.partition(".") for each in found):
        kept[group].pop(key, None)
    return load_config(kept), {each.path: each.violation for each in found}


def put(values: dict[str, Any], path: str, value: Any) -> None:
    """Set a setting, or a key of a table, in plain values; tables are merged."""
    *above, last = path.split(".")
    for key in above:
        values = values.setdefault(key, {})
    held = values.get(last)
    values[last] = {**held, **value} if isinstance(held, dict) and isinstance(value, dict) else value


def _wrong(kind: str, where: Sequence[int | str], values: Mapping[str, Any]) -> Wrong:
    path, setting = ".".join(map(str, where)), ".".join(map(str, where[:2]))
    if kind == "unexpected_keyword_argument":
        return Wrong(path, explain_key(path))
    value: Any = functools.reduce(lambda table, key: table[key], where[:2], cast(Any, values))
    if setting not in settings():
        return Wrong(path, Violation(f"{path}={value}", "is a group, and takes a table of settings"))
    if value == MISSING:
        return Wrong(path, explain_unsaid(path, values))
    if kind in _RANGES:
        return Wrong(setting, explain_range(setting, value), beyond=True)
    return Wrong(setting, explain_setting(setting, value))
