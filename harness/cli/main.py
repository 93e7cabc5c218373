"""`python -m harness VERB ...`: parses words, dispatches, prints, and turns errors into exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from harness.cli.failure import REQUEST_ERRORS, listen_to_interrupts, tell
from harness.cli.streams import standard_streams
from harness.cli.verbs import KINDS, VERBS, Verb, parser_of, verbs_help, version
from harness.config.errors import refuse
from harness.config.hints import nearest
from harness.store import commands

_PAGE = commands.page("checkpoints.md")
_TENSORS = f"{_PAGE} has the lines that read and write a checkpoint's tensors"
MOVED = {
    "bisect": f"git bisect run, with compare --code; see {commands.page('bisect.md')}",
    "export": _TENSORS,
    "import": _TENSORS,
    "power": "in a checkout: python benchmarks/power/class_runs.py",
    "rehearse": f"run.py --from RUN study.name=again launch.preempt_at=N, twice, and compare; see {_PAGE}",
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with standard_streams():
            listen_to_interrupts()
            verb, arguments = read(words)
            return int(verb.function("run_{}")(arguments))
    except BrokenPipeError:  # `harness watch | head`: the reader has seen enough
        return 0
    except REQUEST_ERRORS as error:
        return tell(error, words)
    except KeyboardInterrupt:
        return 130


def read(words: Sequence[str]) -> tuple[Verb, argparse.Namespace]:
    """Raises `BadRequest`: no such verb, or wrong arguments. `SystemExit`: help (code 0)."""
    if words and words[0] in ("-h", "--help"):
        print(verbs_help(commands.verb(), KINDS))
        raise SystemExit(0)
    if words[:1] == ["--version"]:
        print(version())
        raise SystemExit(0)
    _check_verb(words)
    verb = next((each for each in VERBS if each.name == words[0]), None)
    if verb is None:
        raise refuse(words[0], "stands before the verb", fix=f"{commands.verb()} VERB {words[0]} ...")
    return verb, parser_of(verb).parse_intermixed_args(words[1:])  # options stand anywhere among the other words


def _check_verb(words: Sequence[str]) -> None:
    names = [verb.name for verb in VERBS]
    if not words:
        raise refuse(commands.verb(), "needs a verb", choices=", ".join(names), fix=f"{commands.verb()} --help")
    if words[0] in MOVED:
        raise refuse(words[0], "is no verb any more", fix=MOVED[words[0]])
    if words[0] not in names and not words[0].startswith("-"):
        meant = nearest(words[0], names)
        fix = f"did you mean {' or '.join(meant)}?" if meant else f"{commands.verb()} --help"
        raise refuse(words[0], "no such verb", choices=", ".join(names), fix=fix)
