"""Pictures: a table and Axes in, the Axes out; no files, global styles or windows. See `harness.analysis.drawing`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from harness.analysis.drawing import (
    COLOURS,
    CONTROL,
    GREY,
    Style,
    beside,
    fold,
    legend,
    log_axis,
    name_rows,
    no_scale,
    over_steps,
    plain,
    style,
    zero_place,
)


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
    ax.set_xlabel("distance of a gradient at step 1 (relative)" + _crossed(frame["distance"]))
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


def _crossed(values: pd.Series) -> str:
    return "" if np.isfinite(values.astype(float)).all() else "; x: not a finite number"


def _mind_numbers(ax: Axes, values: pd.Series) -> None:
    if len(values) and not np.isfinite(values.astype(float)).any():
        no_scale(ax)
