"""Text that fits a terminal: names by what differs, tables and sentences no wider than there is room, colours.

Where output is no terminal and COLUMNS is not set, nothing is shortened or wrapped: a pipe gets every character, and
none of them is a colour's.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, Any, cast

UNLIMITED = 10_000
LEAST = 12
"""A column is never made narrower: a run's signature stays whole."""
TAIL = 9
GAP, INDENT = "  ", "    "
COLOURS = {
    "32": ("done", "EQUAL", "EQUIVALENT"),
    "31": ("failed", "lost", "damaged", "DIFFERENT", "BAD"),
    "33": ("preempted", "cancelled", "stale", "UNDECIDED", "NOT_COMPARABLE"),
    "36": ("queued", "running"),
}
_CODE = {word: code for code, words in COLOURS.items() for word in words}
_WHOLE = re.compile(
    r"`[^`\n]*`|(?<!\w)'[^'\n]*'(?!\w)|\"[^\"\n]*\"|(?<!\S)(\S*python[\d.]* |harness [a-z]|pip |git )[^;`\n]*"
)
"""Texts to copy, kept in one line: those in quotes, and a command up to where the sentence goes on."""
_HEAD = re.compile(r" *(?:(?:valid|fix|about): +)?")
_WORD = re.compile(rf"(?<![\w/.-])({'|'.join(_CODE)})(?![\w/-])")


_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that move a terminal's cursor, change what it shows or turn a line; not newline and tab."""


def visible(text: str) -> str:
    """A text in which what a terminal would obey is written as an escape, `\\x1b`."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Visible:
    """A stream on which whatever is printed is `visible`: names, reasons and reports come from files that others wrote.

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
    """The streams as they are, for a program of the user's own that runs in this process."""
    with redirect_stdout(plain(sys.stdout)), redirect_stderr(plain(sys.stderr)):
        yield


def show(text: str) -> None:
    """Print a text with states and verdicts in colour, where standard output shows any."""
    stream = plain(sys.stdout)
    print(painted(visible(text), stream), file=stream)


def width() -> int:
    """Columns of the terminal, or of COLUMNS; `UNLIMITED` where there is neither."""
    return shutil.get_terminal_size((UNLIMITED, 50)).columns


def coloured(out: IO[str] | None = None) -> bool:
    """True if `out` (by default standard output) is a terminal that shows colours, and NO_COLOR is not set."""
    stream = out or sys.stdout
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str, out: IO[str] | None = None) -> str:
    """The text with the first state or verdict of each line in its colour, where `out` shows any.

    Widths are reckoned before: what is painted is not measured again.
    """
    if not coloured(out):
        return text
    return "\n".join(
        _WORD.sub(lambda found: f"\x1b[{_CODE[found[1]]}m{found[1]}\x1b[0m", line, count=1) for line in text.split("\n")
    )


def labels(names: Collection[str]) -> dict[str, str]:
    """Each run's name without the parts that all of them have; a name that would lose everything stays whole."""
    parts = {name: name.split("-") for name in names}
    common = set.intersection(*(set(each) for each in parts.values())) if len(parts) > 1 else set()
    return {name: "-".join(part for part in each if part not in common) or name for name, each in parts.items()}


def named(names: Collection[str], room: int) -> dict[str, str]:
    """Labels of at most `room` characters where that can be done without two runs losing what tells them apart: of
    names with equally many parts, parts that say no more than the others go, the last first, and leave an ellipsis.
    Where it cannot be done, labels are longer."""
    parts = {name: name.split("-") for name in names}
    found = labels(names)
    if len({len(each) for each in parts.values()}) != 1 or len(parts) < 2:
        return found
    rows = list(parts.values())
    last = len(rows[0]) - 1  # the signature, which stays
    differ = [place for place in range(last) if len({row[place] for row in rows}) > 1]
    kept = differ
    for place in reversed(differ):
        if max(map(len, found.values())) <= room:
            break
        fewer = [each for each in kept if each != place]
        if fewer and _kinds(rows, fewer) == _kinds(rows, differ):
            kept = fewer
            found = {name: "-".join(_elided(row, differ, kept)) for name, row in parts.items()}
    return found


def _kinds(rows: Sequence[Sequence[str]], places: Sequence[int]) -> int:
    return len({tuple(row[place] for place in places) for row in rows})


def _elided(row: Sequence[str], differ: Sequence[int], kept: Sequence[int]) -> list[str]:
    found = [row[place] if place in kept else "…" for place in differ]
    return [each for place, each in enumerate(found) if each != "…" or found[place - 1 : place] != ["…"]] + [row[-1]]


def counted(count: int, what: str) -> str:
    """`1 run`, `2 runs`.

    Args:
        count: how many. what: of what, in the singular; its plural must end with that and an s.
    """
    return f"{count} {what}{'s' * (count != 1)}"


def shorten(text: str, size: int) -> str:
    """`text` in at most `size` characters, less of its middle: what a name ends with tells runs apart."""
    if len(text) <= size:
        return text
    tail = min(TAIL, size - 3)
    return f"{text[: size - tail - 1]}…{text[-tail:]}"


def fold(text: str, columns: int, indent: str = "", head: str = "") -> list[str]:
    """A sentence in lines: the first begins with `head`, those after it with `indent`. Long words, such as paths, stay
    whole."""
    wrapper = textwrap.TextWrapper(columns, head, indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text) or [""]


def message(text: str, out: IO[str]) -> str:
    """Lines of an error as `out` shows them best: folded to its columns where it is a terminal, as they are elsewhere.

    A line goes on below its own first word. Paths, addresses and commands stay whole, however long they are.
    """
    if not out.isatty():
        return text
    told = os.environ.get("COLUMNS", "")
    columns = (int(told) if told.isdecimal() else 0) or os.get_terminal_size(out.fileno()).columns or UNLIMITED
    return "\n".join(each for line in text.split("\n") for each in _folded(line, max(columns, 40)))


def _folded(line: str, columns: int) -> list[str]:
    if len(line) <= columns:
        return [line]
    head = line[: len(line) - len(_HEAD.sub("", line, count=1))]
    below = " " * len(head) if head.strip() else f"{head}    "
    whole = _WHOLE.sub(lambda found: found[0].replace(" ", "\0"), line[len(head) :])
    return [each.replace("\0", " ") for each in fold(whole, columns, below, head)]


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
    """Columns padded to their widest entry, two spaces apart. Where they do not fit side by side, every row goes on in
    a second line, indented: nothing is cut but what may be shortened, and that shows an ellipsis.

    Args:
        head: titles.
        rows: texts.
        columns: room for a line.
        flexible: places of columns that may be made narrower, the widest first; what they hold is shortened.
        folded: those among them that hold words: they go on in the next line instead.
        firm: those among them that give way only where the others have.
        breaks: places of columns that begin another line of the row.
        rule: whether a line of dashes stands below the head.
    """
    parts = _parts([head, *rows], columns, flexible, firm, breaks)
    rules = [indent + GAP.join("-" * size for size in part.values()) for indent, part in parts] if rule else []
    return [*_lines(head, parts, folded), *rules, *(line for row in rows for line in _lines(row, parts, folded))]


Part = tuple[str, dict[int, int]]


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
    parts: list[Part] = []
    left = list(range(len(everything[0])))
    while left:
        indent = INDENT if parts else ""
        taken = next((count for count, place in enumerate(left) if count and place in breaks), len(left))
        while _sizes(everything, left[:taken], columns - len(indent), flexible, firm)[1] > 0 and taken > 1:
            taken -= 1
        parts.append((indent, _sizes(everything, left[:taken], columns - len(indent), flexible, firm)[0]))
        left = left[taken:]
    return parts


def _sizes(
    everything: Sequence[Sequence[str]],
    places: Sequence[int],
    columns: int,
    flexible: Sequence[int],
    firm: Sequence[int],
) -> tuple[dict[int, int], int]:
    sizes = {place: max(len(row[place]) for row in everything) for place in places}
    excess = sum(sizes.values()) + len(GAP) * (len(sizes) - 1) - columns
    while excess > 0:
        giving = [place for place in places if place in flexible and sizes[place] > LEAST]
        widest = max([place for place in giving if place not in firm] or giving, key=sizes.__getitem__, default=None)
        if widest is None:
            break
        sizes[widest] -= 1
        excess -= 1
    return sizes, excess


def cut(line: str, columns: int) -> str:
    """A line without what does not fit: for one that is replaced in place."""
    return line if len(line) <= columns else line[: columns - 1] + "…"
