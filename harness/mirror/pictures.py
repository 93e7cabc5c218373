"""A study's pictures as files, drawn by `harness.analysis.plot`."""

from __future__ import annotations

from pathlib import Path

from harness.parity import StudyVerdict

SIZE, DPI = (9.0, 5.0), 150
"""Inches, and dots an inch."""


def pictures(found: StudyVerdict, folder: Path) -> list[Path]:
    """Draw the losses of each control and its arms.

    Returns:
        PNG files in `folder`; none where the study has no arm, or matplotlib or pandas is not installed.
    """
    try:
        from matplotlib.figure import Figure

        from harness.analysis import load, plot
    except ImportError:
        return []
    drawn = []
    for number, control in enumerate(dict.fromkeys(arm.control for arm in found.arms)):
        figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
        ax = figure.subplots()
        plot.losses(load.steps([control, *(arm.arm for arm in found.arms if arm.control == control)]), ax)
        figure.legend(loc="outside right upper", fontsize=7)
        ax.set_title(f"{found.study}: control {Path(control).name}")
        drawn.append(folder / f"loss_{number}.png")
        figure.savefig(drawn[-1])
    return drawn
