"""Text of `--help`: a first screen, and for run.py every group with its options."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from harness.cli.verbs import Verb
from harness.config.catalog import load_catalog
from harness.config.doc import groups
from harness.store import commands, screen
from harness.store.commands import page
from harness.store.provenance import versions

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
