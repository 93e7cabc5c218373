"""Pictures: a table and Axes in, the Axes out. Nothing here reads files, chooses a style globally or shows a window.

[Note: Pictures that can be read]
An arm has one colour and one marker in every picture (`style`), its bound is dashed in the same colour, and the control
is black. Colours are those of Okabe and Ito, which colour-blind people tell apart. Arms stand on the vertical axis, by
what tells them apart, so that names need no room below; what else needs a legend gets one outside the axes (`legend`).
On logarithmic axes what is exactly zero stands on a line of its own, marked 0; what is not a number at the upper edge.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
COLUMNS = 3
"""Panels beside each other, at most."""


class Style(NamedTuple):
    """How an arm is drawn everywhere."""

    colour: str
    marker: str
    label: str


def style(labels: Mapping[str, str], control: str | None = None) -> dict[str, Style]:
    """A colour and a marker for each run of `labels`, in its order; the control is black."""
    arms = [run for run in labels if run != control]
    found = {
        run: Style(COLOURS[place % len(COLOURS)], MARKERS[place // len(COLOURS) % len(MARKERS)], plain(labels[run]))
        for place, run in enumerate(arms)
    }
    if control in labels:
        found[str(control)] = Style(CONTROL, "", f"control: {plain(labels[str(control)])}")
    return found


def plain(text: object) -> str:
    """A text that is drawn as it stands: no mathematics, no control characters, and no name that a legend drops."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in str(text)).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def panels(count: int, height: float = 2.4) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels with the same axes, at most three beside each other; names stand above them."""
    columns = max(1, min(count, COLUMNS))
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


def bars(count: int, width: float = 8.0) -> tuple[Figure, Axes]:
    """A figure for `count` arms below each other."""
    figure, ax = plt.subplots(figsize=(width, 1.5 + 0.34 * max(2, count)), layout="constrained")
    return figure, ax


def legend(ax: Axes, columns: int = 3, handles: Sequence[Any] | None = None) -> None:
    """A legend below everything, where no data are."""
    figure = ax.get_figure()
    found = ax.get_legend_handles_labels() if handles is None else (handles, [each.get_label() for each in handles])
    if found[0] and figure is not None:
        figure.legend(*found, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)


def losses(steps: pd.DataFrame, ax: Axes, styles: Mapping[str, Style] | None = None) -> Axes:
    """Loss over steps, a line a run (`load.steps`)."""
    styles = _styles(steps, styles)
    for place, (run, line) in enumerate(steps.groupby("run", sort=False)):
        own = styles[str(run)]
        drawn: dict[str, Any] = {"linewidth": 4.0, "alpha": 0.35} if own.colour == CONTROL else {"linewidth": 1.3}
        few = max(1, len(line) // 5)  # marks of lines that lie on each other stand beside each other
        mark: dict[str, Any] = (
            {"marker": own.marker, "markersize": 5, "markevery": (place % few, few)} if own.marker else {}
        )
        ax.plot(line["step"], line["loss"], color=own.colour, label=own.label, **drawn, **mark)
        _not_numbers(ax, line["step"], line["loss"], own.colour)
    _steps(ax)
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
    """Size of the relative difference of the loss to the control's over steps, a line a run (`stats.against`).

    Args:
        frame: of one run or more.
        ax: where to draw.
        styles: of its runs.
        bounds: what rounding explains (`load.bounds`), dashed in each run's colour.
        place: where zero stands; below all that is drawn where not given.
        top: a size up to which the axis reaches at least.
        zero: whether the axis has room for zero; where it is needed, if not given.
    """
    styles = _styles(frame, styles)
    allowed = bounds if bounds is not None else pd.DataFrame(columns=["run", "step", "allowed"])
    place = zero_place([*frame["difference"].abs(), *allowed["allowed"]]) if place is None else place
    for run, line in frame.groupby("run", sort=False):
        own, size = styles[str(run)], line["difference"].abs()
        bound = allowed[(allowed["run"] == run) & np.isfinite(allowed["allowed"].astype(float))]
        ax.plot(bound["step"], bound["allowed"], "--", color=own.colour, linewidth=1.2)
        some = size > 0
        ax.plot(line["step"][some], size[some], ".-", color=own.colour, label=own.label, linewidth=0.9, markersize=4)
        none = size == 0
        ax.plot(line["step"][none], [place] * int(none.sum()), "o", mfc="white", mec=own.colour, markersize=4)
        _not_numbers(ax, line["step"], size, own.colour)
    log_axis(ax, "y", place, top, zero=bool((frame["difference"] == 0).any()) if zero is None else zero)
    _steps(ax)
    ax.set_ylabel("loss against the control\n(relative)")
    return ax


def each_difference(
    frame: pd.DataFrame, bounds: pd.DataFrame, every: Sequence[Axes], styles: Mapping[str, Style]
) -> None:
    """`differences`, a panel an arm with its name above; all panels have one scale, and one legend below.

    Args:
        frame: of as many runs as there are panels.
        bounds: what rounding explains of them.
        every: axes, as `panels` makes them.
        styles: of the runs.
    """
    place = zero_place([*frame["difference"].abs(), *bounds["allowed"]])
    top = max([abs(value) for value in (*frame["difference"], *bounds["allowed"]) if math.isfinite(value)], default=0.0)
    zero, columns = bool((frame["difference"] == 0).any()), min(len(every), COLUMNS)
    for number, (run, ax) in enumerate(zip(dict.fromkeys(frame["run"]), every, strict=True)):
        differences(frame[frame["run"] == run], ax, styles, bounds, place=place, top=top, zero=zero)
        ax.set_title(fold(styles[str(run)].label), fontsize=10)
        ax.set_ylabel(ax.get_ylabel() if number % columns == 0 else "")
        ax.set_xlabel("step" if number + columns >= len(every) else "")
        ax.tick_params(labelbottom=number + columns >= len(every))
    broken = not np.isfinite(frame["difference"].astype(float)).all()
    legend(every[0], columns=4, handles=difference_key(zero=zero, broken=broken))


def fold(label: str, size: int = 32) -> str:
    """A label in lines, broken after commas."""
    lines = [""]
    for part in label.split(", "):
        joined = f"{lines[-1]}, {part}" if lines[-1] else part
        lines = [*lines[:-1], joined] if len(joined) <= size or not lines[-1] else [*lines[:-1], f"{lines[-1]},", part]
    return "\n".join(lines)


def difference_key(*, zero: bool, broken: bool) -> list[Line2D]:
    """What the lines of `differences` mean, for one legend of many panels; `zero`, `broken`: whether there are such."""
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
    """Distance of every captured gradient to the control's: a row of dots a run, with a bar at what is allowed.

    Args:
        frame: as `load.gradients` makes it, of one or more runs.
        allowed: largest distance that rounding explains, by run.
        ax: where to draw.
        styles: of the runs to show, in order.
    """
    place = zero_place([*frame["distance"], *allowed.values()])
    for row, (run, own) in enumerate(styles.items()):
        found = frame.loc[frame["run"] == run, "distance"]
        some, none = found[found > 0], int((found == 0).sum())
        ax.plot(some, [row] * len(some), "o", color=own.colour, markersize=5, alpha=0.45, markeredgewidth=0)
        ax.plot([place] * none, [row] * none, "o", mfc="white", mec=own.colour, markersize=5)
        if run in allowed:
            ax.plot([allowed[run]] * 2, [row - 0.36, row + 0.36], color=own.colour, linewidth=2.4)
    log_axis(ax, "x", place, zero=bool((frame["distance"] == 0).any()))
    _rows(ax, [own.label for own in styles.values()])
    ax.set_xlabel("distance of a gradient at step 1 (relative); the bar is what rounding explains")
    return ax


def step_times(steps: pd.DataFrame, ax: Axes, styles: Mapping[str, Style]) -> Axes:
    """Every step's time, a row of dots a run, with a bar at the median; milliseconds from zero."""
    for row, (run, own) in enumerate(styles.items()):
        found = 1e3 * steps.loc[steps["run"] == run, "step_time_s"].dropna()
        ax.plot(found, [row] * len(found), "o", color=own.colour, markersize=5, alpha=0.35, markeredgewidth=0)
        if len(found):
            ax.plot([found.median()] * 2, [row - 0.36, row + 0.36], color=own.colour, linewidth=2.4)
    _rows(ax, [own.label for own in styles.values()])
    ax.set_xlim(left=0)
    ax.set_xlabel("time of a step (ms); the bar is the median")
    return ax


def stacks(
    frame: pd.DataFrame, ax: Axes, styles: Mapping[str, Style], *, part: str, value: str, scale: float, unit: str
) -> Axes:
    """A bar a run, made of parts.

    Args:
        frame: a row a run and part.
        ax: where to draw.
        styles: of the runs to show, in order.
        part: column that names the part. value: column with its size. scale: what a size is divided by.
        unit: what the axis says.
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
    _rows(ax, [own.label for own in styles.values()])
    ax.set_xlim(left=0)
    ax.set_xlabel(unit)
    return ax


def marks(values: Mapping[str, float], ax: Axes, styles: Mapping[str, Style], label: str) -> Axes:
    """A diamond a run, on bars that are already there."""
    known = [(row, values[run]) for row, run in enumerate(styles) if run in values and values[run] == values[run]]
    if known:
        rows, sizes = zip(*known, strict=True)
        ax.plot(sizes, rows, "D", color=CONTROL, mfc="white", markersize=6, label=label)
    return ax


def shares_of_bounds(frame: pd.DataFrame, ax: Axes, styles: Mapping[str, Style]) -> Axes:
    """How much of its bound each check used up (`load.evidence`): a row of dots a run, the farthest
    one named beside it."""
    place = zero_place([*frame["used"].replace(math.inf, math.nan), 1.0])
    for row, (run, own) in enumerate(styles.items()):
        mine = frame[frame["run"] == run]
        some = mine[(mine["used"] > 0) & np.isfinite(mine["used"])]
        none = int((mine["used"] == 0).sum())
        ax.plot(some["used"], [row] * len(some), "o", color=own.colour, markersize=5, alpha=0.55, markeredgewidth=0)
        ax.plot([place] * none, [row] * none, "o", mfc="white", mec=own.colour, markersize=5)
        if len(mine):
            farthest = mine.loc[mine["used"].astype(float).idxmax(), "check"]
            ax.text(1.01, row, plain(farthest), transform=ax.get_yaxis_transform(), va="center", fontsize=9)
    ax.axvline(1.0, color=CONTROL, linestyle="--", linewidth=1.2)
    log_axis(ax, "x", place, zero=bool((frame["used"] == 0).any()))
    _rows(ax, [own.label for own in styles.values()])
    ax.set_xlabel("observed / what rounding explains (1 is the bound)")
    return ax


def resolutions(values: Mapping[str, float], ax: Axes, styles: Mapping[str, Style]) -> Axes:
    """Smallest relative error in the scale of all gradients that would have been found, a dot a run."""
    known = {run: values[run] for run in styles if run in values and values[run] == values[run]}
    place = zero_place(known.values())
    for row, (run, own) in enumerate(styles.items()):
        if run in known:
            ax.plot([known[run] or place], [row], own.marker or "o", color=own.colour, markersize=7)
        else:
            ax.text(0.01, row, "not measured", transform=ax.get_yaxis_transform(), va="center", fontsize=9, color=GREY)
    log_axis(ax, "x", place, zero=0.0 in known.values())
    _rows(ax, [own.label for own in styles.values()])
    ax.set_xlabel("smallest error in the scale of all gradients that would have shown (relative)")
    return ax


def rates(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Shares with their intervals (`stats.rates`), per cent, a row each, with the counts beside them."""
    for row, each in enumerate(frame.itertuples()):
        colour = COLOURS[row % len(COLOURS)]
        ax.plot([100 * each.low, 100 * each.high], [row, row], color=colour, linewidth=2)
        ax.plot([100 * each.share], [row], "o", color=colour, markersize=7)
        ax.text(101.5, row, f"{each.hits} of {each.of}", va="center", fontsize=9)
    _rows(ax, [plain(name) for name in frame["name"]])
    ax.set_xlim(-1, 101)
    ax.set_xlabel("per cent; the line is a 95 % interval")
    return ax


def zero_place(values: Iterable[float]) -> float:
    """Where a logarithmic axis has room for zero: a decade below the smallest other size."""
    sizes = [abs(float(value)) for value in values if value == value and value and math.isfinite(value)]
    return 10.0 ** (math.floor(math.log10(min(sizes))) - 1) if sizes else 1e-17


def log_axis(ax: Axes, which: str, place: float, top: float = 0.0, *, zero: bool = True) -> None:
    """Make an axis logarithmic, with decades named above `place` and `place` itself named 0.

    Args:
        ax: whose. which: `x` or `y`. place: as `zero_place` gives it. top: a size up to which it reaches at least.
        zero: whether anything stands there; else the axis begins above it.
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


def _styles(frame: pd.DataFrame, styles: Mapping[str, Style] | None) -> Mapping[str, Style]:
    return style({str(run): str(run) for run in frame["run"].unique()}) if styles is None else styles


def _of(frame: pd.DataFrame, run: str, names: Sequence[str], part: str, value: str) -> float:
    found = frame.loc[(frame["run"] == run) & frame[part].isin(names), value].dropna().sum()
    return float(found)


def _rows(ax: Axes, names: Sequence[str]) -> None:
    """Names on the vertical axis, the first on top."""
    ax.set_yticks(range(len(names)), list(names), fontsize=10)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    ax.set_axisbelow(True)


def _steps(ax: Axes) -> None:
    ax.set_xlabel("step")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(color="#E5E5E5", linewidth=0.6)
    ax.set_axisbelow(True)


def _not_numbers(ax: Axes, at: pd.Series, values: pd.Series, colour: str) -> None:
    """Crosses at the upper edge where a value is not finite."""
    broken = at[~np.isfinite(values.astype(float))]
    if len(broken):
        ax.plot(broken, [0.97] * len(broken), "x", color=colour, markersize=6, transform=ax.get_xaxis_transform())


__all__ = [
    "COLOURS",
    "CONTROL",
    "MARKERS",
    "MIB",
    "Style",
    "bars",
    "difference_key",
    "differences",
    "each_difference",
    "fold",
    "gradient_distances",
    "legend",
    "log_axis",
    "losses",
    "marks",
    "panels",
    "plain",
    "rates",
    "resolutions",
    "shares_of_bounds",
    "stacks",
    "step_times",
    "style",
    "zero_place",
]
