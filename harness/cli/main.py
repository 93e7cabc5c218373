"""`python -m harness VERB ...`: all verbs in the order of `--help`, their parsers, and the texts of `--help`; dispatch.

A verb's module is imported once it is typed. Errors become exit codes.
"""

from __future__ import annotations

import os
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from harness.cli.failure import listen_to_interrupts, request_errors, standard_streams, tell
from harness.config.catalog import load_catalog
from harness.config.doc import groups
from harness.config.errors import refuse
from harness.config.hints import nearest
from harness.store import commands
from harness.store.commands import page
from harness.store.provenance import versions

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


@dataclass(frozen=True)
class Verb:
    """module: of `harness.cli`, with the verb's two functions: `compare_arguments` and `run_compare`."""

    name: str
    summary: str
    module: str

    def function(self, name: str) -> Callable[[Any], Any]:
        module = import_module(f"harness.cli.{self.module}")
        found: Callable[[Any], Any] = getattr(module, name.format(self.name.replace("-", "_")))
        return found


def path(text: str) -> Path:
    return Path(os.path.expanduser(text))


def parser_of(verb: Verb) -> ArgumentParser:
    parser = _Parser(prog=f"{commands.verb()} {verb.name}", description=verb.summary)
    parser.add_argument(
        "--root",
        default="runs",
        type=os.path.expanduser,  # a shell leaves the `~` of --root=~/runs alone
        metavar="DIR",
        help="where runs are stored (default: runs)",
    )
    verb.function("{}_arguments")(parser)
    return parser


class _Parser(ArgumentParser):
    """Raises `BadRequest` for words that argparse does not understand."""

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        raise refuse(self.prog, message, fix=f"{self.prog} --help")


KINDS: dict[str, tuple[Verb, ...]] = {
    "Is it still the same run, and what did it cost": (
        Verb("compare", "two runs, or two versions of the code", "judge"),
        Verb("verdict", "every arm of a study against its control", "judge"),
        Verb("gate", "a run against a baseline, for a pull request", "judge"),
        Verb("baseline", "a golden file of a run, for gate and compare", "judge"),
        Verb("report", "a study on one page: verdicts, tables, pictures, provenance", "report"),
        Verb("bench", "step time, memory and traffic of a timed study's arms", "cost"),
        Verb("plan", "memory and traffic of a request before anything runs", "plan"),
    ),
    "How runs fare": (
        Verb("watch", "how every run is doing: state, step, loss; failures by cause", "runs"),
        Verb("show", "one run: where it came from, how far it got, why it failed", "runs"),
        Verb("diff", "how two runs differ: settings, sources, versions, machine", "runs"),
        Verb("retry", "a new attempt of what failed, was lost, preempted or cancelled", "runs"),
        Verb("cancel", "end every run that is queued or running", "runs"),
        Verb("gc", "what a store could do without, such as leftovers of crashes", "runs"),
    ),
    "From and to elsewhere": (
        Verb("import-series", "curves of wandb, TensorBoard, CSV, JSONL, Megatron, as runs", "wandb_sync"),
        Verb("sync", "runs into wandb (wandb=online: live), TensorBoard or CSV", "wandb_sync"),
        Verb("wandb", "wandb push STUDY: verdicts, report and dashboard", "wandb_sync"),
        Verb("completion", "for bash, so that TAB offers what can be typed", "completion"),
    ),
}
VERBS: tuple[Verb, ...] = tuple(verb for verbs in KINDS.values() for verb in verbs)

WIDTH = 80
REQUESTS = {
    "": "2 ranks, CPU, real text",
    "engine=ddp dtype=bf16_comm": "choose options: GROUP=OPTION",
    "train.steps=50": "change settings: GROUP.KEY=VALUE",
    "-m sharding=no_shard,optim": "a set of cells",
    "-m study=parity_pair": "a study: sweeps/, or ./FILE",
    "launch.dry_run=true": "what would run; nothing starts",
    "--cfg job": "the whole configuration",
    "--from RUN train.steps=50": "that frozen cell again, changed",
}


def version() -> str:
    """This version, and those of what its numbers depend on."""
    found = versions(("torch", "numpy", "hydra-core", "omegaconf", "submitit"))
    return ", ".join(f"{name} {found[name]}" for name in sorted(found, key=lambda name: name != "harness"))


def request_help() -> str:
    typed = {commands.request(words): about for words, about in REQUESTS.items()}
    typed[commands.verb("--help")] = "verdicts, costs, how runs fare"
    size, sentences = max(map(len, typed)), groups()
    lines = ["Train one cell, or a set of them.", ""]
    lines += [f"{command:<{size}}  {about}" for command, about in typed.items()]
    lines += ["", f"{page('quickstart.md')} takes five minutes; {page('configuration.md')} has every setting."]
    lines += ["", "Groups and their options:", ""]
    for name, options in sorted(load_catalog().items()):
        about = sentences.get(name, "").partition(";")[0].rstrip(".")
        lines += textwrap.wrap(f"{name}  {about}", WIDTH, subsequent_indent="    ")
        lines += textwrap.wrap(", ".join(options), WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def verbs_help() -> str:
    size = max(len(verb.name) for verb in VERBS)
    lines = [f"{commands.verb()} VERB ...; with --help after it, the arguments of a verb"]
    for kind, verbs in KINDS.items():
        lines += ["", f"{kind}:", *(f"  {verb.name:<{size}}  {verb.summary}" for verb in verbs)]
    return "\n".join(lines)


_PAGE = page("checkpoints.md")
_TENSORS = f"{_PAGE} has the lines that read and write a checkpoint's tensors"
MOVED = {
    "bisect": f"git bisect run, with compare --code; see {page('bisect.md')}",
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
    except request_errors() as error:
        return tell(error)
    except KeyboardInterrupt:
        return 130


def read(words: Sequence[str]) -> tuple[Verb, Namespace]:
    """Raises `BadRequest`: no such verb, or wrong arguments. `SystemExit`: help (code 0)."""
    if words[:1] in (["-h"], ["--help"], ["--version"]):
        print(version() if words[0] == "--version" else verbs_help())
        raise SystemExit(0)
    named = {verb.name: verb for verb in VERBS}
    if words and (verb := named.get(words[0])):
        return verb, parser_of(verb).parse_intermixed_args(words[1:])  # options stand anywhere among the other words
    if not words:
        raise refuse(commands.verb(), "needs a verb", choices=", ".join(named), fix=f"{commands.verb()} --help")
    if words[0] in MOVED:
        raise refuse(words[0], "is no verb any more", fix=MOVED[words[0]])
    if words[0].startswith("-"):
        raise refuse(words[0], "stands before the verb", fix=f"{commands.verb()} VERB {words[0]} ...")
    meant = nearest(words[0], named)
    fix = f"did you mean {' or '.join(meant)}?" if meant else f"{commands.verb()} --help"
    raise refuse(words[0], "no such verb", choices=", ".join(named), fix=fix)
