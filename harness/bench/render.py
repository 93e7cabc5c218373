"""A report as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from harness.bench.record import Facts
from harness.bench.report import Report
from harness.bench.stats import CONFIDENCE, Interval
from harness.store import screen
from harness.store.screen import mib, ms

COLUMNS: Mapping[str, Callable[[Facts], str]] = {
    "engine": lambda row: f"{row['engine']} {row['detail']}".rstrip(),
    "strategy": lambda row: str(row["strategy"]),
    "blocks": lambda row: str(len(row["blocks"])),
    "ms/step": lambda row: ms(row["step_s"]),
    "IQR steps": lambda row: ms(row["iqr_steps_s"]),
    "IQR blocks": lambda row: ms(row["iqr_blocks_s"]),
    "forward": lambda row: ms(row["parts"]["forward_s"]),
    "backward": lambda row: ms(row["parts"]["backward_s"]),
    "optimizer": lambda row: ms(row["parts"]["optimizer_s"]),
    "other": lambda row: ms(row["parts"]["other_s"]),
    "exposed": lambda row: ms(row["parts"]["exposed_comm_s"]),
    "tokens/s": lambda row: f"{row['tokens_per_s']:.0f}",
    "peak MiB": lambda row: mib(row["peak_bytes"]),
    "planned peak": lambda row: mib(row["planned"].get("peak")),
    "kept MiB": lambda row: mib(row["persistent_bytes"]),
    "sent MiB": lambda row: mib(row["sent_bytes"]),
    "planned sent": lambda row: mib(row["planned"].get("sent")),
    "vs reference": lambda row: "reference" if row["is_reference"] else interval_text(row["ratio"]),
}


def text(report: Report) -> str:
    room = screen.width()
    told = [f"study {report.study}: {len(report.processes)} timed runs", *filter(None, [report.question])]
    caveats = [f"left out: {name}: {reason}" for name, reason in report.missing.items()]
    caveats += [f"NOT COMPARABLE: the runs differ in {reason}" for reason in report.mixed]
    below = ["", *_about_intervals(report), *caveats, *report.notes]
    above, under = ([part for line in lines for part in screen.fold(line, room, "  ")] for lines in (told, below))
    rows = [[shown(row) for shown in COLUMNS.values()] for row in report.rows]
    return "\n".join([*above, "", *screen.table([*COLUMNS], rows, room), *under])


def interval_text(found: Interval | None) -> str:
    if found is None:
        return "-"
    marked = " includes 1" if found.includes_one else ""
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]{marked}"


def _about_intervals(report: Report) -> list[str]:
    intervals = [row["ratio"] for row in report.rows if row["ratio"] is not None]
    if not intervals:
        return []
    least = min(intervals, key=lambda found: found.blocks)
    bound = f"; {least.blocks} blocks cover at most {100 * least.most_coverage:.1f} %"
    bound *= least.most_coverage < CONFIDENCE
    return [f"Intervals: {100 * CONFIDENCE:.0f} % percentile bootstrap over whole blocks, arms paired{bound}."]
