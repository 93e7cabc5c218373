"""Write docs/metrics.md: every metric, as `harness/store/fields.py` declares it.

python benchmarks/pages/metrics_page.py
"""

from __future__ import annotations

from pathlib import Path

from harness.store.fields import METRICS
from harness.store.files import write_atomic

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def guide() -> str:
    """The reference as Markdown: a row for each metric."""
    lines = [
        "# Every metric",
        "",
        "*Reference. Every metric of a step: its unit, what it means, and whether resuming a run may change it. Made",
        "by `python benchmarks/pages/metrics_page.py` from `harness/store/fields.py`.*",
        "",
        "A run's `metrics.jsonl` has one line for each step, written by rank 0; a slash is one level of nesting.",
        'Non-finite numbers are the strings `"nan"`, `"inf"` and `"-inf"`; null is what cannot be observed. *Resume*:',
        "whether a run that was interrupted must have the same bits; a cost may differ.",
        "",
        "| metric | unit | meaning | resume | synced |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{each.path}` | {each.unit or '-'} | {each.meaning} | {'cost' if each.cost else 'same bits'} |"
        f" {'yes' if each.synced else 'no'} |"
        for each in METRICS
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_atomic(PAGE, guide())
