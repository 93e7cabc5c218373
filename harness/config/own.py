"""The user's own classes in a cell, described without torch.

A child process (`harness.worker.describe`) imports and tries each. Engines have `harness.config.adapter`.
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

GUIDE = "docs/own.md shows a whole one"


class Target(NamedTuple):
    kind: str
    setting: str
    name: str
    """`package.module:Class`, or `package.module:function`."""


@dataclass(frozen=True)
class Own:
    kind: str
    name: str
    told: Mapping[str, Any]
    """Result of its trial: `parameters` (model), `num_sequences` and `max_token` (data), `elementwise` (optimizer)."""
    root: str
    files: tuple[str, ...]
    """Sources it loads, relative to `root`; an edit of them makes its runs stale."""

    def facts(self) -> dict[str, Any]:
        """Kind, name, folder, sources and digest, as in `provenance.json`."""
        digest = files_digest(Path(self.root), self.files)
        return {"kind": self.kind, "name": self.name, "root": self.root, "files": list(self.files), "digest": digest}


def targets(config: Config) -> Iterator[Target]:
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
    shaping = {group: _plain(asdict(getattr(config, group))) for group in SHAPING}
    return _described(tuple(targets(config)), json.dumps(shaping, sort_keys=True), os.getcwd())[target]


def described(kind: str, config: Config) -> Own | None:
    found = [describe(target, config) for target in targets(config) if target.kind == kind]
    return found[0] if found and isinstance(found[0], Own) else None


def facts(config: Config) -> list[dict[str, Any]]:
    found: list[Any] = [describe(target, config) for target in targets(config)]
    if config.engine.name is EngineName.ext and config.engine.adapter is not None:
        found.append(adapter.describe(config.engine.adapter))
    return [each.facts() for each in found if not isinstance(each, Violation)]


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.name if isinstance(value, Enum) else value for key, value in values.items()}


@functools.cache
def _described(asked: tuple[Target, ...], shaping: str, folder: str) -> dict[Target, Own | Violation]:
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
    return f"{target.setting}={as_typed(target.name)}"
