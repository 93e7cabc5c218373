"""Words after `run.py`: Hydra's own flags, `--from`, and overrides, read before Hydra composes anything."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hydra._internal.utils import get_args_parser

from harness.cli.main import version
from harness.config import catalog
from harness.config.doc import settings
from harness.config.errors import BadRequest, refuse
from harness.config.hints import explain_key
from harness.config.hydra_settings import demand_training
from harness.config.overrides import check_overrides, hydra_words, no_flag, typed_value
from harness.store import commands


@dataclass(frozen=True)
class Arguments:
    overrides: tuple[str, ...]
    flags: tuple[str, ...]
    multirun: bool
    frozen: str | None

    shows: bool
    help: bool = False

    @property
    def starts_nothing(self) -> bool:
        return self.shows or self.help or bool(typed_value(self.overrides, "launch.dry_run", False))

    @property
    def for_hydra(self) -> list[str]:
        """Flags first: argparse takes overrides on one side of a flag only."""
        own = catalog.own_folder()
        folder = [] if own is None else ["--config-dir", str(own)]
        return [*self.flags, *folder, *hydra_words(self.overrides)]


def read_arguments(argv: Sequence[str], implied: Sequence[str] = ()) -> Arguments:
    """Read a command line; overrides are checked unless Hydra is only asked about itself.

    Args: implied: overrides added where their key is not typed.

    Raises `BadRequest`: a wrong override, an unknown flag, or contradictory flags. `SystemExit`: argparse refuses a
    flag's value (code 2).
    """
    if "--version" in argv:  # Hydra's own flag tells Hydra's version
        print(version())
        raise SystemExit(0)
    parser = get_args_parser()
    parser.add_argument("--from", dest="frozen", metavar="RUN", help="run that frozen cell again, changed by overrides")
    parsed, unknown = parser.parse_known_intermixed_args(list(argv))
    if unknown:
        raise _no_flag(unknown[0])
    overrides, flags = list(parsed.overrides), list(argv)
    for text in reversed(overrides):
        del flags[len(flags) - 1 - flags[::-1].index(text)]
    _consistent(parsed)
    if parsed.config_dir:
        catalog.choose_own_folder(parsed.config_dir)
    multirun = bool(parsed.multirun)
    about_hydra = bool(parsed.shell_completion or parsed.hydra_help or parsed.help or parsed.info)
    if not about_hydra:
        multirun = multirun or "hydra.mode=MULTIRUN" in overrides
        draws = multirun and "hydra/sweeper=basic" not in overrides
        typed = {word.key for word in check_overrides(overrides, multirun=multirun, draws=draws)}
        overrides += [text for text in implied if text.partition("=")[0] not in typed]
        if typed_value(overrides, "launch.dry_run", False):
            demand_training(typed_value(overrides, "hydra/sweeper", "harness"))
    shows = about_hydra or bool(parsed.cfg)
    return Arguments(tuple(overrides), tuple(flags), multirun, parsed.frozen, shows, parsed.help)


def _no_flag(word: str) -> BadRequest:
    if "=" in word:
        return BadRequest([no_flag(word)])
    if word.lstrip("-") in (*catalog.load_catalog(), *settings()):
        return BadRequest([no_flag(f"{word}=VALUE")])
    meant = explain_key(word.lstrip("-")).fix if word.startswith("--") else ""
    fix = meant if meant.startswith("did you mean") else commands.request("--help")
    return refuse(word, "no such flag; settings have no dashes", fix=fix)


_COMPLETION = re.compile(r"(install|uninstall|query)=(bash|zsh|fish)")


def _consistent(parsed: argparse.Namespace) -> None:
    if parsed.shell_completion and not any(_COMPLETION.fullmatch(text) for text in parsed.overrides):
        choices = "install=bash, uninstall=bash, query=bash; zsh and fish likewise"
        raise refuse("--shell-completion", "needs to be told what to do", choices=choices)
    if parsed.experimental_rerun:
        raise refuse("--experimental-rerun", "reads a pickle; here runs are frozen as text", fix="--from RUN")
    if parsed.multirun and parsed.cfg:
        problem = "shows one configuration, and -m asks for many"
        raise refuse("--cfg", problem, fix="drop -m, or use launch.dry_run=true")
    if (parsed.resolve or parsed.package) and not parsed.cfg:
        flag = "--resolve" if parsed.resolve else "--package"
        raise refuse(flag, "goes with --cfg", fix=f"--cfg job {flag} ..., or leave it out")
    if parsed.frozen and (parsed.multirun or parsed.cfg):
        fix = f"drop -m and --cfg; `{commands.verb('show RUN')}` prints it"
        raise refuse("--from", "runs one frozen cell again", fix=fix)
    if parsed.config_path or parsed.config_name:
        fix = "an option of your own, ./conf/GROUP/NAME.yaml or --config-dir DIR, chosen as GROUP=NAME"
        raise refuse("--config-path, --config-name", "what a request starts from is conf/config.yaml", fix=fix)
