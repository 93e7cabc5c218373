"""Verbs: what one is made of, its parser, and all of them in the order of `--help`.

A verb's module is imported once it is typed.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from harness.config.errors import refuse
from harness.store import commands

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
