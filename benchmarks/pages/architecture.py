"""The picture of docs/README.md: who writes and who reads a run directory, and what is inside each half.

python benchmarks/pages/architecture.py > docs/architecture.svg
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 960, 540
DESK, STORE, RANK, READ, ENGINE = "#dcebf7", "#fdf0d5", "#dff1e4", "#efe3f3", "#bfe3cb"
INK, PALE = "#1c2733", "#4d5964"
TOP, ROOM, GAP = 20, 40, 8
"""Upper edge of the columns; height of a package; between two of them."""


class Column(NamedTuple):
    """A part of the architecture: its packages stand above each other, and each imports only those below it."""

    title: str
    what: str
    fill: str
    left: int
    width: int
    packages: tuple[str, ...]


COLUMNS = (
    Column(
        "the front end",
        "composes and starts, without torch",
        DESK,
        20,
        260,
        ("run.py, harness/cli", "harness/bisect, study", "harness/launch", "harness/config", "harness/store"),
    ),
    Column(
        "the rank",
        "trains one cell: one process a device",
        RANK,
        330,
        310,
        ("harness/worker", "harness/train, checkpoint", "harness/models, data, probe", "harness/engines"),
    ),
    Column(
        "readers",
        "judge and show, without torch",
        READ,
        690,
        250,
        ("notebooks, reports", "harness/bench, wandb_sync", "harness/parity", "harness/config", "harness/store"),
    ),
)
ENGINES = (("harness/fsdp", "our engine,", "usable alone"), ("beside it", "fsdp2, fsdp1, ddp,", "megatron-fsdp, ..."))
FILES = (
    *("config.yaml", "overrides.txt", "provenance.json", "status.json", "metrics.jsonl"),
    *("summary.json", "capture/, step_checks/", "verdict/", "ckpt/", "attempts/N/"),
)


def text(x: float, y: float, words: str, size: int = 15, *, colour: str = INK, style: str = "") -> str:
    """A line of text; y is its baseline."""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" {style}>{escape(words)}</text>'


BOLD, MIDDLE = 'font-weight="600"', 'text-anchor="middle"'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    """A rectangle with round corners."""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="{fill}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """A line with a head at its second end."""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="1.6" marker-end="url(#head)"/>'


def column(each: Column) -> Iterator[str]:
    """One part of the architecture."""
    yield box(each.left, TOP, each.width, 326, each.fill)
    yield text(each.left + 14, TOP + 28, each.title, 18, style=BOLD)
    yield text(each.left + 14, TOP + 48, each.what, 13, colour=PALE)
    for place, package in enumerate(each.packages):
        y = TOP + 62 + (ROOM + GAP) * place
        yield box(each.left + 12, y, each.width - 24, ROOM, "white")
        yield text(each.left + each.width / 2, y + 25, package, style=MIDDLE)


def engines() -> Iterator[str]:
    """What the rank's last package adapts: ours and the others."""
    left, half = COLUMNS[1].left + 12, (COLUMNS[1].width - 24 - GAP) / 2
    for place, (title, *lines) in enumerate(ENGINES):
        x, y = left + (half + GAP) * place, TOP + 62 + (ROOM + GAP) * 4
        yield box(x, y, half, 62, "white" if place else ENGINE)
        yield text(x + half / 2, y + 20, title, 15, style=f"{MIDDLE} {BOLD}")
        for row, line in enumerate(lines):
            yield text(x + half / 2, y + 38 + 16 * row, line, 13, colour=PALE, style=MIDDLE)


def directory() -> Iterator[str]:
    """The run directory, below all three."""
    y, wide = 410, 172
    yield box(20, y, 920, 112, STORE)
    yield text(34, y + 28, "the run directory", 18, style=BOLD)
    yield text(
        224, y + 28, "runs/STUDY/NAME-SIGNATURE/: plain files, the only place where the halves meet", 14, colour=PALE
    )
    for place, name in enumerate(FILES):
        x, top = 34 + (wide + 8) * (place % 5), y + 42 + 32 * (place // 5)
        yield box(x, top, wide, 26, "white")
        yield text(x + wide / 2, top + 18, name, 14, style=MIDDLE)


def picture() -> str:
    """The whole drawing."""
    title = "The front end composes and starts, the ranks train, readers judge; they meet in the run directory"
    arrows = (
        (arrow(150, 346, 150, 406), text(160, 382, "freezes the cell", 14, colour=PALE)),
        (arrow(485, 346, 485, 406), text(495, 382, "records every step", 14, colour=PALE)),
        (arrow(815, 410, 815, 350), text(825, 382, "read", 14, colour=PALE)),
        (arrow(280, 150, 326, 150), text(303, 142, "starts", 14, colour=PALE, style=MIDDLE)),
    )
    parts = [part for each in COLUMNS for part in column(each)]
    parts += [*engines(), *directory(), *(part for each in arrows for part in each)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="Helvetica, Arial">',
            f"<title>{title}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"'
            ' orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            *parts,
            "</svg>",
        ]
    )


if __name__ == "__main__":
    print(picture())
