"""Verbs: what one is made of, its parser, and all of them in the order of `--help`; and the texts of `--help`.

A verb's module is imported once it is typed.
"""

from __future__ import annotations

import os
import textwrap
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from harness.config.catalog import load_catalog
from harness.config.doc import groups
from harness.config.errors import refuse
from harness.store import commands, screen
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
        found: Callable[[Any], Any] = getattr(
            import_module(f"harness.cli.{self.module}"), name.format(self.name.replace("-", "_"))
        )
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
        Verb("gate", "a run against a baseline, for a pull request", "gate"),
        Verb("baseline", "a golden file of a run, for gate and compare", "gate"),
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
        Verb("wandb", "wandb push STUDY: verdicts, evidence, pictures, dashboard", "wandb_sync"),
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
    options = load_catalog()
    names = sorted(options)
    sentences = groups()
    typed = {commands.request(words): about for words, about in REQUESTS.items()}
    typed[commands.verb("--help")] = "verdicts, costs, how runs fare"
    room = min(WIDTH, screen.width())
    head = [
        "Train one cell, or a set of them.",
        "",
        *_commands(typed, room),
        "",
        *textwrap.wrap(
            f"{page('quickstart.md')} takes five minutes; {page('configuration.md')} has every setting.", room
        ),
        "",
        "Groups and their options:",
        "",
    ]
    return "\n".join([*head, *(line for name in names for line in _group(name, options[name], sentences, room))])


def _commands(typed: Mapping[str, str], room: int) -> list[str]:
    size = max(map(len, typed))
    if size + 2 + max(map(len, typed.values())) <= room:
        return [f"{command:<{size}}  {about}" for command, about in typed.items()]
    return [line for command, about in typed.items() for line in (command, f"    {about}")]


def _group(name: str, options: Sequence[str], sentences: Mapping[str, str], room: int) -> list[str]:
    about = sentences.get(name, "").partition(";")[0].rstrip(".")
    head = textwrap.wrap(f"{name}  {about}", room, subsequent_indent="    ")
    return [*head, *textwrap.wrap(", ".join(options), room, initial_indent="    ", subsequent_indent="    ")]


def verbs_help(program: str, kinds: Mapping[str, Sequence[Verb]]) -> str:
    """Text of `python -m harness --help`, without a trailing newline.

    Args: program: words before a verb. kinds: verbs by purpose.
    """
    size = max(len(verb.name) for verbs in kinds.values() for verb in verbs)
    room = min(WIDTH, screen.width())
    first = f"{program} VERB ...; with --help after it, the arguments of a verb"
    lines = textwrap.wrap(first, room, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    for kind, verbs in kinds.items():
        lines += ["", f"{kind}:"]
        for verb in verbs:
            lines += textwrap.wrap(
                f"  {verb.name:<{size}}  {verb.summary}",
                room,
                subsequent_indent=" " * (size + 4),
                break_on_hyphens=False,
            )
    return "\n".join(lines)
