"""Verdicts: `compare RUN RUN`, `compare --code OLD NEW`, `verdict STUDY`; `baseline RUN` and `gate BASELINE RUN`."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.cli.main import path
from harness.cli.runs import RUN_HELP, located
from harness.config.errors import refuse
from harness.parity import StudyVerdict, Verdict, against, compare, scripted, study_text, text, verdict, zoom
from harness.parity.gate import changes, gate, made
from harness.parity.series import MEASURES, against_history
from harness.parity.telling.render import junit, markdown
from harness.store import commands
from harness.store.files import write_atomic
from harness.store.rundir import CONFIG, Store
from harness.store.screen import fold, table, width


def compare_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "words",
        metavar="RUN RUN",
        nargs="*",
        help=f"a run and the run it is held against: {RUN_HELP}; with --code KEY=VALUE ..., what both versions are "
        "asked, as after run.py",
    )
    parser.add_argument(
        "--code",
        nargs=2,
        metavar=("OLD", "NEW"),
        help="run and compare two versions of the code: revisions, or WORKTREE for the files as they are",
    )
    parser.add_argument(
        "--bitwise", action="store_true", help="with --code: demand equal bits (deterministic numerics)"
    )
    parser.add_argument("--json", action="store_true", help="the whole verdict as JSON")
    parser.add_argument("--tensor", metavar="NAME", help="look at one parameter's gradient instead")
    parser.add_argument("--step", type=int, default=1, help="the captured step to look at (default: 1)")


def run_compare(arguments: Namespace) -> int:
    found = None
    if arguments.code is not None:
        from harness.revisions import Request, compare_code  # late: no other comparison starts runs

        request = Request(tuple(arguments.words), arguments.root, arguments.bitwise)
        old, new = arguments.code
        found = compare_code(request, old, new, lambda line: print(line, file=sys.stderr, flush=True))
        arm, control = Path(found.arm), Path(found.control)
    else:
        store = Store(arguments.root)
        arm, control = (_found(store, word) for word in _two_runs(arguments))
    if arguments.tensor is not None:
        print(zoom(arm, control, arguments.tensor, step=arguments.step))
        return 0
    found = scripted(found or compare(arm, control))
    return _answer(found, text(found), arguments)


def _found(store: Store, word: str) -> Path:
    """Folder of a run, or file of a baseline."""
    file = path(word)
    return file.absolute() if file.is_file() else store.find(word).path


def _two_runs(arguments: Namespace) -> list[str]:
    words: list[str] = arguments.words
    if arguments.bitwise:
        raise refuse("--bitwise", "goes with --code: one code owes bits by itself", fix="leave it out")
    if len(words) != 2:
        problem = f"takes 2 runs, not {len(words)}"
        fix = f"{commands.verb('compare RUN RUN')}, or compare --code OLD NEW KEY=VALUE ..."
        raise refuse(" ".join(["compare", *words]), problem, fix=fix)
    return words


def _answer(found: Verdict | StudyVerdict, answer: str, arguments: Namespace) -> int:
    print(json.dumps(found.as_json(), indent=2)) if arguments.json else print(answer)
    return found.exit_code


def verdict_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "words", metavar="STUDY", nargs="+", help="name of a study that was run, or its folder; with --control, runs"
    )
    against = parser.add_mutually_exclusive_group()
    against.add_argument("--control", metavar="RUN", help="hold runs, or a folder of them, against this one")
    against.add_argument(
        "--history",
        metavar="RUN",
        nargs="+",
        help="hold their numbers to the noise of earlier runs, or a folder of them",
    )
    parser.add_argument(
        "--margin",
        metavar="MEASURE=SIZE",
        nargs="+",
        default=[],
        help="with --history: the relative difference of loss or grad_norm that does not matter, as loss=0.5%%",
    )
    parser.add_argument("--window", type=int, default=0, help="with --history: last steps that count (default: half)")
    parser.add_argument("--json", action="store_true", help="every verdict as JSON")


def run_verdict(arguments: Namespace) -> int:
    if arguments.history is not None:
        return _beside_history(arguments)
    if arguments.margin or arguments.window:
        raise refuse("--margin and --window", "go with --history; a study has margins of its own", fix="leave them out")
    words: list[str] = arguments.words
    if arguments.control is not None:
        store = Store(arguments.root)
        found = against(runs_in(store, words), _found(store, arguments.control))
    elif len(words) > 1:
        fix = commands.verb("verdict RUN ... --control RUN")
        raise refuse(" ".join(["verdict", *words]), f"takes 1 study, not {len(words)}; runs need a control", fix=fix)
    else:
        found = verdict(*located(arguments.root, words[0]))
    found = replace(found, arms=tuple(map(scripted, found.arms)))
    return _answer(found, study_text(found), arguments)


def _beside_history(arguments: Namespace) -> int:
    if arguments.window < 0:
        raise refuse(f"--window {arguments.window}", "is no number of steps", fix="--window 100, or leave it out")
    store = Store(arguments.root)
    new, old = (runs_in(store, words) for words in (arguments.words, arguments.history))
    found = against_history(new, old, dict(map(_margin, arguments.margin)), arguments.window)
    _answer(StudyVerdict("", "", seeds=(found,)), "\n".join(fold(found.sentence, width())), arguments)
    return found.outcome.exit_code


def _margin(word: str) -> tuple[str, float]:
    """Raises `BadRequest`: no such measure, or no size above 0."""
    name, _, size = word.partition("=")
    try:
        value = float(size.removesuffix("%")) / (100 if size.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if name not in MEASURES or not 0 < value < 1:
        choices = "loss=0.005, loss=0.5%, grad_norm=2%"
        raise refuse(f"--margin {word}", "is no relative difference of a measure", choices=choices)
    return name, value


def runs_in(store: Store, words: Sequence[str]) -> list[Path]:
    """Runs by words, each a run or a folder of runs. Raises `StoreError`: one is neither."""
    found: list[Path] = []
    for word in words:
        folder = path(word).absolute()
        inside = [] if (folder / CONFIG).is_file() else sorted(each.parent for each in folder.glob(f"*/{CONFIG}"))
        found += inside or [store.find(word).path]
    return found


def baseline_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", type=path, metavar="FILE", help="a new file (default: baseline.npz)")
    where.add_argument("--refresh", type=path, metavar="FILE", help="replace this one, and say what changes")


def run_baseline(arguments: Namespace) -> int:
    run, old = Store(arguments.root).find(arguments.run).path, arguments.refresh
    target: Path = old or arguments.out or Path("baseline.npz")
    if old is None:
        if target.exists():
            fix = f"--refresh {commands.shown(target)}, which says what changes"
            raise refuse(str(target), "is there already", fix=fix)
        written = made(run)
    else:
        found = gate(run, old)
        written, rows = made(run), changes(found, run, old)
        print(found.sentence)
        head = ("what", "before", "after", "of the bound")
        print("\n".join(table(head, rows, width(), flexible=(0, 1, 2))) if rows else "nothing else")
    write(target, written, "baseline RUN --out")
    print(f"{commands.shown(target)}: {len(written):,} bytes")
    print(f"next: {commands.verb(f'gate {commands.shown(target)} RUN')}")
    return 0


def write(target: Path, text: str | bytes, words: str) -> None:
    """Raises `BadRequest`: the file cannot be written. Args: words: of the verb, up to the file."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, text)
    except OSError as error:
        raise refuse(str(target), str(error.strerror), fix=commands.verb(f"{words} A_FILE_OF_YOUR_OWN")) from None


def gate_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("baseline", metavar="BASELINE", type=path, help="a file that `baseline RUN` made")
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--bitwise", action="store_true", help="demand the bits that one version of the code would owe")
    parser.add_argument("--junit", type=path, metavar="FILE", help="also as JUnit's XML")
    parser.add_argument("--markdown", type=path, metavar="FILE", help="also as Markdown for a pull request")
    parser.add_argument("--json", action="store_true", help="the whole verdict as JSON")


def run_gate(arguments: Namespace) -> int:
    run, golden = Store(arguments.root).find(arguments.run), arguments.baseline
    found = gate(run.path, golden, bitwise=arguments.bitwise)
    title = f"{run.name} against {golden.name}"
    if arguments.junit is not None:
        write(arguments.junit, junit(found, title), "gate BASELINE RUN --junit")
    if arguments.markdown is not None:
        write(arguments.markdown, markdown(found, title), "gate BASELINE RUN --markdown")
    return _answer(found, text(found), arguments)
