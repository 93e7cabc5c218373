"""A report as one HTML file: styles, script and pictures inside, and a policy that lets a browser ask for nothing."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from harness.analysis.figures import figures
from harness.analysis.judge import Study
from harness.report.contents import Contents, named

FOLDER = Path(__file__).parent


def page(contents: Contents, pictures: Sequence[Picture]) -> str:
    style, script = ((FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["named"] = lambda sentence, study: named(study, sentence)
    environment.filters["uri"] = lambda svg: f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return environment.get_template("page.html").render(
        report=contents, pictures=pictures, style=style, script=script, policy=policy
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@dataclass(frozen=True)
class Picture:
    title: str
    caption: str
    svg: bytes


def pictures(study: Study) -> list[Picture]:
    with mpl.rc_context({"svg.hashsalt": "report", "figure.dpi": 96}):
        return [Picture(each.title, each.caption, _svg(each.figure)) for each in figures(study)]


def _svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return buffer.getvalue()
