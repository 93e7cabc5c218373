"""A frozen configuration with dotted keys, read section by section: for tables of a thousand runs.

YAML takes milliseconds a run. The runs of a study differ in few of their configuration's top-level sections, so that
each distinct section's text is parsed once and looked up afterwards.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from harness.store.errors import StoreError
from harness.store.reading import parse_yaml, read_text
from harness.store.rundir import CONFIG, RunDir, flatten
from harness.store.shapes import CONFIG as SHAPE

_SECTION = re.compile(r"^(?=[A-Za-z_])", re.MULTILINE)
"""Where a top-level key begins: in a block mapping every other line of a value is indented, or is an item of a list."""


def flat_config(run: RunDir) -> dict[str, Any]:
    """What `flatten(run.config())` gives; lists in it are shared between runs and must not be changed.

    Raises:
        StoreError: there is no configuration, or it is not YAML.
    """
    text = read_text(run.path / CONFIG)
    try:
        flat: dict[str, Any] = {}
        for section in _SECTION.split(text or ""):
            flat.update(_section(section) if section else {})
    except StoreError:
        flat = {}
    return flat or flatten(run.config())  # whatever is odd is read whole, and named with its file


@lru_cache(maxsize=4096)
def _section(text: str) -> dict[str, Any]:
    return flatten(parse_yaml(text, CONFIG, SHAPE))
