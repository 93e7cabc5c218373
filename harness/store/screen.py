"""Text that fits a terminal: names by what differs, tables and sentences no wider than there is room.

Where output is no terminal and COLUMNS is not set, nothing is shortened or wrapped: a pipe gets every character.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection, Sequence

UNLIMITED = 10_000
LEAST = 8
"""A column is never made narrower."""
TAIL = 9
"""Characters kept at the end of what is shortened: a run's signature and its dash."""
GAP = "  "


def width() -> int:
    """Columns of the terminal, or of COLUMNS; `UNLIMITED` where there is neither."""
    return shutil.get_terminal_size((UNLIMITED, 50)).columns


def labels(names: Collection[str]) -> dict[str, str]:
    """Each run's name without the parts that all of them have; a name that would lose everything stays whole."""
    parts = {name: name.split("-") for name in names}
    common = set.intersection(*(set(each) for each in parts.values())) if len(parts) > 1 else set()
    return {name: "-".join(part for part in each if part not in common) or name for name, each in parts.items()}


def shorten(text: str, size: int) -> str:
    """`text` in at most `size` characters, less of its middle: what a name ends with tells runs apart."""
    if len(text) <= size:
        return text
    tail = min(TAIL, size // 2)
    return f"{text[: size - tail - 1]}…{text[-tail:]}"


def fold(text: str, columns: int, indent: str = "") -> list[str]:
    """A sentence in lines; those after the first begin with `indent`. Long words, such as paths, stay whole."""
    return textwrap.wrap(text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [
        ""
    ]


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    columns: int = UNLIMITED,
    *,
    flexible: Sequence[int] = (),
    rule: bool = True,
) -> list[str]:
    """Columns padded to their widest entry, two spaces apart.

    Args:
        head: titles.
        rows: texts.
        columns: room for a line; what is too wide after shortening is cut at the end.
        flexible: places of columns that may be shortened, the widest first.
        rule: whether a line of dashes stands below the head.
    """
    sizes = _sizes([head, *rows], columns, flexible)
    everything = [tuple(shorten(text, size) for text, size in zip(row, sizes, strict=True)) for row in [head, *rows]]
    lines = [GAP.join(text.ljust(size) for text, size in zip(row, sizes, strict=True)).rstrip() for row in everything]
    ruled = [lines[0], GAP.join("-" * size for size in sizes), *lines[1:]] if rule else lines
    return [cut(line, columns) for line in ruled]


def cut(line: str, columns: int) -> str:
    """A line without what does not fit."""
    return line if len(line) <= columns else line[: columns - 1] + "…"


def _sizes(everything: Sequence[Sequence[str]], columns: int, flexible: Sequence[int]) -> list[int]:
    sizes = [max(map(len, column)) for column in zip(*everything, strict=True)]
    excess = sum(sizes) + len(GAP) * (len(sizes) - 1) - columns
    while excess > 0:
        widest = max(flexible, key=lambda place: sizes[place], default=0)
        if not flexible or sizes[widest] <= LEAST:
            break
        sizes[widest] -= 1
        excess -= 1
    return sizes
