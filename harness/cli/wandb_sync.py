"""To and from wandb, TensorBoard and CSV: `sync STUDY|RUN`, `wandb push STUDY`, `import-series FILE ...`."""

from __future__ import annotations

import importlib.util
import os
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.cli.main import path
from harness.cli.runs import located, say_next
from harness.config.derived import wandb_mode
from harness.config.errors import refuse
from harness.config.schema import WandbMode
from harness.launch.slurm.scheduler import probe
from harness.launch.submit import runs_of
from harness.parity import StudyVerdict
from harness.store import commands
from harness.store.commands import install, shown
from harness.store.identity import slug
from harness.store.rundir import Store
from harness.store.screen import counted


def offline_argument(parser: ArgumentParser) -> None:
    parser.add_argument("--offline", action="store_true", help="write files for `wandb sync` instead of sending them")


def mode_of(arguments: Namespace, verb: str, *packages: str) -> WandbMode:
    """Raises `BadRequest`: one of the packages is missing, or `WANDB_MODE` is no mode that sends."""
    try:
        mode = wandb_mode(WandbMode.offline if arguments.offline else WandbMode.online, os.environ)
    except ValueError as error:
        raise refuse(verb, str(error), fix="unset WANDB_MODE") from None
    for package in packages:
        if importlib.util.find_spec(package) is None:
            name = package.replace("_", "-")
            raise refuse(verb, f"the package {name} is not installed", fix=install("wandb,analysis"))
    if mode is WandbMode.disabled:
        raise refuse(verb, "WANDB_MODE=disabled sends nothing", fix="unset WANDB_MODE")
    return mode


def sync_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("ref", metavar="STUDY|RUN", help="all of a study, or a path, a prefix of a signature or @last")
    offline_argument(parser)
    targets = "wandb (default), or files in the run's directory: tensorboard, csv"
    parser.add_argument("--to", choices=("wandb", "tensorboard", "csv"), default="wandb", help=targets)


@contextmanager
def asking(verb: str, mode: WandbMode) -> Iterator[None]:
    from harness.store.wandb_run import WandbFailed

    try:
        yield
    except WandbFailed as error:
        fix, instead = "mend what it names (wandb login?), and try again", ", or write files with --offline"
        fix += instead * (mode is WandbMode.online)
        raise refuse(verb, f"wandb failed: {error}", fix=fix) from error


def run_sync(arguments: Namespace) -> int:
    from harness.wandb_sync.sync import sync

    if arguments.to != "wandb":
        return _write(arguments)
    verb = f"sync {arguments.ref}"
    mode = mode_of(arguments, verb, "wandb")
    store = Store(arguments.root)
    runs = runs_of(store, arguments.ref)
    with asking(verb, mode):
        sync(runs, mode, probe(), lambda line: print(line, flush=True))
    if mode is WandbMode.offline:
        where = shown(runs[0].path) if len(runs) == 1 else f"{shown(runs[0].path.parent)}/*"
        print(f"next: wandb sync {where}/wandb/offline-run-*")
    else:
        say_next(arguments, "watch")
    return 0


def _write(arguments: Namespace) -> int:
    from harness.wandb_sync.sync import write

    verb = f"sync {arguments.ref} --to {arguments.to}"
    if arguments.offline:
        raise refuse(verb, "--offline is of wandb: these are files", fix=verb)
    if arguments.to == "tensorboard" and importlib.util.find_spec("tensorboard") is None:
        raise refuse(verb, "the package tensorboard is not installed", fix=install("tensorboard"))
    runs = runs_of(Store(arguments.root), arguments.ref)
    for run in runs:
        print(f"{run.path.name}: {shown(write(run, arguments.to))}")
    if arguments.to == "tensorboard":
        print(f"next: tensorboard --logdir {shown(runs[0].path if len(runs) == 1 else runs[0].path.parent)}")
    return 0


def wandb_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("action", choices=("push",), help="push: verdicts, report and the dashboard")
    parser.add_argument("study", metavar="STUDY", help="name of a study that was run, or its folder")
    offline_argument(parser)


def run_wandb(arguments: Namespace) -> int:
    verb = f"wandb push {arguments.study}"
    mode = mode_of(arguments, verb, "wandb", "wandb_workspaces", "matplotlib", "pandas")
    from harness.wandb_sync.push import push

    arguments.root, name = located(arguments.root, arguments.study)
    with asking(verb, mode):
        made = push(Store(arguments.root).root, name, mode, lambda found: _page(arguments.root, found))
    print(f"{made.outcome}: verdicts, report and the dashboard in one run")
    if mode is WandbMode.offline:
        print("only an online push makes the dashboard on the server")
        print(f"next: wandb sync {shlex.quote(str(made.folder))}")
    else:
        print(f"dashboard  {made.dashboard}")
    say_next(arguments, f"sync {shlex.quote(name)}{' --offline' * (mode is WandbMode.offline)}")
    return 0


def _page(root: str, verdict: StudyVerdict) -> str:
    from harness.analysis.judge import study
    from harness.report.contents import contents, page

    found = study(root, verdict.study, verdict=verdict)
    command = commands.verb(f"report {shlex.quote(verdict.study)}", root)
    return page(contents(found, root, command))


def import_series_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        metavar="FILE",
        type=path,
        nargs="+",
        help="of one run each: wandb's offline folder, TensorBoard's, .csv, .tsv, .jsonl, Megatron's golden .json",
    )
    parser.add_argument(
        "--columns",
        metavar="NAME=COLUMN",
        nargs="+",
        required=True,
        help="their name of loss, and if wanted of grad_norm, lr, tokens and step, as loss=train/loss",
    )
    parser.add_argument("--into", metavar="DIR", type=path, default=Path("runs/series"), help="folder of the runs")


def run_import_series(arguments: Namespace) -> int:
    from harness.wandb_sync.series import MEASURES, import_series

    columns = dict(word.split("=", 1) if "=" in word else (word, "") for word in arguments.columns)
    if "loss" not in columns or not all(columns.values()) or not columns.keys() <= {*MEASURES, "step"}:
        choices = "loss=COLUMN, and " + ", ".join(f"{each}=COLUMN" for each in (*MEASURES[1:], "step"))
        raise refuse(f"--columns {' '.join(arguments.columns)}", "must name the column of a loss", choices=choices)
    for source in arguments.sources:
        target = arguments.into.absolute() / slug(source.name if source.is_dir() else source.stem)
        steps = import_series(source, target, columns)
        print(f"{commands.shown(target)}: {counted(len(steps), 'step')}, {steps[0]} to {steps[-1]}")
    print(f"next: {commands.verb(f'verdict NEW --history {commands.shown(arguments.into)}')}")
    return 0
