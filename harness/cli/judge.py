"""Verdicts: `compare RUN RUN`, `compare --code OLD NEW` and `verdict STUDY`."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

from harness.bisect.history import compare_code
from harness.bisect.trials import Request
from harness.cli.runs import located
from harness.cli.verb import Implementation
from harness.config.errors import refuse
from harness.parity import StudyVerdict, Verdict, against, compare, scripted, study_text, text, verdict, zoom
from harness.store import commands
from harness.store.judged import keep
from harness.store.rundir import Store
from harness.store.screen import show


def _compare_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "words",
        metavar="RUN RUN",
        nargs="*",
        help="a run and the run it is held against: a path, a prefix of a signature (4 digits or more) or @last; "
        "with --code KEY=VALUE ..., what both versions are asked, as after run.py",
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
    parser.add_argument("--explain", action="store_true", help="say what each word and each check means")
    parser.add_argument("--tensor", metavar="NAME", help="look at one parameter's gradient instead")
    parser.add_argument("--step", type=int, default=1, help="the captured step to look at (default: 1)")


def _compare(arguments: Namespace) -> int:
    if arguments.code is not None:
        return _compare_code(arguments)
    store = Store(arguments.root)
    arm, control = (store.find(word).path for word in _two_runs(arguments))
    if arguments.tensor is not None:
        print(zoom(arm, control, arguments.tensor, step=arguments.step))
        return 0
    return _say(compare(arm, control), arguments)


def _two_runs(arguments: Namespace) -> list[str]:
    words: list[str] = arguments.words
    if arguments.bitwise:
        raise refuse("--bitwise", "goes with --code: one code owes bits by itself", fix="leave it out")
    if len(words) != 2:
        problem = (
            "the following arguments are required: RUN RUN" if len(words) < 2 else f"takes 2 runs, not {len(words)}"
        )
        fix = f"{commands.verb('compare RUN RUN')}, or compare --code OLD NEW KEY=VALUE ..."
        raise refuse(" ".join(["compare", *words]), problem, fix=fix)
    return words


def _compare_code(arguments: Namespace) -> int:
    request = Request(tuple(arguments.words), arguments.root, arguments.bitwise)
    old, new = arguments.code
    found = compare_code(request, old, new, lambda line: print(line, file=sys.stderr, flush=True))
    if arguments.tensor is not None:
        print(zoom(found.arm, found.control, arguments.tensor, step=arguments.step))
        return 0
    return _say(found.verdict, arguments)


def _say(found: Verdict, arguments: Namespace) -> int:
    (found,) = _scripted(found)
    answer = text(found, explained=arguments.explain)
    print(json.dumps(found.as_json(), indent=2)) if arguments.json else show(answer)
    return found.exit_code


def _scripted(*verdicts: Verdict) -> tuple[Verdict, ...]:
    found, complaint = scripted(*verdicts)
    if complaint:
        print(complaint, file=sys.stderr)
    return found


def _verdict_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "words", metavar="STUDY", nargs="+", help="name of a study that was run, or its folder; with --control, runs"
    )
    parser.add_argument("--control", metavar="RUN", help="hold these runs against this one, whatever study they are of")
    parser.add_argument("--json", action="store_true", help="every verdict as JSON")
    parser.add_argument("--explain", action="store_true", help="say what each word and each check means")


def _verdict(arguments: Namespace) -> int:
    root, found = _judged(arguments)
    found = replace(found, arms=_scripted(*found.arms))
    if found.study:
        keep_verdict(Store(root).root, found)
    answer = study_text(found, explained=arguments.explain)
    print(json.dumps(found.as_json(), indent=2)) if arguments.json else show(answer)
    return found.exit_code


def keep_verdict(root: Path, found: StudyVerdict) -> None:
    try:
        keep(root, found.study, [(Path(arm.arm), Path(arm.control), arm.outcome.value) for arm in found.arms])
    except OSError as error:
        print(f"the outcomes were not kept: {error.filename}: {error.strerror}", file=sys.stderr)


def _judged(arguments: Namespace) -> tuple[str, StudyVerdict]:
    words: list[str] = arguments.words
    if arguments.control is not None:
        store = Store(arguments.root)
        found = against([store.find(word).path for word in words], store.find(arguments.control).path)
        return arguments.root, found
    if len(words) > 1:
        fix = commands.verb("verdict RUN ... --control RUN")
        raise refuse(" ".join(["verdict", *words]), f"takes 1 study, not {len(words)}; runs need a control", fix=fix)
    root, name = located(arguments.root, words[0])
    return root, verdict(root, name)


COMPARE = Implementation(_compare_arguments, _compare)
VERDICT = Implementation(_verdict_arguments, _verdict)
