"""Text for a terminal: numbers, short names, tables and sentences within its width.

Where output is no terminal and COLUMNS is not set, nothing is shortened or wrapped.
"""

from __future__ import annotations

import itertools
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, Any, cast

UNLIMITED = 10_000
LEAST = 12
TAIL = 9
GAP, INDENT = "  ", "    "
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Terminal controls: characters that move the cursor or change the display; not newline and tab."""


def visible(text: str) -> str:
    r"""Text with terminal controls escaped, `\x1b`."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Visible:
    """Stream that prints `visible` text: names, reasons and reports come from files of others.

    `plain` is the stream itself: for sequences of our own, and for a program that runs in this process.
    """

    def __init__(self, plain: IO[str]) -> None:
        self.plain = plain

    def write(self, text: str) -> int:
        self.plain.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


def plain(stream: IO[str]) -> IO[str]:
    return stream.plain if isinstance(stream, Visible) else stream


@contextmanager
def filtered() -> Iterator[None]:
    out, errors = (cast("IO[str]", Visible(plain(stream))) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(errors):
        yield


@contextmanager
def unfiltered() -> Iterator[None]:
    with redirect_stdout(plain(sys.stdout)), redirect_stderr(plain(sys.stderr)):
        yield


def width() -> int:
    """Columns of the terminal, or of COLUMNS; `UNLIMITED` where there is neither."""
    return shutil.get_terminal_size((UNLIMITED, 50)).columns


def counted(count: int, what: str) -> str:
    """`1 run`, `2 runs`; `what` is singular, with a plural in s."""
    return f"{count} {what}{'s' * (count != 1)}"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def quantity(value: float) -> str:
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def ms(seconds: float | None, digits: int = 1) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.{digits}f}"


def mib(count: float | None) -> str:
    return "-" if count is None else f"{count / 2**20:.2f}"


def size(count: int) -> str:
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.3g} {units[0]}"


def shorten(text: str, most: int) -> str:
    """Text in at most `most` characters without its middle, because ends distinguish runs."""
    if len(text) <= most:
        return text
    tail = min(TAIL, most - 3)
    return f"{text[: most - tail - 1]}…{text[-tail:]}"


def fold(text: str, columns: int, indent: str = "", head: str = "") -> list[str]:
    """A sentence in lines: the first begins with `head`, others with `indent`. Long words, such as paths, stay
    whole."""
    wrapper = textwrap.TextWrapper(columns, head, indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text) or [""]


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    columns: int = UNLIMITED,
    *,
    flexible: Sequence[int] = (),
    folded: Sequence[int] = (),
    firm: Sequence[int] = (),
    breaks: Sequence[int] = (),
    rule: bool = True,
) -> list[str]:
    """Columns padded to their widest entry, two spaces apart.

    Rows without room continue in an indented second line. Args: flexible: indices of columns that may be shortened, the
    widest first. folded: those of them that are wrapped instead. firm: those of them that are shortened last. breaks:
    indices of columns that begin another line. rule: print a line of dashes below the head.
    """
    parts = _parts([head, *rows], columns, flexible, firm, breaks)
    rules = [indent + GAP.join("-" * size for size in part.values()) for indent, part in parts] if rule else []
    return [*_lines(head, parts, folded), *rules, *(line for row in rows for line in _lines(row, parts, folded))]


Part = tuple[str, dict[int, int]]
"""Line of a row: its prefix, and the width of each of its columns, by index."""


def _lines(row: Sequence[str], parts: Sequence[Part], folded: Sequence[int]) -> list[str]:
    found = []
    for indent, sizes in parts:
        cells = [
            fold(row[place], size) if place in folded else [shorten(row[place], size)] for place, size in sizes.items()
        ]
        rows = itertools.zip_longest(*cells, fillvalue="")
        found += [(indent + GAP.join(map(str.ljust, texts, sizes.values()))).rstrip() for texts in rows]
    return [found[0], *filter(None, found[1:])]


def _parts(
    everything: Sequence[Sequence[str]],
    columns: int,
    flexible: Sequence[int],
    firm: Sequence[int],
    breaks: Sequence[int],
) -> list[Part]:
    def sizes_of(places: Sequence[int], room: int) -> tuple[dict[int, int], int]:
        sizes = {place: max(len(row[place]) for row in everything) for place in places}
        excess = sum(sizes.values()) + len(GAP) * (len(sizes) - 1) - room
        while excess > 0:
            giving = [place for place in places if place in flexible and sizes[place] > LEAST]
            soft = [place for place in giving if place not in firm]
            widest = max(soft or giving, key=sizes.__getitem__, default=None)
            if widest is None:
                break
            sizes[widest] -= 1
            excess -= 1
        return sizes, excess

    parts: list[Part] = []
    left = list(range(len(everything[0])))
    while left:
        indent = INDENT if parts else ""
        taken = next((count for count, place in enumerate(left) if count and place in breaks), len(left))
        while (found := sizes_of(left[:taken], columns - len(indent)))[1] > 0 and taken > 1:
            taken -= 1
        parts.append((indent, found[0]))
        left = left[taken:]
    return parts
