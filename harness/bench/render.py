"""A report as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from harness.bench.record import Process
from harness.bench.report import Report, Row, machine
from harness.bench.stats import CONFIDENCE, Interval
from harness.store import screen
from harness.store.screen import mib, ms

COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "engine": lambda row: " ".join(part for part in (row.engine, row.detail) if part),
    "strategy": lambda row: row.strategy,
    "blocks": lambda row: str(len(row.blocks)),
    "ms/step": lambda row: ms(row.step_s),
    "IQR steps": lambda row: ms(row.iqr_steps_s),
    "IQR blocks": lambda row: ms(row.iqr_blocks_s),
    "forward": lambda row: ms(row.parts["forward_s"]),
    "backward": lambda row: ms(row.parts["backward_s"]),
    "optimizer": lambda row: ms(row.parts["optimizer_s"]),
    "other": lambda row: ms(row.parts["other_s"]),
    "exposed": lambda row: ms(row.parts["exposed_comm_s"]),
    "tokens/s": lambda row: f"{row.tokens_per_s:.0f}",
    "peak MiB": lambda row: mib(row.peak_bytes),
    "planned peak": lambda row: mib(row.planned.get("peak")),
    "kept MiB": lambda row: mib(row.persistent_bytes),
    "sent MiB": lambda row: mib(row.sent_bytes),
    "planned sent": lambda row: mib(row.planned.get("sent")),
    "vs reference": lambda row: "reference" if row.is_reference else interval_text(row.ratio),
}
TARGET_HEAD = ("strategy", "native", "best of the others", "native / best", "finding")
LEGEND = (
    "ms/step: median over blocks of each process's median timed step; IQR steps: spread within a process, IQR blocks: "
    "between them.",
    "other: what is left of a step beside these three and loading; - where runs did not record it.",
    "exposed: the part of a step in which the host stood still for a collective; - where an engine does not tell.",
    "peak, kept: bytes of tensor storage within and between steps, of the rank that holds most; sent: by rank 0, a "
    "step.",
)


def text(report: Report) -> str:
    room = screen.width()

    def prose(*lines: str) -> list[str]:
        return [part for line in lines for part in screen.fold(line, room, "  ")]

    lines = prose(f"study {report.study}: {len(report.processes)} timed runs")
    lines += prose(
        *filter(None, [report.question]), *(f"NOT COMPARABLE: the runs differ in {why}" for why in report.mixed)
    )
    for regime in report.regimes:
        table = screen.table([*COLUMNS], [_cells(row) for row in regime.rows], room)
        lines += ["", *prose(regime.title), "", *table]
        if regime.targets:
            targets = [(t.strategy, t.native, t.best, interval_text(t.ratio), t.finding) for t in regime.targets]
            lines += ["", *screen.table(TARGET_HEAD, targets, room, flexible=(4,), folded=(4,))]
    return "\n".join([*lines, *prose("", *LEGEND, *_about_intervals(report), "", *_against(report))])


def _cells(row: Row) -> list[str]:
    return [shown(row) for shown in COLUMNS.values()]


def interval_text(found: Interval | None) -> str:
    if found is None:
        return "-"
    marked = " includes 1" if found.includes_one else ""
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]{marked}"


def _about_intervals(report: Report) -> tuple[str, ...]:
    intervals = [row.ratio for regime in report.regimes for row in regime.rows if row.ratio is not None]
    if not intervals:
        return ()
    blocks = min(found.blocks for found in intervals)
    best = min(found.most_coverage for found in intervals)
    bound = f"; {blocks} blocks cover at most {100 * best:.1f} %" if best < CONFIDENCE else ""
    return (
        f"Intervals: {100 * CONFIDENCE:.0f} % percentile bootstrap over whole blocks, arms paired{bound}. Against the "
        "best of the others: every one of them is held against native on its own, so that choosing the best afterwards "
        "favours nobody; faster is faster than each, slower is slower than at least one.",
    )


def _against(report: Report) -> list[str]:
    lines = [f"left out: {name}: {reason}" for name, reason in report.missing.items()]
    lines += [f"NOT COMPARABLE: the runs differ in {reason}" for reason in report.mixed]
    lines += report.notes
    lines += sorted({line for process in report.processes if (line := _oversubscribed(process))})
    if any(process.config["cluster"]["device"] == "cpu" for process in report.processes):
        lines.append("CPU ranks that share one machine's cores and memory: what overlaps on devices competes here")
    return lines


def _oversubscribed(process: Process) -> str:
    ranks, cores = process.config["mesh"]["world_size"], process.origin.get("cpu_count")
    if process.config["cluster"]["device"] != "cpu" or cores is None or ranks <= cores:
        return ""
    shared = f"{screen.counted(ranks, 'rank')} on {screen.counted(cores, 'core')}"
    return f"{shared} take turns: their times compare {ranks}-rank arms with each other alone"


def machine_lines(report: Report) -> Iterator[str]:
    """Machine, versions, sources and moments of the runs, a line of Markdown each."""
    facts = machine(report.processes)
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    dirty = " with changes" if facts["dirty"] else ""
    cores, threads = screen.counted(facts["cpu_count"], "core"), screen.counted(facts["threads_per_rank"], "thread")
    yield f"- {facts['cpu_model']}, {cores}, {threads} a rank, {facts['device']}"
    yield f"- {versions}; commit {str(facts['commit'])[:12]}{dirty}, sources {str(facts['sources_digest'])[:12]}"
    ended = f"{facts['first_run_ended']}, the last one {facts['last_run_ended']}"
    yield f"- the first run ended {ended}; order seed {report.order_seed}"
