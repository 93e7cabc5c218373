"""From the runs of a timed study to rows, ratios and caveats, and their text."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.bench.record import PARTS, Facts, Process, load, median
from harness.bench.stats import CONFIDENCE, Interval, median_ratio, spread
from harness.config.errors import refuse
from harness.config.words import ask_again
from harness.store import screen
from harness.store.labels import labels
from harness.store.metrics import plain
from harness.store.provenance import sources_digest
from harness.store.screen import mib, ms
from harness.store.study import read_study

SAME = ("cpu_model", "device", "cpu_capability", "threads_per_rank", "hosts", "backend")


@dataclass(frozen=True)
class Report:
    study: str
    question: str
    order_seed: int | None
    rows: Sequence[Facts]
    """One an arm (`_row`)."""
    processes: Sequence[Facts]
    """Facts of each `harness.bench.record.Process`."""
    missing: Mapping[str, str]
    notes: Sequence[str]
    """Caveats: disturbed blocks, peaks off their plan, other sources."""
    mixed: Sequence[str]

    @property
    def exit_code(self) -> int:
        """0 complete, 3 with missing cells, 4 where the runs cannot be compared."""
        return 4 if self.mixed else 3 if self.missing else 0

    def as_json(self) -> Facts:
        found: Facts = plain(asdict(self))
        return found


def report(root: Path | str, study: str) -> Report:
    """Raises `BadRequest`: there is no such study, or none of its runs is timed and done."""
    record = read_study(Path(root), study)
    if record is None:
        from harness.parity.study import unknown  # loads numpy

        raise unknown(f"bench {study}", Path(root), study)
    folder = Path(root) / study
    loaded = {cell["signature"]: load(folder / cell["directory"]) for cell in record["cells"]}
    if all(isinstance(found, str) for found in loaded.values()):
        reasons = "; ".join(sorted({str(found) for found in loaded.values()}))
        raise refuse(
            f"bench {study}",
            f"has no timed run that is done ({reasons})",
            fix=f"measure: bench under base: in the study's file, then {ask_again(root, study)}",
        )
    missing = {c["directory"]: found for c in record["cells"] if isinstance(found := loaded[c["signature"]], str)}
    every = [found for found in loaded.values() if isinstance(found, Process)]
    common = Counter(process.origin.get("sources_digest") for process in every).most_common(1)[0][0]
    processes = [process for process in every if process.origin.get("sources_digest") == common]
    others = [process.facts["run"].partition("/")[2] for process in every if process not in processes]
    missing |= dict.fromkeys(others, "stale: made by other sources than most runs")
    return Report(
        study=study,
        question=record["question"],
        order_seed=record.get("order_seed"),
        rows=_rows(processes, _references(record["cells"], loaded)),
        processes=[process.facts for process in processes],
        missing=missing,
        notes=list(_notes(processes)),
        mixed=list(_mixed(processes)),
    )


def _references(cells: Iterable[Mapping[str, Any]], loaded: Mapping[str, Process | str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for cell in cells:
        arm, control = loaded[cell["signature"]], loaded.get(cell["control"] or "")
        if isinstance(arm, Process) and isinstance(control, Process):
            found |= {each.facts["arm"]: control.facts["arm"] for each in (arm, control)}
    return found


def _rows(processes: Sequence[Process], references: Mapping[str, str]) -> list[Facts]:
    arms: dict[str, list[Process]] = defaultdict(list)
    for process in sorted(processes, key=lambda process: int(process.facts["block"])):
        arms[process.facts["arm"]].append(process)
    details = _details(arms)
    rows = {arm: _row(arms, arm, references.get(arm), details[arm]) for arm in arms}

    def order(arm: str) -> tuple[Any, ...]:
        row, reference = rows[arm], rows.get(references.get(arm, arm), rows[arm])
        return reference["detail"], row["strategy"], not row["is_reference"], row["engine"], row["detail"]

    return [rows[arm] for arm in sorted(rows, key=order)]


def _details(arms: Mapping[str, Sequence[Process]]) -> dict[str, str]:
    """Settings that tell an arm from others of its engine and sharding."""
    kinds: dict[Any, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for arm, (process, *_) in arms.items():
        kinds[process.facts["engine"], process.facts["strategy"]][arm] = process.config
    found = dict.fromkeys(arms, "")
    for kind in kinds.values():
        found |= labels(kind) if len(kind) > 1 else {}
    return found


def _row(arms: Mapping[str, Sequence[Process]], arm: str, reference: str | None, detail: str) -> Facts:
    """One arm: medians over processes, of each process's own median; `iqr_steps_s` is the spread of steps within a
    process, `iqr_blocks_s` that of processes; `ratio` the step time over the reference's, None for the reference."""
    group = arms[arm]
    last, step_s = group[-1].facts, statistics.median([process.median_s for process in group])
    storage = {key: median([process.facts[key] for process in group]) for key in ("peak_bytes", "persistent_bytes")}
    kept = ("engine", "strategy", "accounted_bytes", "planned", "sent_bytes", "comm", "loss")
    return {
        **{key: last[key] for key in kept},
        "detail": detail,
        "is_reference": arm == reference,
        "blocks": [process.facts["block"] for process in group],
        "step_s": step_s,
        "iqr_steps_s": statistics.median([spread(process.facts["step_s"]) for process in group]),
        "iqr_blocks_s": spread([process.median_s for process in group]),
        "parts": {part: median([process.facts["parts"][part] for process in group]) for part in PARTS},
        "tokens_per_s": last["tokens"] / step_s,
        **{key: None if value is None else round(value) for key, value in storage.items()},
        "rss_bytes": max(process.facts["rss_bytes"] for process in group),
        "ratio": _ratio(group, arms[reference]) if reference and reference in arms and arm != reference else None,
    }


def _ratio(arm: Sequence[Process], reference: Sequence[Process]) -> Interval | None:
    mine, theirs = ({process.facts["block"]: process.median_s for process in group} for group in (arm, reference))
    shared = sorted(mine.keys() & theirs.keys())
    return median_ratio([mine[block] for block in shared], [theirs[block] for block in shared])


def _notes(processes: Sequence[Process]) -> Iterator[str]:
    for process in processes:
        if process.facts["disturbance"]:
            yield f"block {process.facts['block']} is disturbed: {process.facts['run']}: {process.facts['disturbance']}"
        if process.facts["leaves_plan"]:
            yield f"{process.facts['run']}: {process.facts['leaves_plan']}"
    if processes[0].origin.get("sources_digest") not in (None, sources_digest()):
        yield "the sources have changed since these runs were made"


def _mixed(processes: Sequence[Process]) -> Iterator[str]:
    for key in (*SAME, "torch"):
        held = [(each.origin.get("versions", {}) if key == "torch" else each.origin).get(key) for each in processes]
        found = sorted({str(sorted(set(each)) if key == "hosts" and each is not None else each) for each in held})
        if len(found) > 1:
            yield f"{key}: {' and '.join(found)}"


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
