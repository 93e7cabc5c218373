"""Write docs/metrics.md: every metric, as `harness/store/fields.py` declares it.

python benchmarks/pages/metrics_page.py
"""

from __future__ import annotations

from benchmarks.pages.tables import DOCS, made, markdown_table
from harness.store.fields import METRICS

PAGE = DOCS / "metrics.md"


def guide() -> str:
    rows = [
        (f"`{m.path}`", m.unit or "-", m.meaning, "cost" if m.cost else "same bits", "yes" if m.synced else "no")
        for m in METRICS
    ]
    return made(PAGE, {"metrics": markdown_table(["metric", "unit", "meaning", "resume", "synced"], rows)})


if __name__ == "__main__":
    PAGE.write_text(guide(), encoding="utf-8")
