"""What a step costs: `bench STUDY`."""

from __future__ import annotations

import json
import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path

from harness.bench import report, text
from harness.cli.runs import say_next
from harness.cli.verb import Verb
from harness.store import commands
from harness.store.study import asking_word


def _bench_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("study", metavar="STUDY", help="name of a study that was run with measure=bench")
    parser.add_argument("--json", action="store_true", help="every row, ratio and run as JSON")


def _bench(arguments: Namespace) -> int:
    found = report(arguments.root, arguments.study)
    if arguments.json:
        print(json.dumps(found.as_json(), indent=2, allow_nan=False))
        return found.exit_code
    print(text(found) + "\n")
    root = "" if Path(arguments.root) == Path("runs") else f" launch.root={shlex.quote(str(arguments.root))}"
    if found.exit_code:
        rerun = " launch.rerun=always" if found.mixed else " launch.rerun=stale"
        print(f"next: {commands.request(f'-m {asking_word(Path(arguments.root), found.study)}{rerun}{root}')}")
    else:
        say_next(arguments, f"bench {found.study} --json")
    return found.exit_code


BENCH = Verb("bench", "step time, memory and traffic of a timed study's arms", _bench_arguments, _bench)
