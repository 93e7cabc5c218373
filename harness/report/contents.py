"""A study's report: its content, plain values, and its page.

Names are shown verbatim. The study may be unfinished: gaps are named, and the rest is shown.

The page is one HTML file: styles, script and pictures inside, and a policy that lets a browser ask for nothing.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

import matplotlib as mpl
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from harness.analysis.figures import figures
from harness.analysis.judge import Study, verdicts
from harness.config.words import ask_again
from harness.parity import Verdict
from harness.parity.outcome import percent
from harness.parity.telling.wording import OUTCOMES
from harness.store import commands, provenance
from harness.store.errors import StoreError
from harness.store.failure import REPORT
from harness.store.reading import read_text
from harness.store.rundir import RunDir
from harness.store.screen import mib, ms
from harness.store.study import read_study

Columns = Sequence[tuple[str, str, Callable[[Any], str]]]
"""Head, attribute of a row, and text of a finite number."""
INTEGER, SIZE = "{:.0f}".format, "{:.2e}".format
VERDICTS: Columns = (
    ("arm", "label", str),
    ("control", "control", str),
    ("verdict", "verdict", str),
    ("tier", "tier", str),
    ("of the bound", "used", percent),
    ("farthest out", "check", str),
    ("smallest error seen", "resolution", percent),
)
RUNS: Columns = (
    ("run", "label", str),
    ("state", "state", str),
    ("steps", "steps_done", INTEGER),
    ("of", "steps", INTEGER),
    ("loss", "final_loss", "{:.6g}".format),
    ("held out", "held_out_loss", "{:.6g}".format),
    ("gradient norm", "final_grad_norm", "{:.4g}".format),
    ("ms/step", "step_time_s", ms),
    ("exposed ms", "exposed_comm_s", ms),
    ("tokens/s", "tokens_per_s", INTEGER),
    ("TFLOP/s", "tflops_per_rank", "{:.3g}".format),
    ("MFU", "mfu", "{:.1%}".format),
    ("kept MiB", "accounted_bytes", mib),
    ("planned", "planned_kept_bytes", mib),
    ("peak MiB", "peak_bytes", mib),
    ("planned peak", "planned_peak_bytes", mib),
    ("sent MiB", "sent_bytes", mib),
    ("planned sent", "planned_sent_bytes", mib),
    ("reason", "why", str),
)
EVIDENCE: Columns = (
    ("tier", "tier", str),
    ("check", "check", str),
    ("step", "step", INTEGER),
    ("tensor", "tensor", str),
    ("observed", "observed", SIZE),
    ("allowed", "allowed", SIZE),
    ("of", "count", INTEGER),
    ("grade", "grade", str),
)
ORIGIN: Columns = (("run", "label", str), ("state", "state", str), ("commit", "commit", str), ("again", "again", str))


@dataclass(frozen=True)
class Table:
    title: str
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    @classmethod
    def of(cls, title: str, caption: str, columns: Columns, found: Iterable[Any]) -> Table:
        """Columns without an entry are left out."""
        cells = [[_cell(getattr(row, name), shown) for _, name, shown in columns] for row in found]
        kept = [place for place in range(len(columns)) if any(row[place] for row in cells)]
        return cls(
            title, caption, [columns[place][0] for place in kept], [[row[place] for place in kept] for row in cells]
        )


def _cell(value: Any, shown: Callable[[Any], str]) -> str:
    value = value.value if isinstance(value, Enum) else value
    if value is None or value != value:
        return ""
    return str(value) if isinstance(value, str | bool) or not math.isfinite(value) else shown(float(value))


@dataclass(frozen=True)
class Contents:
    study: Study
    outcome: str
    meaning: str
    tables: Sequence[Table]
    arms: Sequence[tuple[Verdict, str, Table]]
    """Each with its sentence, in which runs have their labels, and its evidence."""
    failures: Sequence[tuple[Any, str]]
    """Rows of runs, with the `error.txt` of the newest attempt; it may be empty."""
    origin: Table
    commands: Sequence[str]
    made: str


def contents(study: Study, root: Path | str, command: str) -> Contents:
    """Args: study: from `harness.analysis.judge.study`. root: its store, as given. command: command line of the
    report."""
    judged = study.verdict if study.verdict and study.verdict.arms else None
    again = [commands.request(f"--from {shlex.quote(path)}") for path in study.runs["path"]]
    why = study.runs["leaves_plan"].where(study.runs["state"] == "done", study.runs["reason"])
    runs = list(study.runs.assign(again=again, why=why).itertuples())
    git = provenance.git_facts(provenance.PACKAGE.parent)
    commit = f", commit {git['sha'][:12]}{' with local changes' * git['dirty']}" if git else ""
    now, version = datetime.now(UTC).isoformat(timespec="seconds"), provenance.versions(())["harness"]
    return Contents(
        study=study,
        outcome=judged.outcome.value if judged else "NOT JUDGED",
        meaning=OUTCOMES[judged.outcome] if judged else "There is no arm that could be held against a control.",
        tables=[table for table in (_verdicts(study), Table.of("Runs", MEASURED, RUNS, runs)) if table.rows],
        arms=list(_arms(study)),
        failures=[(row, _error(row.path)) for row in runs if row.state not in GOES_ON],
        origin=Table.of("Provenance", "", ORIGIN, runs),
        commands=[*([ask_again(root, study.name)] if read_study(Path(root), study.name) else []), command],
        made=f"{now} by harness {version}{commit}",
    )


GOES_ON = ("done", "queued", "running", "not started")
MEASURED = (
    "ms/step: median without warm-up. Exposed: the part of it for which rank 0 stood still for collectives, where the "
    "engine tells. Kept: between steps, by the account of rank 0's engine. Peak: tensor storage within a step, where "
    "measured. Sent: by rank 0 in a step. Times of runs that were not interleaved (measure=bench) do not rank arms."
)
JUDGED = (
    "Farthest out: the check that is farthest beside the most that clean pairs show of it, and how much of what "
    "rounding explains it used up (of the bound). Smallest error seen: the relative error in the scale of all "
    "gradients from which on this pair would have been called DIFFERENT."
)


def _verdicts(study: Study) -> Table:
    found = verdicts(study)
    one = found["control"].nunique() == 1
    begin = f"Control: {found['control'].iloc[0]}." if one else "Each arm against its control."
    columns = [column for column in VERDICTS if column[0] != "control" or not one]
    return Table.of("Verdicts", f"{begin} {JUDGED}", columns, found.itertuples())


def named(study: Study, sentence: str) -> str:
    for run, label in study.labels.items():
        sentence = sentence.replace(run, label)
    return sentence


def _arms(study: Study) -> Iterator[tuple[Verdict, str, Table]]:
    caption = "The worst of each kind of check, and of how many it is the worst."
    for arm in study.verdict.arms if study.verdict else ():
        title = f"{study.label(arm.arm)} against {study.label(arm.control)}"
        yield arm, named(study, arm.sentence), Table.of(title, caption, EVIDENCE, arm.evidence)


def _error(path: str) -> str:
    run = RunDir(Path(path))
    try:
        return next(filter(None, (read_text(run.attempt_dir(n) / REPORT) for n in reversed(run.attempts()))), "")
    except StoreError as error:
        return str(error)


FOLDER = Path(__file__).parent


def page(contents: Contents) -> str:
    style, script = ((FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["named"] = lambda sentence, study: named(study, sentence)
    environment.filters["uri"] = lambda figure: f"data:image/svg+xml;base64,{base64.b64encode(_svg(figure)).decode()}"
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    with mpl.rc_context({"svg.hashsalt": "report", "figure.dpi": 96}):
        drawn = list(figures(contents.study))
        return environment.get_template("page.html").render(
            report=contents, pictures=drawn, style=style, script=script, policy=policy
        )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return buffer.getvalue()
