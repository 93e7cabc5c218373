"""`bisect`: the commit that makes a run differ."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from harness.bisect.history import Bisection
from harness.bisect.trials import Request
from harness.cli.verb import Implementation
from harness.store.screen import INDENT, fold, width

EXIT_UNDECIDED = 3


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("good", metavar="GOOD", help="a revision")
    parser.add_argument("bad", metavar="BAD", help="a revision built on it, or WORKTREE")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="what every trial is asked, as after run.py")
    parser.add_argument(
        "--bitwise", action="store_true", help="any unequal bit is a difference (deterministic numerics)"
    )
    parser.add_argument(
        "--undecided", action="store_true", help="what is in doubt is a difference too: UNDECIDED counts as DIFFERENT"
    )


def _bisect(arguments: Namespace) -> int:
    request = Request(tuple(arguments.overrides), arguments.root, arguments.bitwise, arguments.undecided)
    try:
        found = Bisection(request, arguments.good, arguments.bad, _tell).find()
    except KeyboardInterrupt:
        _tell("\ninterrupted; asked again, runs that are done are used again")
        raise
    _tell(f"\n{found.sentence}")
    for each in found.skipped:
        _tell(f"not tried: {each.version.title}: {each.why}")
    for command in found.next:
        print(f"next: {command}")
    return EXIT_UNDECIDED if found.skipped else 0


def _tell(line: str) -> None:
    print("\n".join(each for part in line.split("\n") for each in fold(part, width(), INDENT)), flush=True)


BISECT = Implementation(_arguments, _bisect)
