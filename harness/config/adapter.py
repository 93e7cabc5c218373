"""Description of a user's own engine, obtained without torch: a child process imports it, unless it is loaded
already."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any

from harness.config import schema
from harness.config.capabilities import ENGINES, Capabilities
from harness.config.errors import Violation
from harness.config.schema import Config, EngineName
from harness.store.provenance import PACKAGE, files_digest

TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Description:
    adapter: str
    capabilities: Capabilities
    root: str
    files: tuple[str, ...]
    """Sources it loads, relative to `root`; an edit of them makes its runs stale."""

    def facts(self) -> dict[str, Any]:
        """Name, folder, sources and digest, as in `provenance.json`."""
        return {
            "kind": "engine",
            "name": self.adapter,
            "root": self.root,
            "files": list(self.files),
            "digest": files_digest(Path(self.root), self.files),
        }


def capabilities_of(config: Config) -> Capabilities:
    """Capabilities of the configured engine; of `ext`, those its adapter declares.

    An adapter that cannot be described is allowed everything: its own violation says why, and others would be guesses.
    """
    engine = config.engine
    if engine.name is not EngineName.ext or engine.adapter is None:
        return ENGINES[engine.name]
    declared = _declared_here(engine.adapter)
    if declared is None:
        found = describe(engine.adapter)
        declared = found.capabilities if isinstance(found, Description) else ENGINES[EngineName.ext]
    return replace(declared, settings=tuple(dict.fromkeys((*declared.settings, "engine.adapter"))))


def describe(adapter: str) -> Description | Violation:
    return _describe(adapter, os.getcwd())


def to_plain(value: object) -> Any:
    if isinstance(value, Capabilities):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return {type(value).__name__: value.name}
    return [to_plain(each) for each in value] if isinstance(value, tuple | list) else value


def from_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        ((kind, name),) = value.items()
        return getattr(schema, kind)[name]
    return tuple(from_plain(each) for each in value) if isinstance(value, list) else value


@functools.cache
def _describe(adapter: str, folder: str) -> Description | Violation:
    subject = f"engine.adapter={adapter}"
    module, colon, name = adapter.partition(":")
    if not (colon and all(part.isidentifier() for part in (*module.split("."), name))):
        return Violation(subject, "names no class", "package.module:Class", "engine.adapter=my_engine:MyEngine")
    command = [sys.executable, "-m", "harness.engines.describe", adapter]
    try:
        done = subprocess.run(
            command, env=environment(), cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        told = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return Violation(
            subject, f"its module was not imported in {TIMEOUT_S:.0f} s", fix=f"python -c 'import {module}'"
        )
    except ValueError:
        words = (done.stderr.strip().splitlines() or ["without a word"])[-1]
        return Violation(subject, f"importing it ended the process ({words})", fix=f"python -c 'import {module}'")
    if "problem" in told:
        return Violation(subject, told["problem"], told["choices"], told["fix"], "docs/adapter.md shows a whole one")
    declared = Capabilities(**{key: from_plain(value) for key, value in told["capabilities"].items()})
    return Description(adapter, declared, told["root"], tuple(told["files"]))


def environment() -> dict[str, str]:
    """Environment of a child that imports this package, and modules in its own folder.

    `PYTHONSAFEPATH` would hide that folder.
    """
    own = str(PACKAGE.parent)
    others = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != own]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return {**kept, "PYTHONPATH": os.pathsep.join([own, *others])}


def _declared_here(adapter: str) -> Capabilities | None:
    module, _, name = adapter.partition(":")
    found = getattr(getattr(sys.modules.get(module), name, None), "capabilities", None)
    return found if isinstance(found, Capabilities) else None
