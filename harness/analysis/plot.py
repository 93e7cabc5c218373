"""Pictures: a table and Axes in, the Axes out; no files, global styles or windows.

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

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
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


def over_steps(ax: Axes) -> None:
    ax.set_xlabel("step")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    low, high = ax.dataLim.intervalx
    if low == high:
        ax.set_xlim(low - 1, high + 1)
    ax.grid(color="#E5E5E5", linewidth=0.6)
    ax.set_axisbelow(True)


def losses(steps: pd.DataFrame, ax: Axes, styles: Mapping[str, Style] | None = None) -> Axes:
    styles = _styles(steps, styles)
    for place, (run, line) in enumerate(steps.groupby("run", sort=False)):
        own = styles[str(run)]
        drawn: dict[str, Any] = {"linewidth": 4.0, "alpha": 0.35} if own.colour == CONTROL else {"linewidth": 1.3}
        few = max(1, len(line) // 5)  # marks of lines that lie on each other stand beside each other
        mark: dict[str, Any] = (
            {"marker": own.marker, "markersize": 5, "markevery": (place % few, few)} if own.marker else {}
        )
        if len(line) == 1:
            mark.setdefault("marker", "o")
        ax.plot(line["step"], line["loss"], color=own.colour, label=own.label, **drawn, **mark)
        _not_numbers(ax, line["step"], line["loss"], own.colour)
    _mind_numbers(ax, steps["loss"])
    if not np.isfinite(steps["loss"].astype(float)).all():
        ax.plot([], [], "x", color=GREY, label="not a number")
    over_steps(ax)
    ax.set_ylabel("loss (nats a token)")
    return ax


def differences(
    frame: pd.DataFrame,
    ax: Axes,
    styles: Mapping[str, Style] | None = None,
    bounds: pd.DataFrame | None = None,
    *,
    place: float | None = None,
    top: float = 0.0,
    zero: bool | None = None,
) -> Axes:
    """Absolute relative loss difference to the control over steps (`stats.against`).

    Args: bounds: of rounding (`load.bounds`), dashed. place: of zero, below all data by default. top: least upper end
    of the axis. zero: room for zero; where needed by default.
    """
    styles = _styles(frame, styles)
    allowed = bounds if bounds is not None else pd.DataFrame(columns=["run", "step", "allowed"])
    place = zero_place([*frame["difference"].abs(), *allowed["allowed"]]) if place is None else place
    for run, line in frame.groupby("run", sort=False):
        own, size = styles[str(run)], line["difference"].abs()
        bound = allowed[(allowed["run"] == run) & np.isfinite(allowed["allowed"].astype(float))]
        alone: dict[str, Any] = {"marker": "_", "markersize": 14} if len(bound) == 1 else {}
        ax.plot(bound["step"], bound["allowed"], "--", color=own.colour, linewidth=1.2, **alone)
        some = size.where(size > 0)  # a step that differs by nothing ends a line
        ax.plot(line["step"], some, ".-", color=own.colour, label=own.label, linewidth=0.9, markersize=4)
        none = size == 0
        ax.plot(line["step"][none], [place] * int(none.sum()), "o", mfc="white", mec=own.colour, markersize=4)
        _not_numbers(ax, line["step"], size, own.colour)
    log_axis(ax, "y", place, top, zero=bool((frame["difference"] == 0).any()) if zero is None else zero)
    _mind_numbers(ax, pd.concat([frame["difference"], allowed["allowed"]]))
    over_steps(ax)
    ax.set_ylabel("loss against the control\n(relative)")
    return ax


def each_difference(
    frame: pd.DataFrame, bounds: pd.DataFrame, every: Sequence[Axes], styles: Mapping[str, Style]
) -> None:
    place = zero_place([*frame["difference"].abs(), *bounds["allowed"]])
    top = max([abs(value) for value in (*frame["difference"], *bounds["allowed"]) if math.isfinite(value)], default=0.0)
    zero, columns = bool((frame["difference"] == 0).any()), beside(len(every))
    for number, (run, ax) in enumerate(zip(dict.fromkeys(frame["run"]), every, strict=True)):
        differences(frame[frame["run"] == run], ax, styles, bounds, place=place, top=top, zero=zero)
        ax.set_title(fold(styles[str(run)].label), fontsize=10)
        ax.set_ylabel(ax.get_ylabel() if number % columns == 0 else "")
        ax.set_xlabel("step" if number + columns >= len(every) else "")
        ax.tick_params(labelbottom=number + columns >= len(every))
    broken = not np.isfinite(frame["difference"].astype(float)).all()
    legend(every[0], columns=4, handles=difference_key(zero=zero, broken=broken))


def difference_key(*, zero: bool, broken: bool) -> list[Line2D]:
    found = [
        Line2D([], [], color=GREY, marker=".", label="difference to the control"),
        Line2D([], [], color=GREY, linestyle="--", label="what rounding explains"),
    ]
    if zero:
        found.append(Line2D([], [], color=GREY, marker="o", mfc="white", linestyle="", label="exactly zero"))
    if broken:
        found.append(Line2D([], [], color=GREY, marker="x", linestyle="", label="not a number"))
    return found


def gradient_distances(
    frame: pd.DataFrame, allowed: Mapping[str, float], ax: Axes, styles: Mapping[str, Style]
) -> Axes:
    place = zero_place([*frame["distance"], *allowed.values()])
    for row, (run, own) in enumerate(styles.items()):
        found = frame.loc[frame["run"] == run, "distance"]
        some, none = found[found > 0], int((found == 0).sum())
        ax.plot(some, [row] * len(some), "o", color=own.colour, markersize=5, alpha=0.45, markeredgewidth=0)
        ax.plot([place] * none, [row] * none, "o", mfc="white", mec=own.colour, markersize=5)
        _not_numbers(ax, pd.Series([row] * len(found)), found, own.colour, upright=False)
        if run in allowed:
            ax.plot([allowed[run]] * 2, [row - 0.36, row + 0.36], color=own.colour, linewidth=2.4)
    log_axis(ax, "x", place, zero=bool((frame["distance"] == 0).any()))
    name_rows(ax, [own.label for own in styles.values()])
    crossed = "" if np.isfinite(frame["distance"].astype(float)).all() else "; x: not a finite number"
    ax.set_xlabel(f"distance of a gradient at step 1 (relative){crossed}")
    return ax


def stacks(
    frame: pd.DataFrame, ax: Axes, styles: Mapping[str, Style], *, part: str, value: str, scale: float, unit: str
) -> Axes:
    """A stacked bar a run.

    Args: part: column that names the part. value: column with its size. scale: divisor of sizes. unit: label of the
    axis.
    """
    parts = list(dict.fromkeys(frame[part]))
    for place, name in enumerate(parts):
        left = [_of(frame, run, parts[:place], part, value) / scale for run in styles]
        size = [_of(frame, run, [name], part, value) / scale for run in styles]
        ax.barh(
            range(len(styles)), size, left=left, height=0.62, color=COLOURS[place % len(COLOURS)], label=plain(name)
        )
        for row, (begin, long) in enumerate(zip(left, size, strict=True)):
            if place == len(parts) - 1 and begin + long == 0:
                ax.text(0, row, " 0", va="center", fontsize=9, color=GREY)
    name_rows(ax, [own.label for own in styles.values()])
    ax.set_xlim(0, 1.04 * (ax.dataLim.xmax or 1.0))
    ax.set_xlabel(unit)
    return ax


def marks(values: Mapping[str, float], ax: Axes, styles: Mapping[str, Style], label: str) -> Axes:
    known = [(row, values[run]) for row, run in enumerate(styles) if run in values and values[run] == values[run]]
    if known:
        rows, sizes = zip(*known, strict=True)
        ax.plot(sizes, rows, "D", color=CONTROL, mfc="white", markersize=6, label=label, clip_on=False, zorder=5)
    return ax


def _styles(frame: pd.DataFrame, styles: Mapping[str, Style] | None) -> Mapping[str, Style]:
    return style({str(run): str(run) for run in frame["run"].unique()}) if styles is None else styles


def _of(frame: pd.DataFrame, run: str, names: Sequence[str], part: str, value: str) -> float:
    found = frame.loc[(frame["run"] == run) & frame[part].isin(names), value].dropna().sum()
    return float(found)


def _not_numbers(ax: Axes, at: pd.Series, values: pd.Series, colour: str, *, upright: bool = True) -> None:
    broken = at[~np.isfinite(values.astype(float).to_numpy())]
    if len(broken):
        edge = [0.97 if upright else 0.985] * len(broken)
        where = (broken, edge) if upright else (edge, broken)
        transform = ax.get_xaxis_transform() if upright else ax.get_yaxis_transform()
        ax.plot(*where, "x", color=colour, markersize=6, transform=transform)


def _mind_numbers(ax: Axes, values: pd.Series) -> None:
    if len(values) and not np.isfinite(values.astype(float)).any():
        ax.set_yticks([])
        ax.set_yticks([], minor=True)
