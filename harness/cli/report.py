"""A study on one page: `report STUDY`."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

from harness.cli.judge import write
from harness.cli.main import path
from harness.cli.runs import located, say_next
from harness.config.errors import refuse
from harness.parity import StudyVerdict, against
from harness.parity.study import unknown
from harness.store import commands
from harness.store.rundir import CONFIG, Store
from harness.store.study import read_study

PAGE = "report.html"


def report_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("study", metavar="STUDY", help="name of a study that was run, or its folder")
    parser.add_argument("--out", type=path, metavar="FILE", help=f"where to write (default: {PAGE} beside the runs)")
    parser.add_argument("--control", metavar="RUN", help="of a folder without a study: hold its runs against this one")
    parser.add_argument(
        "--archived", action="store_true", help="judge runs that other sources than these made, by each other"
    )


def run_report(arguments: Namespace) -> int:
    root, name = located(arguments.root, arguments.study)
    store = Store(root)
    if not store.runs(name) and (Path(name).name != name or read_study(store.root, name) is None):
        raise unknown(f"report {arguments.study}", Path(root), name)
    try:
        from harness.analysis.judge import study
        from harness.report.contents import contents, page
    except ImportError as error:
        problem = f"needs {error.name}, which is not installed"
        raise refuse("report", problem, fix=commands.install("analysis")) from None
    sources = {"sources": None} if arguments.archived else {}
    found = study(root, name, verdict=_against(arguments, root, name, sources), **sources)
    flags = " --archived" * arguments.archived
    flags += f" --control {shlex.quote(arguments.control)}" if arguments.control else ""
    report = contents(found, root, commands.verb(f"report {shlex.quote(name)}{flags}", root))
    target = arguments.out or store.root / name / PAGE
    write(target, page(report), "report STUDY --out")
    print(f"{report.outcome}: {target}")
    say_next(arguments, f"watch {shlex.quote(arguments.study)}")
    return 0


def _against(arguments: Namespace, root: str, name: str, sources: dict[str, None]) -> StudyVerdict | None:
    """Verdict on a folder's runs against one of them; None without `--control`."""
    if arguments.control is None:
        return None
    store = Store(root)
    if read_study(store.root, name) is not None:
        raise refuse(f"--control {arguments.control}", f"study {name} has controls of its own", fix="leave it out")
    control = store.root / name / arguments.control
    path = control if (control / CONFIG).is_file() else store.find(arguments.control).path
    return replace(against([run.path for run in store.runs(name)], path, **sources), study=name)
