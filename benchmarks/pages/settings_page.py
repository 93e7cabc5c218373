"""Write docs/configuration.md: every setting, as `harness/config/schema.py` declares it.

python benchmarks/pages/settings_page.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.config.capabilities import ENGINES
from harness.config.doc import Setting, as_typed, groups, settings
from harness.fsdp.vocabulary import Choice
from harness.store.files import write_atomic

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def guide() -> str:
    """The configuration guide as Markdown: a table a group."""
    lines = [
        "# Every setting",
        "",
        "*Reference. Every setting, with its values, default and meaning. Made by `python",
        "benchmarks/pages/settings_page.py` from `harness/config/schema.py`.*",
        "",
        "Set a value with `group.key=value`; `group=option` selects a file of `conf/`, whose values replace defaults.",
    ]
    for group, sentence in groups().items():
        lines += ["", f"## {group}", "", sentence, "", "| setting | takes | default | meaning |", "|---|---|---|---|"]
        lines += [_row(s) for path, s in settings().items() if path.startswith(f"{group}.")]
    lines += ["", "## Outside the groups", "", "| setting | takes | default | meaning |", "|---|---|---|---|"]
    lines += [_row(s) for path, s in settings().items() if "." not in path]
    return "\n".join(lines) + "\n"


def _row(s: Setting) -> str:
    default = as_typed(s.default) or "''"
    return f"| `{s.path}` | {s.expects} | `{default}` | {s.sentence}{meanings(s.type)}{_takers(s.path)} |"


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
    write_atomic(PAGE, guide())
