"""Markdown for a pull request: tables and text that show names verbatim, whatever is in them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.store.screen import visible


def rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(_cell(text) for text in row)} |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text if re.fullmatch(r"[\w .,:%/+-]*", text) and "_" not in text else code(text).replace("|", "\\|")


def code(text: str) -> str:
    line = _line(text)
    ticks = "`" * (1 + max((len(run) for run in re.findall(r"`+", line)), default=0))
    pad = " " if line[:1] in ("`", " ", "") or line[-1:] in ("`", " ") else ""
    return f"{ticks}{pad}{line}{pad}{ticks}"


def escaped(text: str) -> str:
    shown = re.sub(r"([\\`*_{}\[\]<>#|~&])", r"\\\1", _line(text))
    return shown.replace("@", "@\u200b")


def _line(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def fenced(text: str) -> str:
    text = visible(text)
    fence = "`" * (1 + max([2, *(len(run) for run in re.findall(r"`+", text))]))
    return f"{fence}\n{text}\n{fence}"
