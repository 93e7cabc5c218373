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

    def prose(*lines: str) -> list[str]:
        return [part for line in lines for part in screen.fold(line, room, "  ")]

    lines = prose(f"study {report.study}: {len(report.processes)} timed runs", *filter(None, [report.question]))
    for regime in report.regimes:
        rows = [[shown(row) for shown in COLUMNS.values()] for row in regime["rows"]]
        lines += ["", *prose(regime["title"]), "", *screen.table([*COLUMNS], rows, room)]
    caveats = [f"left out: {name}: {reason}" for name, reason in report.missing.items()]
    caveats += [f"NOT COMPARABLE: the runs differ in {reason}" for reason in report.mixed]
    return "\n".join([*lines, *prose("", *_about_intervals(report), *caveats, *report.notes)])


def interval_text(found: Interval | None) -> str:
    if found is None:
        return "-"
    marked = " includes 1" if found.includes_one else ""
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]{marked}"


def _about_intervals(report: Report) -> list[str]:
    intervals = [row["ratio"] for regime in report.regimes for row in regime["rows"] if row["ratio"] is not None]
    if not intervals:
        return []
    blocks = min(found.blocks for found in intervals)
    best = min(found.most_coverage for found in intervals)
    bound = f"; {blocks} blocks cover at most {100 * best:.1f} %" if best < CONFIDENCE else ""
    return [f"Intervals: {100 * CONFIDENCE:.0f} % percentile bootstrap over whole blocks, arms paired{bound}."]
