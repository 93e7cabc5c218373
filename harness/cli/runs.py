"""Runs that were started: `watch`, `show`, `diff`, `retry`, `cancel`, `gc`."""

from __future__ import annotations

import os
import shlex
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from harness.launch.slurm.scheduler import probe
from harness.launch.watch import watch
from harness.store import commands, provenance, status
from harness.store.gc import gc
from harness.store.rundir import CONFIG, RunDir, Store
from harness.store.show import ALIKE, diff, show
from harness.store.status import State
from harness.store.study import done, judging_verb

RUN_HELP = "a path, a prefix of a signature (4 digits or more) or @last"
ENDED_BADLY = (State.failed, State.lost, State.cancelled, State.preempted)


def say_next(arguments: Namespace, *verbs: str) -> None:
    for verb in verbs:
        print(f"next: {commands.verb(verb, arguments.root)}")


def located(root: str, word: str) -> tuple[str, str]:
    if os.sep not in word and word not in (".", ".."):
        return root, word
    folder = Path(os.path.abspath(os.path.expanduser(word)))
    folder = folder.parent if (folder / CONFIG).is_file() else folder
    return str(folder.parent), folder.name


def watch_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("study", metavar="STUDY", nargs="?", help="only runs of this study, or of this folder")
    parser.add_argument("--once", action="store_true", help="print the table once, also on a terminal")


def run_watch(arguments: Namespace) -> int:
    named = None
    if arguments.study is not None:
        arguments.root, named = located(arguments.root, arguments.study)
    store = Store(arguments.root)
    seen = watch(store, named, follow=sys.stdout.isatty() and not arguments.once)
    bad = {one.study for one in seen if one.bad}
    runs = [run for run in store.runs(named) if not bad or run.path.parent.name in bad]
    study = max(runs, key=lambda run: run.path.stat().st_mtime).path.parent.name
    if bad:
        if not all(_is_watched(run) for run in runs if run.path.parent.name == study):
            say_next(arguments, f"retry {shlex.quote(study)}")
        return 1
    if any(one.study == study and one.state in (State.queued, State.running) for one in seen):
        say_next(arguments, f"watch {shlex.quote(study)}")
        return 0
    siblings = store.runs(study)
    look = f"show {shlex.quote(store.short(siblings[0]))}"
    say_next(arguments, judging_verb(store, study, siblings, look))
    return 0


def show_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)


def run_show(arguments: Namespace) -> int:
    store = Store(arguments.root)
    run, jobs = store.find(arguments.run), probe()
    if run.path.parent.parent != store.root:
        store = Store(run.path.parent.parent)
        arguments.root = str(store.root)
    print(show(run, jobs))
    found = status.effective(run.path, jobs)
    name, study = shlex.quote(store.short(run)), run.path.parent.name
    if found is not None and found.state is State.lost and _is_watched(run):
        print(f"next: {commands.python()} -m harness.capture {commands.shown(run.path)}")
    elif found is not None and found.state in ENDED_BADLY and not _is_watched(run):
        say_next(arguments, f"retry {name}")
    else:
        others = [shlex.quote(store.short(each)) for each in done(store.runs(study)) if each != run]
        say_next(arguments, f"compare {name} {others[0]}" if others else f"watch {shlex.quote(study)}")
    return 0


def _is_watched(run: RunDir) -> bool:
    """True if another program made the run, which no request of ours starts again."""
    return provenance.WATCHED in provenance.read(run.path)


def diff_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("a", metavar="RUN", help=RUN_HELP)
    parser.add_argument("b", metavar="RUN", help="the other one")


def run_diff(arguments: Namespace) -> int:
    store = Store(arguments.root)
    runs = [store.find(each) for each in (arguments.a, arguments.b)]
    found = diff(*runs)
    print(found)
    words = [shlex.quote(each) for each in (arguments.a, arguments.b)]
    leads_on = len(done(runs)) == 2 and not found.endswith(ALIKE)  # else `compare` would lead back here
    say_next(arguments, f"compare {' '.join(words)}" if leads_on else f"show {words[-1]}")
    return 0


def retry_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("ref", metavar="STUDY|RUN", help="all of a study, or a path, a prefix of a signature or @last")


cancel_arguments = retry_arguments


def run_retry(arguments: Namespace) -> int:
    from harness.launch.submit import retry  # imports Hydra

    return retry(Store(arguments.root), arguments.ref)


def run_cancel(arguments: Namespace) -> int:
    from harness.launch.submit import cancel

    store, ref = Store(arguments.root), arguments.ref
    code = cancel(store, ref)  # who wants nothing to run is not told how to start it
    say_next(arguments, f"{'watch' if ref in store.studies() else 'show'} {shlex.quote(ref)}")
    return code


def gc_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--checkpoints", action="store_true", help="also checkpoints of runs that are done")
    parser.add_argument("--yes", action="store_true", help="remove what is listed; without it nothing is touched")


def run_gc(arguments: Namespace) -> int:
    store = Store(arguments.root)
    gc(store, checkpoints=arguments.checkpoints, apply=arguments.yes)
    say_next(arguments, *["watch"] * bool(store.runs()))
    return 0
