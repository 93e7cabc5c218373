"""A study's figures as PNG files: those of its report."""

from __future__ import annotations

from pathlib import Path

from harness.parity import StudyVerdict

DPI = 150


def pictures(root: Path, found: StudyVerdict, folder: Path) -> list[Path]:
    try:
        from matplotlib import pyplot as plt

        from harness.analysis import drawing, figures, judge
    except ImportError:
        return []
    drawn = []
    with drawing.quietly():
        for each in figures.figures(judge.study(root, found.study, verdict=found)):
            drawn.append(folder / f"{each.title.lower().replace(' ', '_')}.png")
            each.figure.savefig(drawn[-1], dpi=DPI)
            plt.close(each.figure)
    return drawn
