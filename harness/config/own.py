"""The user's own classes in a cell, described without torch: a child process (`harness.worker.describe`) imports and
tries each."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from harness.config.capabilities import ENGINES, Capabilities
from harness.config.doc import plain_of
from harness.config.errors import Violation
from harness.config.schema import Config, EngineName
from harness.store.commands import page
from harness.store.provenance import files_digest, python_path

SHAPING = ("model", "data", "optimizer")

TIMEOUT_S = 300.0


class Target(NamedTuple):
    kind: str
    setting: str
    name: str | None
    """`package.module:Class`, or `package.module:function`; None where it lacks."""


@dataclass(frozen=True)
class Own:
    kind: str
    name: str
    answer: Mapping[str, Any]
    """Result of its trial: `parameters` (model), `num_sequences` (data), `elementwise` (optimizer), `capabilities`
    (engine)."""
    root: str
    files: tuple[str, ...]
    """Sources it loads, relative to `root`; an edit of them makes its runs stale."""

    def facts(self) -> dict[str, Any]:
        """Kind, name, folder, sources and digest, as in `provenance.json`."""
        digest = files_digest(Path(self.root), self.files)
        return {"kind": self.kind, "name": self.name, "root": self.root, "files": list(self.files), "digest": digest}


def targets(config: Config) -> Iterator[Target]:
    for setting, option, name in (
        ("engine.adapter", config.engine.name, config.engine.adapter),
        ("model.target", config.model.family, config.model.target),
        ("data.target", config.data.kind, config.data.target),
        ("optimizer.target", config.optimizer.name, config.optimizer.target),
    ):
        if option.name == "ext":
            yield Target(setting.partition(".")[0], setting, name)
    yield from (Target("callback", "measure.callbacks", name) for name in config.measure.callbacks)
    if ":" in config.fault.name:  # the others are samples
        yield Target("fault", "fault.name", config.fault.name)


def trials(config: Config) -> dict[Target, Own | Violation]:
    """Everything of the user's that a configuration names, tried, or what is wrong with it.

    An engine is tried alone: no setting shapes it, and a sweep asks once.
    """
    shaping = json.dumps({group: plain_of(getattr(config, group)) for group in SHAPING}, sort_keys=True)
    engine = tuple(each for each in targets(config) if each.kind == "engine")
    others = tuple(each for each in targets(config) if each.kind != "engine")
    return _tried(engine, "{}", os.getcwd()) | _tried(others, shaping, os.getcwd())


def describe_engine(adapter: str) -> Own | Violation:
    target = Target("engine", "engine.adapter", adapter)
    return _tried((target,), "{}", os.getcwd())[target]


def described(kind: str, config: Config) -> Own | None:
    found = (each for target, each in trials(config).items() if target.kind == kind)
    return next((each for each in found if isinstance(each, Own)), None)


def facts(config: Config) -> list[dict[str, Any]]:
    return [each.facts() for each in trials(config).values() if isinstance(each, Own)]


def capabilities_of(config: Config) -> Capabilities:
    """Capabilities of the configured engine; of `ext`, those its adapter declares.

    An adapter that cannot be described is allowed everything: its own violation says why, and others would be guesses.
    """
    engine = config.engine
    if engine.name is not EngineName.ext or engine.adapter is None:
        return ENGINES[engine.name]
    module, _, name = engine.adapter.partition(":")
    declared = getattr(getattr(sys.modules.get(module), name, None), "capabilities", None)
    if not isinstance(declared, Capabilities):
        from pydantic import TypeAdapter

        found, declared = describe_engine(engine.adapter), ENGINES[EngineName.ext]
        if isinstance(found, Own):
            declared = TypeAdapter(Capabilities).validate_python(found.answer["capabilities"])
    return replace(declared, settings=tuple(dict.fromkeys((*declared.settings, "engine.adapter"))))


def environment() -> dict[str, str]:
    """Environment of a child that imports this package, and modules in its own folder.

    `PYTHONSAFEPATH` would hide that folder.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return {**kept, "PYTHONPATH": python_path(os.environ)}


@functools.cache
def _tried(wanted: tuple[Target, ...], shaping: str, folder: str) -> dict[Target, Own | Violation]:
    found: dict[Target, Own | Violation] = {each: wrong for each in wanted if (wrong := _misnamed(each))}
    sound = [each for each in wanted if each not in found]
    if not sound:
        return found
    lines, why = _ask(json.dumps({"targets": sound, "config": json.loads(shaping)}), folder)
    for target, line in zip(sound, lines, strict=False):
        found[target] = _answer(target, json.loads(line))
    for target in sound[len(lines) :]:
        fix = f"python -c 'import {str(target.name).partition(':')[0]}'"
        found[target] = Violation(f"{target.setting}={target.name}", why, fix=fix)
    return found


def _ask(question: str, folder: str) -> tuple[list[str], str]:
    command = [sys.executable, "-m", "harness.worker.describe"]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        where: dict[str, Any] = {"env": environment(), "cwd": folder, "stdout": out, "stderr": err}
        try:
            subprocess.run(command, input=question, text=True, timeout=TIMEOUT_S, check=False, **where)
            err.seek(0)
            why = f"trying it ended the process ({(err.read().strip().splitlines() or ['without a word'])[-1]})"
        except subprocess.TimeoutExpired:
            why = f"was not tried within {TIMEOUT_S:.0f} s"
        out.seek(0)
        return out.read().splitlines(), why


def _misnamed(target: Target) -> Violation | None:
    if target.name is None:
        valid = f"{target.setting}=package.module:Class"
        return Violation(f"{target.kind}=ext", "needs a class of yours", valid, f"see {_guide(target)}")
    module, colon, name = target.name.partition(":")
    if colon and all(part.isidentifier() for part in (*module.split("."), name)):
        return None
    kind, example = ("function", "mine") if target.kind == "fault" else ("Class", "Mine")
    fix = f"{target.setting}=mine:{name or example}"
    return Violation(f"{target.setting}={target.name}", f"names no {kind.lower()}", f"package.module:{kind}", fix)


def _answer(target: Target, found: Mapping[str, Any]) -> Own | Violation:
    if "problem" in found:
        subject, shows = f"{target.setting}={target.name}", f"{_guide(target)} shows a whole one"
        return Violation(subject, found["problem"], found["choices"], found["fix"], shows)
    return Own(target.kind, str(target.name), found["answer"], found["root"], tuple(found["files"]))


def _guide(target: Target) -> str:
    return page("adapter.md" if target.kind == "engine" else "own.md")
