"""Step times of a timed study's arms, with intervals; reads nothing but the store.

`report(root, study) -> Report`; `text` and `Report.as_json` show it.
"""

from harness.bench.report import Report, report, text

__all__ = ["Report", "report", "text"]
