"""Step time and memory: `bench STUDY`."""

from __future__ import annotations

import json
import shlex
from argparse import ArgumentParser, Namespace

from harness.bench import report, text
from harness.cli.runs import located, say_next
from harness.config.words import ask_again


def bench_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("study", metavar="STUDY", help="name of a study that was run with measure=bench, or its folder")
    parser.add_argument("--json", action="store_true", help="every row, ratio and run as JSON")


def run_bench(arguments: Namespace) -> int:
    arguments.root, name = located(arguments.root, arguments.study)
    found = report(arguments.root, name)
    if arguments.json:
        print(json.dumps(found.as_json(), indent=2, allow_nan=False))
        return found.exit_code
    print(text(found) + "\n")
    if found.exit_code:
        rerun = "launch.rerun=always" if found.mixed else "launch.rerun=stale"
        print(f"next: {ask_again(arguments.root, found.study, rerun)}")
    else:
        say_next(arguments, f"bench {shlex.quote(found.study)} --json")
    return found.exit_code
