"""Pictures: a table and Axes in, the Axes out. Nothing here reads files, chooses a style globally or shows a window."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes

FLOOR = 1e-10
"""Where differences that are exactly zero are drawn on a logarithmic axis."""


def losses(steps: pd.DataFrame, ax: Axes, labels: Mapping[str, str] | None = None) -> Axes:
    """Loss over steps, a line a run (`load.steps`)."""
    for run, line in steps.groupby("run", sort=False):
        ax.plot(line["step"], line["loss"], label=_label(run, labels), linewidth=1.2)
    ax.set_xlabel("step")
    ax.set_ylabel("loss (nats a token)")
    return ax


def differences(frame: pd.DataFrame, ax: Axes, labels: Mapping[str, str] | None = None) -> Axes:
    """Size of the relative difference to the control over steps, a line a run (`stats.against`)."""
    for run, line in frame.groupby("run", sort=False):
        ax.plot(
            line["step"], line["difference"].abs().clip(lower=FLOOR), ".-", label=_label(run, labels), linewidth=0.8
        )
    ax.set_yscale("log")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel("step")
    ax.set_ylabel("relative difference of the loss")
    return ax


def bound(frame: pd.DataFrame, ax: Axes, label: str, colour: str = "black") -> Axes:
    """What rounding explains, over steps (columns `step`, `allowed`): a dashed line."""
    ax.plot(frame["step"], frame["allowed"], "--", color=colour, linewidth=1.0, label=label)
    return ax


def gradient_distances(frame: pd.DataFrame, allowed: Mapping[str, float], ax: Axes, labels: Mapping[str, str]) -> Axes:
    """Distance of every captured gradient to the control's: a column of dots a run, with a bar at what is allowed.

    Args:
        frame: as `load.gradients` makes it, of one or more runs.
        allowed: largest distance that rounding explains, by run.
        ax: where to draw.
        labels: name of each run below its column; its keys give the order.
    """
    for place, run in enumerate(labels):
        dots = frame.loc[frame["run"] == run, "distance"].clip(lower=FLOOR)
        ax.plot([place] * len(dots), dots, "o", markersize=3, alpha=0.4, markeredgewidth=0)
        ax.plot([place - 0.35, place + 0.35], [allowed[run]] * 2, color="black", linewidth=1.2)
    ax.set_yscale("log")
    ax.set_xticks(range(len(labels)), list(labels.values()), rotation=45, ha="right", fontsize=7)
    ax.set_ylabel("relative distance of a gradient, step 1")
    return ax


def _label(run: object, labels: Mapping[str, str] | None) -> str:
    return (labels or {}).get(str(run), str(run))
