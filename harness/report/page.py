"""A report as one HTML file: styles, script and pictures inside, and a policy that lets a browser ask for nothing."""

from __future__ import annotations

import base64
import hashlib
import io
from pathlib import Path

import matplotlib as mpl
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from harness.analysis.figures import figures
from harness.report.contents import Contents, named

FOLDER = Path(__file__).parent


def page(contents: Contents) -> str:
    style, script = ((FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["named"] = lambda sentence, study: named(study, sentence)
    environment.filters["uri"] = lambda figure: f"data:image/svg+xml;base64,{base64.b64encode(_svg(figure)).decode()}"
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    with mpl.rc_context({"svg.hashsalt": "report", "figure.dpi": 96}):
        drawn = list(figures(contents.study))
        return environment.get_template("page.html").render(
            report=contents, pictures=drawn, style=style, script=script, policy=policy
        )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return buffer.getvalue()
