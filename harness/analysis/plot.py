"""Pictures: a table and Axes in, the Axes out; no files, global styles or windows.

[Note: Pictures that can be read] An arm has one colour and one marker in every picture (`style`), its bound is dashed
in the same colour, and the control is black. Colours are those of Okabe and Ito, which colour-blind people tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from harness.store.screen import shorten

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F6000")
MARKERS = "os^Dv"
CONTROL = "#000000"
MIB = 2**20
LONGEST = 40
LETTERS = "\u0530"
"""First letter that matplotlib's own font lacks; it would warn for each one."""


class Style(NamedTuple):
    colour: str
    marker: str
    label: str


def style(labels: Mapping[str, str], control: str | None = None) -> dict[str, Style]:
    arms = [run for run in labels if run != control]
    found = {
        run: Style(COLOURS[place % len(COLOURS)], MARKERS[place // len(COLOURS) % len(MARKERS)], plain(labels[run]))
        for place, run in enumerate(arms)
    }
    if control in labels:
        found[str(control)] = Style(CONTROL, "", f"control: {plain(labels[str(control)])}")
    return found


def plain(text: object) -> str:
    """Text of a label as it stands: no mathematics, no legend's hidden name, at most `LONGEST` characters."""
    cut = shorten(
        "".join(letter if letter.isprintable() and letter < LETTERS else "?" for letter in str(text)), LONGEST
    )
    return f"{' ' * cut.startswith('_')}{cut}".replace("$", r"\$")


def bars(count: int) -> tuple[Figure, Axes]:
    figure, ax = plt.subplots(figsize=(8, 1.5 + 0.34 * max(2, count)), layout="constrained")
    return figure, ax


def legend(ax: Axes, columns: int = 3) -> None:
    figure, handles = ax.get_figure(), ax.get_legend_handles_labels()
    if handles[0] and figure is not None:
        figure.legend(*handles, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)


def over_steps(ax: Axes) -> None:
    ax.set_xlabel("step")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.grid(color="#E5E5E5", linewidth=0.6)
    ax.set_axisbelow(True)


def losses(steps: pd.DataFrame, ax: Axes, styles: Mapping[str, Style]) -> Axes:
    for place, (run, line) in enumerate(steps.groupby("run", sort=False)):
        own = styles[str(run)]
        drawn: dict[str, Any] = {"linewidth": 4.0, "alpha": 0.35} if own.colour == CONTROL else {"linewidth": 1.3}
        few = max(1, len(line) // 5)  # marks of lines that lie on each other stand beside each other
        mark: dict[str, Any] = {
            "marker": own.marker or "o" * (len(line) == 1),
            "markersize": 5,
            "markevery": (place % few, few),
        }
        ax.plot(line["step"], line["loss"], color=own.colour, label=own.label, **drawn, **mark)
    over_steps(ax)
    ax.set_ylabel("loss (nats a token)")
    return ax


def differences(frame: pd.DataFrame, ax: Axes, styles: Mapping[str, Style], bounds: pd.DataFrame) -> Axes:
    """Absolute relative loss difference to the control over steps (`stats.against`), logarithmic down to the smallest.

    Args: bounds: of rounding (`judge.bounds`), dashed.
    """
    for run, line in frame.groupby("run", sort=False):
        own, bound = styles[str(run)], bounds[bounds["run"] == run]
        ax.plot(line["step"], line["difference"].abs(), ".-", color=own.colour, label=own.label, linewidth=0.9)
        ax.plot(bound["step"], bound["allowed"].astype(float), "_--", color=own.colour, linewidth=1.2)
    sizes = np.abs([*frame["difference"], *bounds["allowed"].astype(float)])
    ax.set_yscale("symlog", linthresh=min(sizes[np.isfinite(sizes) & (sizes > 0)], default=1e-17))
    ax.set_ylim(bottom=0)
    over_steps(ax)
    ax.set_ylabel("loss against the control\n(relative)")
    return ax


def stacks(
    frame: pd.DataFrame, ax: Axes, styles: Mapping[str, Style], *, part: str, value: str, scale: float, unit: str
) -> Axes:
    """A stacked bar a run.

    Args: part: column that names the part. value: column with its size. scale: divisor of sizes. unit: label of the
    axis.
    """
    table = frame.astype({value: float}).pivot_table(value, "run", part, aggfunc="sum", sort=False)
    table = table.reindex(list(styles)).fillna(0.0) / scale
    table.index = pd.Index([own.label for own in styles.values()])
    table.rename(columns=plain).plot.barh(stacked=True, ax=ax, width=0.62, color=list(COLOURS), legend=False)
    ax.invert_yaxis()
    ax.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.set_xlabel(unit)
    return ax


def marks(values: Mapping[str, float], ax: Axes, styles: Mapping[str, Style], label: str) -> Axes:
    known = [(row, values[run]) for row, run in enumerate(styles) if run in values and values[run] == values[run]]
    if known:
        rows, sizes = zip(*known, strict=True)
        ax.plot(sizes, rows, "D", color=CONTROL, mfc="white", markersize=6, label=label, clip_on=False, zorder=5)
    return ax
