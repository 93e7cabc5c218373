"""What of a cell is the user's own, and what each such class or function is, learnt without loading torch here.

A child process (`harness.worker.describe`) imports it, tries it on something small, and tells what it found. An
engine of one's own has rules of its own besides (`harness.config.adapter`).
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from harness.config import adapter
from harness.config.doc import as_typed
from harness.config.errors import Violation
from harness.config.schema import Config, DataKind, EngineName, ModelFamily, OptimizerName
from harness.store.provenance import files_digest

SHAPING = ("model", "data", "optimizer")
"""Groups of the configuration that a class of one's own is made from."""

GUIDE = "docs/own.md shows a whole one"


class Target(NamedTuple):
    """One class of the user's that a cell names, or the function that is a fault."""

    kind: str
    """model, data, optimizer, callback or fault."""
    setting: str
    """The setting that names it."""
    name: str
    """`package.module:Class`, or `package.module:function`."""


@dataclass(frozen=True)
class Own:
    """One class of the user's, as it was found."""

    kind: str
    name: str
    told: Mapping[str, Any]
    """What its trial found: a model's `parameters`, data's `num_sequences` and `max_token`, whether an optimizer is
    `elementwise`."""
    root: str
    """Folder its module is imported from."""
    files: tuple[str, ...]
    """Sources it loads from there, relative to `root`: what an edit of makes its runs stale."""

    def facts(self) -> dict[str, Any]:
        """What `provenance.json` records: kind, name, folder, sources and their digest."""
        digest = files_digest(Path(self.root), self.files)
        return {"kind": self.kind, "name": self.name, "root": self.root, "files": list(self.files), "digest": digest}


def targets(config: Config) -> Iterator[Target]:
    """Everything of the user's that a cell trains with, its engine apart."""
    chosen = (
        ("model", config.model.family is ModelFamily.ext, config.model.target),
        ("data", config.data.kind is DataKind.ext, config.data.target),
        ("optimizer", config.optimizer.name is OptimizerName.ext, config.optimizer.target),
    )
    yield from (Target(kind, f"{kind}.target", name) for kind, asked, name in chosen if asked and name is not None)
    yield from (Target("callback", "measure.callbacks", name) for name in config.measure.callbacks)
    if ":" in config.fault.name:  # the others are samples
        yield Target("fault", "fault.name", config.fault.name)


def describe(target: Target, config: Config) -> Own | Violation:
    """What a class is, or why it cannot be used. Asked once in a process: an edit needs a new request."""
    shaping = {group: _plain(asdict(getattr(config, group))) for group in SHAPING}
    return _described(tuple(targets(config)), json.dumps(shaping, sort_keys=True), os.getcwd())[target]


def described(kind: str, config: Config) -> Own | None:
    """What is told of one's own model, data or optimizer; None where there is none, or it cannot be used."""
    found = [describe(target, config) for target in targets(config) if target.kind == kind]
    return found[0] if found and isinstance(found[0], Own) else None


def facts(config: Config) -> list[dict[str, Any]]:
    """Everything of the user's own that a cell trains with, as `provenance.json` records it."""
    found: list[Any] = [describe(target, config) for target in targets(config)]
    if config.engine.name is EngineName.ext and config.engine.adapter is not None:
        found.append(adapter.describe(config.engine.adapter))
    return [each.facts() for each in found if not isinstance(each, Violation)]


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.name if isinstance(value, Enum) else value for key, value in values.items()}


@functools.cache
def _described(asked: tuple[Target, ...], shaping: str, folder: str) -> dict[Target, Own | Violation]:
    """All of a cell's classes in one child process, which answers a line each."""
    found: dict[Target, Own | Violation] = {each: wrong for each in asked if (wrong := _misnamed(each))}
    sound = [each for each in asked if each not in found]
    if not sound:
        return found
    lines, why = _ask(json.dumps({"targets": sound, "config": json.loads(shaping)}), folder)
    for target, line in zip(sound, lines, strict=False):
        found[target] = _answer(target, json.loads(line))
    for target in sound[len(lines) :]:
        found[target] = Violation(subject(target), why, fix=f"python -c 'import {target.name.partition(':')[0]}'")
    return found


def _ask(question: str, folder: str) -> tuple[list[str], str]:
    """The child's lines, and why there are not more."""
    command, environment = [sys.executable, "-m", "harness.worker.describe"], adapter.environment()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            subprocess.run(
                command,
                input=question,
                env=environment,
                cwd=folder,
                stdout=out,
                stderr=err,
                text=True,
                timeout=adapter.TIMEOUT_S,
                check=False,
            )
            err.seek(0)
            why = f"trying it ended the process ({(err.read().strip().splitlines() or ['without a word'])[-1]})"
        except subprocess.TimeoutExpired:
            why = f"was not tried within {adapter.TIMEOUT_S:.0f} s"
        out.seek(0)
        return out.read().splitlines(), why


def _misnamed(target: Target) -> Violation | None:
    module, colon, name = target.name.partition(":")
    if colon and all(part.isidentifier() for part in (*module.split("."), name)):
        return None
    kind, example = ("function", "mine") if target.kind == "fault" else ("Class", "Mine")
    fix = f"{target.setting}=mine:{name or example}"
    return Violation(subject(target), f"names no {kind.lower()}", f"package.module:{kind}", fix)


def _answer(target: Target, told: Mapping[str, Any]) -> Own | Violation:
    if "problem" in told:
        return Violation(subject(target), told["problem"], told["choices"], told["fix"], GUIDE)
    return Own(target.kind, target.name, told["told"], told["root"], tuple(told["files"]))


def subject(target: Target) -> str:
    """The setting with its value, for messages."""
    return f"{target.setting}={as_typed(target.name)}"
