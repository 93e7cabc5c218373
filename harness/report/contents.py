"""Content of a study's report: plain values, for a page and a Markdown text.

The study may be unfinished: gaps are named, and the rest is shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.analysis.judge import Study, verdicts
from harness.config.words import ask_again
from harness.parity.outcome import Finding, percent
from harness.parity.telling.explain import OUTCOMES
from harness.report.origin import Origin, origins
from harness.store import provenance
from harness.store.errors import StoreError
from harness.store.failure import REPORT
from harness.store.reading import read_text
from harness.store.rundir import RunDir
from harness.store.study import read_study

MOST_LINES = 60


@dataclass(frozen=True)
class Cell:
    text: str
    key: float | str | None
    """Sort key; None is last."""

    @property
    def numeric(self) -> bool:
        return isinstance(self.key, float)

    @property
    def sorted_by(self) -> str:
        return str(self.key).replace("inf", "Infinity") if self.numeric else str(self.key)


@dataclass(frozen=True)
class Table:
    title: str
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    @property
    def numeric(self) -> list[bool]:
        return [any(row[place].numeric for row in self.rows) for place in range(len(self.head))]


@dataclass(frozen=True)
class Arm:
    label: str
    sentence: str
    passed: bool
    evidence: Table
    commands: Sequence[str]


@dataclass(frozen=True)
class Failure:
    label: str
    state: str
    reason: str
    error: str
    """`error.txt` of the newest attempt; may be empty."""


@dataclass(frozen=True)
class Contents:
    study: str
    question: str
    outcome: str
    meaning: str
    incomplete: str
    tables: Sequence[Table]
    seeds: Sequence[str]
    arms: Sequence[Arm]
    failures: Sequence[Failure]
    origin: Origin
    commands: Sequence[str]
    made: str
    notes: Sequence[str] = field(default=())


def contents(study: Study, root: Path | str, command: str) -> Contents:
    """Args: study: from `harness.analysis.judge.study`. root: its store, as given. command: command line of the
    report."""
    judged = study.verdict if study.verdict and study.verdict.arms else None
    outcome = judged.outcome if judged else None
    return Contents(
        study=study.name,
        question=study.question,
        outcome=outcome.value if outcome else "NOT JUDGED",
        meaning=OUTCOMES[outcome] if outcome else "There is no arm that could be held against a control.",
        incomplete=study.incomplete,
        tables=[table for table in (_verdicts(study), _runs(study)) if table.rows],
        seeds=[named(study, each.sentence) for each in (study.verdict.seeds if study.verdict else ())],
        arms=_arms(study),
        failures=_failures(study),
        origin=origins(study),
        commands=_commands(study.name, root, command),
        made=_made(),
    )


def _made() -> str:
    code = provenance.git_facts(provenance.PACKAGE.parent) or {}
    version = provenance.versions(())["harness"]
    commit = f", commit {code['sha'][:12]}{' with local changes' * code['dirty']}" if code else ""
    return f"{datetime.now(UTC).isoformat(timespec='seconds')} by harness {version}{commit}"


def _commands(name: str, root: Path | str, command: str) -> list[str]:
    return [*([ask_again(root, name)] if read_study(Path(root), name) else []), command]


def _verdicts(study: Study) -> Table:
    head = ("arm", "control", "verdict", "tier", "of the bound", "farthest out", "smallest error seen")
    found = verdicts(study)
    rows = [
        [
            text(row.label),
            text(row.control),
            text(row.verdict),
            text(row.tier),
            number(row.used, percent),
            text(row.check),
            number(row.resolution, percent),
        ]
        for row in found.itertuples()
    ]
    caption = (
        "Farthest out: the check that is farthest beside the most that clean pairs show of it, and how much of what "
        "rounding explains it used up (of the bound). Smallest "
        "error seen: the relative error in the scale of all gradients from which on this pair would have been called "
        "DIFFERENT."
    )
    if found["control"].nunique() == 1:
        only = found["control"].iloc[0]
        rows = [[*row[:1], *row[2:]] for row in rows]
        return Table("Verdicts", f"Control: {only}. {caption}", [*head[:1], *head[2:]], rows)
    return Table("Verdicts", f"Each arm against its control. {caption}", head, rows)


def named(study: Study, sentence: str) -> str:
    for row in study.runs.itertuples():
        sentence = sentence.replace(row.run, row.label)
    return sentence


def _runs(study: Study) -> Table:
    results = (
        "loss",
        "held out",
        "gradient norm",
        "ms/step",
        "exposed ms",
        "tokens/s",
        "TFLOP/s",
        "MFU %",
        "kept MiB",
        "planned",
        "peak MiB",
        "planned peak",
        "sent MiB",
        "planned sent",
    )
    head = ("run", "state", "steps", *results, "reason")
    rows = [
        [
            text(row.label),
            text(row.state),
            Cell(_steps(row), _finite(row.steps_done)),
            number(row.final_loss, lambda value: f"{value:.6g}"),
            number(row.held_out_loss, lambda value: f"{value:.6g}"),
            number(row.final_grad_norm, lambda value: f"{value:.4g}"),
            number(row.step_time_s, lambda value: f"{1e3 * value:.1f}"),
            number(row.exposed_comm_s, lambda value: f"{1e3 * value:.1f}"),
            number(row.tokens_per_s, lambda value: f"{value:.0f}"),
            number(row.tflops_per_rank, lambda value: f"{value:.3g}"),
            number(row.mfu, lambda value: f"{100 * value:.1f}"),
            number(row.accounted_bytes, _mib),
            number(row.planned_kept_bytes, _mib),
            number(row.peak_bytes, _mib),
            number(row.planned_peak_bytes, _mib),
            number(row.sent_bytes, _mib),
            number(row.planned_sent_bytes, _mib),
            text(row.leaves_plan if row.state == "done" else row.reason),
        ]
        for row in study.runs.itertuples()
    ]
    caption = (
        "ms/step: median without warm-up. Exposed: the part of it for which rank 0 stood still for collectives, where "
        "the engine tells. Kept: between steps, by the account of rank 0's engine. Peak: tensor storage within a step, "
        "where it was measured. Sent: by rank 0 in a step. Times of runs that were not interleaved (measure=bench) do "
        "not rank arms."
    )
    return _filled(Table("Runs", caption, head, rows))


def _filled(table: Table) -> Table:
    kept = [place for place in range(len(table.head)) if any(row[place].text for row in table.rows)]
    rows = [[row[place] for place in kept] for row in table.rows]
    return replace(table, head=[table.head[place] for place in kept], rows=rows)


def _steps(row: Any) -> str:
    done, of = (_finite(value) for value in (row.steps_done, row.steps))
    return "" if done is None else f"{done:.0f}/{of:.0f}" if of is not None else f"{done:.0f}"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.2f}"


def text(value: Any) -> Cell:
    shown = "" if value is None or value != value else str(value)
    return Cell(shown, shown or None)


def number(value: Any, shown: Any) -> Cell:
    found = _number(value)
    if found is None:
        return Cell("" if value is None or isinstance(value, float) else str(value), None)
    return Cell(shown(found), found) if math.isfinite(found) else Cell(str(found), found)


def _number(value: Any) -> float | None:
    if value is None or isinstance(value, str | bool):
        return None
    found = float(value)
    return None if math.isnan(found) else found


def _finite(value: Any) -> float | None:
    found = _number(value)
    return found if found is not None and math.isfinite(found) else None


def _arms(study: Study) -> list[Arm]:
    found = []
    for arm in study.verdict.arms if study.verdict else ():
        rows = [_finding(finding) for finding in arm.evidence]
        head = ("tier", "check", "step", "tensor", "observed", "allowed", "of", "grade")
        caption = "The worst of each kind of check, and of how many it is the worst."
        table = Table(f"{study.label(arm.arm)} against {study.label(arm.control)}", caption, head, rows)
        commands = [*arm.commands[:1], *([arm.script] if arm.script else [])]
        found.append(Arm(table.title, named(study, arm.sentence), arm.exit_code == 0, table, commands))
    return found


def _finding(finding: Finding) -> list[Cell]:
    return [
        text(finding.tier),
        text(finding.check),
        number(finding.step, lambda value: f"{value:.0f}"),
        text(finding.tensor),
        _value(finding.observed),
        _value(finding.allowed),
        number(finding.count, lambda value: f"{value:.0f}"),
        text(finding.grade.value),
    ]


def _value(value: float | str) -> Cell:
    return text(value) if isinstance(value, str) else Cell(f"{value:.2e}", None if math.isnan(value) else float(value))


def _failures(study: Study) -> list[Failure]:
    lost = study.runs[~study.runs["state"].isin(["done", "queued", "running", "not started"])]
    return [Failure(row.label, row.state, str(row.reason or ""), _error(Path(row.path))) for row in lost.itertuples()]


def _error(path: Path) -> str:
    run = RunDir(path)
    for attempt in reversed(run.attempts()):
        try:
            found = read_text(run.attempt_dir(attempt) / REPORT)
        except StoreError as error:
            return str(error)
        if found:
            lines = found.rstrip().splitlines()
            return "\n".join([*(["..."] if len(lines) > MOST_LINES else []), *lines[-MOST_LINES:]])
    return ""
