"""A study's figures as SVG, for a page."""

from __future__ import annotations

import io
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from harness.analysis.drawing import quietly
from harness.analysis.figures import figures
from harness.analysis.judge import Study


@dataclass(frozen=True)
class Picture:
    title: str
    caption: str
    svg: bytes


def pictures(study: Study) -> list[Picture]:
    with mpl.rc_context({"svg.hashsalt": "report", "figure.dpi": 96}), quietly():
        return [Picture(each.title, each.caption, _svg(each.figure)) for each in figures(study)]


def _svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return buffer.getvalue()
