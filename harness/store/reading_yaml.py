"""Reading of a run's YAML files: its frozen configuration, and what a user wrote."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from harness.store.errors import StoreError
from harness.store.reading import checked, read_text
from harness.store.shapes import Shape

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MAX_YAML_BYTES = 2**23
"""Largest YAML file: a thousand times a frozen configuration, and still seconds to read."""
MAX_DEPTH = 64
"""Nesting beyond all our files. The YAML reader recurses in C, without a limit of its own."""
_MAY_NEST = re.compile(rf"^[ \t?-]{{{MAX_DEPTH}}}|[&*]", re.MULTILINE)
"""Indentation or references between nodes; without either, only brackets nest deeply."""
_TABLE = re.compile(r"^(?=[A-Za-z_]\w*:(?: |$))", re.MULTILINE)
"""Begin of a table's entry, without indentation."""
_NO_TABLE = re.compile(r"^(?![A-Za-z_]\w*:(?: |$)|[ #]|$)", re.MULTILINE)
"""A line that neither begins an entry nor is indented: another document, a list, a rest of text."""
_SMALL = 2**16
_BROKEN_YAML = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors of PyYAML on invalid values: `!!int x`, a thirteenth month."""


def read_yaml(path: Path, shape: Shape) -> Any | None:
    """Value of a YAML file; None if missing.

    Raises `StoreError`, as `read_text`; or it is no YAML, too deep, self-referential, or not `shape`.
    """
    text = read_text(path, MAX_YAML_BYTES)
    return None if text is None else parse_yaml(text, str(path), shape)


def parse_yaml(text: str, where: str, shape: Shape) -> Any:
    """Raises `StoreError` naming `where`: the text is no YAML, too deep, self-referential, or not `shape`."""
    try:
        if text.count("[") + text.count("{") > MAX_DEPTH or _MAY_NEST.search(text):
            _check_nesting(text, where)
        value = _by_entries(text)
    except StoreError:
        raise
    except _BROKEN_YAML as error:
        raise StoreError(f"{where} is not valid YAML: {error}") from error
    return checked(value, shape, where)


def _by_entries(text: str) -> Any:
    """Value of a YAML text, entry by entry where it is a table.

    A thousand cells of a study differ in one group, so cached entries save most of a verdict's time. An entry ends
    where the next begins at the margin, as long as no node refers to another. Where one cannot be parsed alone, the
    entire text is.
    """
    parts = _TABLE.split(text) if len(text) <= _SMALL else []
    if len(parts) < 2 or parts[0] or _NO_TABLE.search(text) or _MAY_NEST.search(text):
        return yaml.load(text, Loader)
    found: dict[Any, Any] = {}
    for part in parts[1:]:
        try:
            entry = _entry(part)
        except _BROKEN_YAML:
            return yaml.load(text, Loader)
        found |= {key: copied(value) for key, value in entry.items()}
    return found


@lru_cache(maxsize=512)
def _entry(text: str) -> Any:
    """Entry of a table, cached: callers must not change it."""
    return yaml.load(text, Loader)


def copied(value: Any) -> Any:
    """Copy of plain values: `copy.deepcopy` takes ten times as long."""
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list) else value


def _check_nesting(text: str, where: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader):
        if isinstance(event, yaml.AliasEvent):
            raise StoreError(f"{where} refers to itself (*{event.anchor}), as no file of a run does")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise StoreError(f"{where} is nested deeper than {MAX_DEPTH} levels, as no file of a run is")
