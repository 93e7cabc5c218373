"""Styles, figures, legends and axes for pictures.

[Note: Pictures that can be read] An arm has one colour and one marker in every picture (`style`), its bound is dashed
in the same colour, and the control is black. Colours are those of Okabe and Ito, which colour-blind people tell apart.
On logarithmic axes an exact zero stands on a line of its own, marked 0; NaN and infinity stand at the upper edge.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F6000")
MARKERS = "os^Dv"
CONTROL = "#000000"
GREY = "#767676"
MIB = 2**20
LONGEST = 30
COLUMNS = 3


class Style(NamedTuple):
    colour: str
    marker: str
    label: str


def style(labels: Mapping[str, str], control: str | None = None) -> dict[str, Style]:
    arms, short = [run for run in labels if run != control], shortened(labels)
    found = {
        run: Style(COLOURS[place % len(COLOURS)], MARKERS[place // len(COLOURS) % len(MARKERS)], plain(short[run]))
        for place, run in enumerate(arms)
    }
    if control in labels:
        found[str(control)] = Style(CONTROL, "", f"control: {plain(short[str(control)])}")
    return found


def shortened(labels: Mapping[str, str]) -> dict[str, str]:
    cut = {
        run: ", ".join(
            part if len(part) <= LONGEST else f"{part[: LONGEST // 2]}…{part[1 - LONGEST // 2 :]}"
            for part in label.split(", ")
        )
        for run, label in labels.items()
    }
    seen: Counter[str] = Counter()
    for run, text in cut.items():
        seen[text] += 1
        if seen[text] > 1 and labels[run] != text:
            cut[run] = f"{text} ({seen[text]})"
    return cut


def plain(text: object) -> str:
    shown = "".join(letter if letter.isprintable() else "?" for letter in str(text)).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def panels(count: int, height: float = 2.4) -> tuple[Figure, list[Axes]]:
    columns = beside(count)
    rows = max(1, math.ceil(count / columns))
    width = 7.0 if columns == 1 else max(7.0, 3.0 * columns)
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(width, 0.9 + height * (rows if columns > 1 else 1.3)),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    every = list(grid.flat)
    for ax in every[count:]:
        ax.set_visible(False)
    return figure, every[:count]


def beside(count: int) -> int:
    return max(1, math.ceil(count / max(1, math.ceil(count / COLUMNS))))


@contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


def bars(count: int, width: float = 8.0) -> tuple[Figure, Axes]:
    figure, ax = plt.subplots(figsize=(width, 1.5 + 0.34 * max(2, count)), layout="constrained")
    return figure, ax


def legend(ax: Axes, columns: int = 3, handles: Sequence[Any] | None = None) -> None:
    figure = ax.get_figure()
    found = ax.get_legend_handles_labels() if handles is None else (handles, [each.get_label() for each in handles])
    if found[0] and figure is not None:
        names = [fold(str(each), 44) for each in found[1]]
        figure.legend(found[0], names, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)


def fold(label: str, size: int = 32) -> str:
    lines = [""]
    for part in label.split(", "):
        joined = f"{lines[-1]}, {part}" if lines[-1] else part
        lines = [*lines[:-1], joined] if len(joined) <= size or not lines[-1] else [*lines[:-1], f"{lines[-1]},", part]
    return "\n".join(lines)


def zero_place(values: Iterable[float]) -> float:
    sizes = [abs(float(value)) for value in values if value == value and value and math.isfinite(value)]
    return 10.0 ** (math.floor(math.log10(min(sizes))) - 1) if sizes else 1e-17


def log_axis(ax: Axes, which: str, place: float, top: float = 0.0, *, zero: bool = True) -> None:
    """Make an axis logarithmic, with decades labelled above `place` and `place` itself labelled 0.

    Args: which: `x` or `y`. place: from `zero_place`. top: least upper end. zero: False begins the axis above `place`.
    """
    axis, limits = (ax.xaxis, ax.set_xlim) if which == "x" else (ax.yaxis, ax.set_ylim)
    (ax.set_xscale if which == "x" else ax.set_yscale)("log")
    top = max(axis.get_data_interval()[1], top, place * 100)
    if not math.isfinite(top):
        top = place * 100
    limits(place / 2.5 if zero else place * 4, top * 2.5)
    decades = list(range(round(math.log10(place)) + 1, math.floor(math.log10(top * 2.5)) + 1))
    stride = max(1, math.ceil(len(decades) / 7))
    shown = [10.0**exponent for exponent in decades[::-stride][::-1]]
    axis.set_major_locator(FixedLocator([*([place] if zero else []), *shown]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: "0" if value <= place * 1.5 else _power(value)))
    axis.set_minor_locator(LogLocator(subs=(1.0,), numticks=40))
    axis.set_minor_formatter(NullFormatter())
    if zero:
        (ax.axvline if which == "x" else ax.axhline)(place * 10**0.5, color=GREY, linewidth=0.6, linestyle=":")


def _power(value: float) -> str:
    return f"$10^{{{round(math.log10(value))}}}$"


def name_rows(ax: Axes, names: Sequence[str]) -> None:
    shown = [fold(name, 36) for name in names]
    more = max((name.count("\n") for name in shown), default=0)
    figure = ax.get_figure()
    if more and isinstance(figure, Figure) and len(figure.axes) == 1:
        figure.set_figheight(figure.get_figheight() + 0.16 * more * len(names))
    ax.set_yticks(range(len(names)), shown, fontsize=10)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    ax.set_axisbelow(True)


def no_scale(ax: Axes) -> None:
    ax.set_yticks([])
    ax.set_yticks([], minor=True)


def over_steps(ax: Axes) -> None:
    ax.set_xlabel("step")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    low, high = ax.dataLim.intervalx
    if low == high:
        ax.set_xlim(low - 1, high + 1)
    ax.grid(color="#E5E5E5", linewidth=0.6)
    ax.set_axisbelow(True)
