"""Step times of a timed study's arms, with intervals; reads nothing but the store.

`report(root, study) -> Report`; `text`, `markdown` and `Report.as_json` show it.
"""

from harness.bench.render import markdown, text
from harness.bench.report import Report, report

__all__ = ["Report", "markdown", "report", "text"]
