"""Write docs/metrics.md: every metric, as `harness/store/fields.py` declares it.

python benchmarks/pages/metrics_page.py
"""

from __future__ import annotations

from benchmarks.pages.tables import DOCS, markdown_table
from harness.store.fields import METRICS

HEAD = """# Every metric

*Reference. Every metric of a step: its unit, what it means, and whether resuming a run may change it. Made
by `python benchmarks/pages/metrics_page.py` from `harness/store/fields.py`.*

A run's `metrics.jsonl` has one line for each step, written by rank 0; a slash is one level of nesting.
Non-finite numbers are the strings `"nan"`, `"inf"` and `"-inf"`; null is what cannot be observed. *Resume*:
whether a run that was interrupted must have the same bits; a cost may differ.

"""


def guide() -> str:
    """The reference as Markdown: a row for each metric."""
    rows = [
        (f"`{m.path}`", m.unit or "-", m.meaning, "cost" if m.cost else "same bits", "yes" if m.synced else "no")
        for m in METRICS
    ]
    return HEAD + markdown_table(["metric", "unit", "meaning", "resume", "synced"], rows) + "\n"


if __name__ == "__main__":
    (DOCS / "metrics.md").write_text(guide(), encoding="utf-8")
