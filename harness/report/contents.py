"""Content of a study's report: plain values, for a page; and as Markdown for a pull request, without pictures.

Names are shown verbatim. The study may be unfinished: gaps are named, and the rest is shown.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.analysis.judge import Study, verdicts
from harness.config.words import ask_again
from harness.parity.outcome import percent
from harness.parity.telling.wording import OUTCOMES
from harness.store import checksums, commands, provenance
from harness.store.errors import StoreError
from harness.store.failure import REPORT
from harness.store.markdown import code, escaped, fenced, folded, rows
from harness.store.reading import read_text
from harness.store.rundir import RunDir, flatten
from harness.store.screen import mib, ms
from harness.store.study import read_study

MOST_LINES = 60


Column = Callable[[Any], str]
"""Cell of a row."""


@dataclass(frozen=True)
class Table:
    title: str
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


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
    git = provenance.git_facts(provenance.PACKAGE.parent) or {}
    version = provenance.versions(())["harness"]
    commit = f", commit {git['sha'][:12]}{' with local changes' * git['dirty']}" if git else ""
    return f"{datetime.now(UTC).isoformat(timespec='seconds')} by harness {version}{commit}"


def _commands(name: str, root: Path | str, command: str) -> list[str]:
    return [*([ask_again(root, name)] if read_study(Path(root), name) else []), command]


def _verdicts(study: Study) -> Table:
    found = verdicts(study)
    caption = (
        "Farthest out: the check that is farthest beside the most that clean pairs show of it, and how much of what "
        "rounding explains it used up (of the bound). Smallest "
        "error seen: the relative error in the scale of all gradients from which on this pair would have been called "
        "DIFFERENT."
    )
    if found["control"].nunique() == 1:
        columns = {name: column for name, column in VERDICTS.items() if name != "control"}
        return _table("Verdicts", f"Control: {found['control'].iloc[0]}. {caption}", columns, found.itertuples())
    return _table("Verdicts", f"Each arm against its control. {caption}", VERDICTS, found.itertuples())


def named(study: Study, sentence: str) -> str:
    for row in study.runs.itertuples():
        sentence = sentence.replace(row.run, row.label)
    return sentence


def _runs(study: Study) -> Table:
    caption = (
        "ms/step: median without warm-up. Exposed: the part of it for which rank 0 stood still for collectives, where "
        "the engine tells. Kept: between steps, by the account of rank 0's engine. Peak: tensor storage within a step, "
        "where it was measured. Sent: by rank 0 in a step. Times of runs that were not interleaved (measure=bench) do "
        "not rank arms."
    )
    return _filled(_table("Runs", caption, RUNS, study.runs.itertuples()))


def _filled(table: Table) -> Table:
    kept = [place for place in range(len(table.head)) if any(row[place] for row in table.rows)]
    rows = [[row[place] for place in kept] for row in table.rows]
    return replace(table, head=[table.head[place] for place in kept], rows=rows)


def _table(title: str, caption: str, columns: Mapping[str, Column], rows: Iterable[Any]) -> Table:
    return Table(title, caption, tuple(columns), [[column(row) for column in columns.values()] for row in rows])


def text(value: Any) -> str:
    return "" if value is None or value != value else str(value)


def number(value: Any, shown: Callable[[float], str]) -> str:
    if value is None or isinstance(value, str | bool) or not math.isfinite(value):
        return text(value)
    return shown(float(value))


def _of(name: str, shown: Callable[[float], str] | None = None) -> Column:
    return lambda row: text(getattr(row, name)) if shown is None else number(getattr(row, name), shown)


def _steps(row: Any) -> str:
    done, of = (number(each, "{:.0f}".format) for each in (row.steps_done, row.steps))
    return f"{done}/{of}" if done and of else done


def _size(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.2e}"


VERDICTS: Mapping[str, Column] = {
    "arm": _of("label"),
    "control": _of("control"),
    "verdict": _of("verdict"),
    "tier": _of("tier"),
    "of the bound": _of("used", percent),
    "farthest out": _of("check"),
    "smallest error seen": _of("resolution", percent),
}
RUNS: Mapping[str, Column] = {
    "run": _of("label"),
    "state": _of("state"),
    "steps": _steps,
    "loss": _of("final_loss", "{:.6g}".format),
    "held out": _of("held_out_loss", "{:.6g}".format),
    "gradient norm": _of("final_grad_norm", "{:.4g}".format),
    "ms/step": _of("step_time_s", ms),
    "exposed ms": _of("exposed_comm_s", ms),
    "tokens/s": _of("tokens_per_s", "{:.0f}".format),
    "TFLOP/s": _of("tflops_per_rank", "{:.3g}".format),
    "MFU %": _of("mfu", lambda value: f"{100 * value:.1f}"),
    "kept MiB": _of("accounted_bytes", mib),
    "planned": _of("planned_kept_bytes", mib),
    "peak MiB": _of("peak_bytes", mib),
    "planned peak": _of("planned_peak_bytes", mib),
    "sent MiB": _of("sent_bytes", mib),
    "planned sent": _of("planned_sent_bytes", mib),
    "reason": lambda row: text(row.leaves_plan if row.state == "done" else row.reason),
}
EVIDENCE: Mapping[str, Column] = {
    "tier": _of("tier"),
    "check": _of("check"),
    "step": _of("step", "{:.0f}".format),
    "tensor": _of("tensor"),
    "observed": lambda finding: _size(finding.observed),
    "allowed": lambda finding: _size(finding.allowed),
    "of": _of("count", "{:.0f}".format),
    "grade": lambda finding: text(finding.grade.value),
}


def _arms(study: Study) -> list[Arm]:
    found = []
    for arm in study.verdict.arms if study.verdict else ():
        caption = "The worst of each kind of check, and of how many it is the worst."
        table = _table(f"{study.label(arm.arm)} against {study.label(arm.control)}", caption, EVIDENCE, arm.evidence)
        commands = [*arm.commands[:1], *([arm.script] if arm.script else [])]
        found.append(Arm(table.title, named(study, arm.sentence), arm.exit_code == 0, table, commands))
    return found


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


FIRST = ("git.sha", "git.branch", "git.dirty", "sources_digest", "cpu_model", "cpu_count", "device", "hosts")


@dataclass(frozen=True)
class Run:
    label: str
    name: str
    path: str
    state: str
    overrides: str
    """As typed after `run.py`, quoted for a shell."""
    command: str
    attempts: int
    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Origin:
    common: Sequence[tuple[str, str]]
    runs: Sequence[Run]


def origins(study: Study) -> Origin:
    facts = {str(path): _facts(Path(path)) for path in study.runs["path"]}
    every = list(facts.values())
    common = {
        key: value for key, value in (every[0].items() if every else ()) if all(o.get(key) == value for o in every)
    }
    runs = [_run(row, facts[str(row.path)], common) for row in study.runs.itertuples()]
    return Origin(_ordered(common), runs)


def _run(row: Any, facts: Mapping[str, str], common: Mapping[str, str]) -> Run:
    run = RunDir(Path(row.path))
    try:
        typed = run.overrides()
    except StoreError as error:
        typed = (str(error),)
    own = {key: value for key, value in facts.items() if key not in common}
    return Run(
        label=str(row.label),
        name=run.path.name,
        path=str(run.path),
        state=str(row.state),
        overrides=shlex.join(typed),
        command=commands.request(f"--from {shlex.quote(str(run.path))}"),
        attempts=len(run.attempts()),
        facts=_ordered(own),
    )


def _facts(path: Path) -> dict[str, str]:
    try:
        checksums.demand(path, "provenance.json")
        flat = flatten(provenance.read(path))
    except StoreError as error:
        return {"provenance": str(error)}
    return {key: _shown(value) for key, value in flat.items() if value not in (None, [], {}, "")}


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(dict.fromkeys(map(str, value)))
    return str(value)


def _ordered(facts: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted(facts.items(), key=lambda pair: FIRST.index(pair[0]) if pair[0] in FIRST else len(FIRST))


def markdown(contents: Contents) -> str:
    return "\n\n".join(_parts(contents)) + "\n"


def _parts(contents: Contents) -> Iterator[str]:
    yield f"## {code(contents.study)}: {contents.outcome}"
    if contents.question:
        yield escaped(contents.question)
    yield contents.meaning
    if contents.incomplete:
        yield f"**{escaped(contents.incomplete)}**"
    yield from map(escaped, contents.seeds)
    for table in contents.tables:
        yield f"### {table.title}"
        yield rows(table.head, table.rows)
        yield escaped(table.caption)
        if table is contents.tables[0]:
            yield from (escaped(arm.sentence) for arm in contents.arms if not arm.passed)
    for failure in contents.failures:
        yield f"**{code(failure.label)} is {failure.state}**: {escaped(failure.reason)}"
        if failure.error:
            yield folded("error.txt", fenced(failure.error))
    yield "### Provenance"
    yield fenced("\n".join(contents.commands))
    common = contents.origin.common
    if common:
        yield folded("What all runs have in common", rows(("fact", "value"), common))
    yield folded(
        "Each run",
        rows(
            ("run", "state", "overrides", "again", "its own"),
            [
                (run.label, run.state, run.overrides, run.command, "; ".join(f"{k} {v}" for k, v in run.facts))
                for run in contents.origin.runs
            ],
        ),
    )
    yield f"Made {contents.made}."
