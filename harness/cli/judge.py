"""Verdicts: `compare RUN RUN` and `verdict STUDY`."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from harness.cli.verb import Verb
from harness.parity import compare, study_text, text, verdict, zoom
from harness.store.rundir import Store


def _compare_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("arm", metavar="RUN", help="a path, a prefix of a signature (4 digits or more) or @last")
    parser.add_argument("control", metavar="RUN", help="the run it is held against")
    parser.add_argument("--json", action="store_true", help="the whole verdict as JSON")
    parser.add_argument("--tensor", metavar="NAME", help="look at one parameter's gradient instead")
    parser.add_argument("--step", type=int, default=1, help="the captured step to look at (default: 1)")


def _compare(arguments: Namespace) -> int:
    store = Store(arguments.root)
    arm, control = store.find(arguments.arm).path, store.find(arguments.control).path
    if arguments.tensor is not None:
        print(zoom(arm, control, arguments.tensor, step=arguments.step))
        return 0
    found = compare(arm, control)
    print(json.dumps(found.as_json(), indent=2) if arguments.json else text(found))
    return found.exit_code


def _verdict_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("study", metavar="STUDY", help="name of a study that was run")
    parser.add_argument("--json", action="store_true", help="every verdict as JSON")


def _verdict(arguments: Namespace) -> int:
    found = verdict(arguments.root, arguments.study)
    print(json.dumps(found.as_json(), indent=2) if arguments.json else study_text(found))
    return found.exit_code


COMPARE = Verb("compare", "is a run still the same training run as another?", _compare_arguments, _compare)
VERDICT = Verb("verdict", "every arm of a study against its control", _verdict_arguments, _verdict)
