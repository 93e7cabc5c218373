"""What a step costs each arm of a timed study, and how sure that is. A reader: it looks at the store and nothing else.

`report(root, study) -> Report`; `text`, `markdown` and `Report.as_json` show it.
"""

from harness.bench.render import markdown, text
from harness.bench.report import Report, report

__all__ = ["Report", "markdown", "report", "text"]
