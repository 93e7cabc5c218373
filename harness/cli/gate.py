"""A golden file, and a run against it: `baseline RUN`, `gate BASELINE RUN`."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from harness.cli.runs import RUN_HELP
from harness.cli.verbs import path
from harness.config.errors import refuse
from harness.parity import text
from harness.parity.gate import changes, gate, made
from harness.parity.telling.render import junit, markdown
from harness.store import commands, screen
from harness.store.files import write_atomic
from harness.store.rundir import Store


def baseline_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", type=path, metavar="FILE", help="a new file (default: baseline.json)")
    where.add_argument("--refresh", type=path, metavar="FILE", help="replace this one, and say what changes")


def run_baseline(arguments: Namespace) -> int:
    run, old = Store(arguments.root).find(arguments.run).path, arguments.refresh
    target: Path = old or arguments.out or Path("baseline.json")
    if old is None:
        if target.exists():
            fix = f"--refresh {commands.shown(target)}, which says what changes"
            raise refuse(str(target), "is there already", fix=fix)
        written = made(run)
    else:
        found = gate(run, old)
        written, rows = made(run, found, old), changes(found, run, old)
        screen.show(found.sentence)
        head = ("what", "before", "after", "of the bound")
        screen.show("\n".join(screen.table(head, rows, screen.width(), flexible=(0, 1, 2))) if rows else "nothing else")
    write(target, written, "baseline RUN --out")
    print(f"{commands.shown(target)}: {len(written):,} bytes")
    print(f"next: {commands.verb(f'gate {commands.shown(target)} RUN')}")
    return 0


def write(target: Path, text: str, words: str) -> None:
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
    print(json.dumps(found.as_json(), indent=2)) if arguments.json else screen.show(text(found))
    return found.exit_code
