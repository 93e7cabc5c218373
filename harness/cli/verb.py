"""Verb and its parser."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from harness.config.errors import refuse
from harness.store import commands

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


@dataclass(frozen=True)
class Implementation:
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


@dataclass(frozen=True)
class Verb:
    """place: module of `harness.cli`, and the name of the `Implementation` in it."""

    name: str
    summary: str
    place: str

    @property
    def implementation(self) -> Implementation:
        module, _, name = self.place.partition(".")
        loaded: Implementation = getattr(import_module(f"harness.cli.{module}"), name)
        return loaded


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
    verb.implementation.add_arguments(parser)
    return parser


class _Parser(ArgumentParser):
    """Raises `BadRequest` for words that argparse does not understand."""

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        raise refuse(self.prog, message, fix=f"{self.prog} --help")
