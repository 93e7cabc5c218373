"""`rehearse RUN --preempt-at N`: would this run survive an interruption with every bit?"""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from harness.cli.verb import Implementation
from harness.config.errors import refuse
from harness.store import commands
from harness.store.rundir import Store
from harness.store.screen import INDENT, counted, fold, width
from harness.study.rehearse import Rehearsal, rehearse

SHOWN = 8


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "words", metavar="RUN", nargs="*", help="a run that is done: a path, a prefix of a signature or @last"
    )
    parser.add_argument("--preempt-at", type=int, required=True, metavar="N", help="the last step before it is stopped")
    parser.add_argument(
        "--as",
        dest="changes",
        metavar="KEY=VALUE",
        nargs="+",
        default=[],
        help="go on under another layout, said as after run.py; the run must have numerics=exact",
    )
    parser.add_argument("--json", action="store_true", help="what was found as JSON")


def _rehearse(arguments: Namespace) -> int:
    store = Store(arguments.root)
    name, changes = _told_apart([*arguments.words, *arguments.changes])
    found = rehearse(
        store.find(name),
        Path(arguments.root),
        arguments.preempt_at,
        changes,
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(json.dumps(found.as_json(), indent=2) if arguments.json else text(found))
    return 0 if found.equal else 1


def _told_apart(words: Sequence[str]) -> tuple[str, list[str]]:
    """Run and overrides in any order; an option with several values also swallows a run behind it.

    Raises `BadRequest`: there is no run, or more than one.
    """
    runs = [word for word in words if "=" not in word] or list(words[:1])
    if len(runs) != 1:
        subject = " ".join(["rehearse", *words])
        raise refuse(subject, f"takes 1 RUN, not {len(runs)}", fix="rehearse RUN --preempt-at N --as KEY=VALUE ...")
    return runs[0], [word for word in words if word != runs[0]]


def text(found: Rehearsal) -> str:
    if found.equal:
        head = (
            f"EQUAL: stopped after step {found.preempt_at} and resumed: all {found.numbers} logged numbers of"
            f" {counted(found.steps, 'step')} and the final weights have the bits of the uninterrupted run"
        )
    else:
        head = f"DIFFERENT: {counted(len(found.differences), 'difference')}, the first: {found.differences[0]}"
    rows = [head, *(f"  {each}" for each in found.differences[1:SHOWN])]
    lines = [line for each in rows for line in fold(each, width(), INDENT)]
    return "\n".join([*lines, f"next: {commands.verb(f'show {shlex.quote(str(found.resumed))}')}"])


REHEARSE = Implementation(_arguments, _rehearse)
