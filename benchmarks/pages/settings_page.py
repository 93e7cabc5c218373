"""Write docs/configuration.md: every setting, as `harness/config/schema.py` declares it.

python benchmarks/pages/settings_page.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.pages.tables import DOCS, made, markdown_table
from harness.config.capabilities import ENGINES
from harness.config.doc import Setting, as_typed, groups, settings
from harness.fsdp.options import Choice

PAGE = DOCS / "configuration.md"


def guide() -> str:
    parts = []
    for group, sentence in groups().items():
        mine = (each for path, each in settings().items() if path.startswith(f"{group}."))
        parts.append(f"## {group}\n\n{sentence}\n\n{_table(mine)}\n")
    outside = (each for path, each in settings().items() if "." not in path)
    return made(PAGE, {"settings": "\n".join([*parts, f"## Outside the groups\n\n{_table(outside)}"])})


def _table(found: Iterable[Setting]) -> str:
    rows = [
        (
            f"`{s.path}`",
            s.expects,
            f"`{as_typed(s.default) or chr(39) * 2}`",
            s.sentence + meanings(s.type) + _takers(s.path),
        )
        for s in found
    ]
    return markdown_table(["setting", "takes", "default", "meaning"], rows)


def _takers(path: str) -> str:
    """Which engines take a setting, where not all do, as a sentence to append."""
    names = [engine.name for engine, can in ENGINES.items() if path in can.settings]
    return f" Taken by {', '.join(names)}." if names else ""


def meanings(kind: Any) -> str:
    """What each word of the engine's vocabulary means, as sentences to append; "" for other types."""
    if not (isinstance(kind, type) and issubclass(kind, Choice)):
        return ""
    return "".join(f" *{member.name}*: {member.sentence}" for member in kind)


if __name__ == "__main__":
    PAGE.write_text(guide(), encoding="utf-8")
