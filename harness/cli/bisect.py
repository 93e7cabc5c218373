"""`bisect`: the commit, or the smallest set of settings, that makes a run differ."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from harness.bisect.history import Bisection, Culprit
from harness.bisect.settings import KeySearch
from harness.bisect.trials import Request
from harness.cli.verb import Implementation
from harness.config.errors import refuse
from harness.store.screen import INDENT, fold, width

EXIT_UNDECIDED = 3


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "good", metavar="GOOD", help="a revision; with --keys a run: path, prefix of a signature, @last"
    )
    parser.add_argument("bad", metavar="BAD", help="a revision built on it, or WORKTREE; with --keys a run")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="what every trial is asked, as after run.py")
    parser.add_argument(
        "--keys", action="store_true", help="GOOD and BAD are runs: which settings make the difference?"
    )
    parser.add_argument(
        "--bitwise", action="store_true", help="any unequal bit is a difference (deterministic numerics)"
    )
    parser.add_argument(
        "--undecided", action="store_true", help="what is in doubt is a difference too: UNDECIDED counts as DIFFERENT"
    )


def _bisect(arguments: Namespace) -> int:
    request = Request(tuple(arguments.overrides), arguments.root, arguments.bitwise, arguments.undecided)
    search = _keys if arguments.keys else _commits
    try:
        return search(request, arguments.good, arguments.bad)
    except KeyboardInterrupt:
        _tell("\ninterrupted; asked again, runs that are done are used again")
        raise


def _tell(line: str) -> None:
    print("\n".join(each for part in line.split("\n") for each in fold(part, width(), INDENT)), flush=True)


def _commits(request: Request, good: str, bad: str) -> int:
    found = Bisection(request, good, bad, _tell).find()
    _tell(f"\n{found.sentence}")
    _tell_skipped(found)
    for command in found.next:
        print(f"next: {command}")
    return EXIT_UNDECIDED if found.skipped else 0


def _tell_skipped(found: Culprit) -> None:
    for each in found.skipped:
        _tell(f"not tried: {each.version.title}: {each.why}")


def _keys(request: Request, good: str, bad: str) -> int:
    if request.bitwise:
        raise refuse("--bitwise", "is for versions of the code: one code owes bits by itself", fix="leave it out")
    found = KeySearch(request, good, bad, _tell).find()
    _tell(f"\n{found.sentence}")
    for command in found.next:
        print(f"next: {command}")
    return 0


BISECT = Implementation(_arguments, _bisect)
