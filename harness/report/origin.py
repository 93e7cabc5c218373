"""Where a study's runs come from: what all of them share, and what each has for itself."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.analysis.judge import Study
from harness.store import checksums, commands, provenance
from harness.store.errors import StoreError
from harness.store.rundir import RunDir, flatten

FIRST = ("git.sha", "git.branch", "git.dirty", "sources_digest", "cpu_model", "cpu_count", "device", "hosts")


@dataclass(frozen=True)
class Run:
    label: str
    name: str
    path: str
    state: str
    overrides: str
    """As typed after `run.py`, quoted for a shell."""
    command: str
    attempts: int
    facts: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Origin:
    common: Sequence[tuple[str, str]]
    runs: Sequence[Run]


def origins(study: Study) -> Origin:
    facts = {str(path): _facts(Path(path)) for path in study.runs["path"]}
    every = list(facts.values())
    common = {
        key: value for key, value in (every[0].items() if every else ()) if all(o.get(key) == value for o in every)
    }
    runs = [_run(row, facts[str(row.path)], common) for row in study.runs.itertuples()]
    return Origin(_ordered(common), runs)


def _run(row: Any, facts: Mapping[str, str], common: Mapping[str, str]) -> Run:
    run = RunDir(Path(row.path))
    try:
        typed = run.overrides()
    except StoreError as error:
        typed = (str(error),)
    own = {key: value for key, value in facts.items() if key not in common}
    return Run(
        label=str(row.label),
        name=run.path.name,
        path=str(run.path),
        state=str(row.state),
        overrides=shlex.join(typed),
        command=commands.request(f"--from {shlex.quote(str(run.path))}"),
        attempts=len(run.attempts()),
        facts=_ordered(own),
    )


def _facts(path: Path) -> dict[str, str]:
    try:
        checksums.demand(path, "provenance.json")
        flat = flatten(provenance.read(path))
    except StoreError as error:
        return {"provenance": str(error)}
    return {key: _shown(value) for key, value in flat.items() if value not in (None, [], {}, "")}


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(dict.fromkeys(map(str, value)))
    return str(value)


def _ordered(facts: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted(facts.items(), key=lambda pair: FIRST.index(pair[0]) if pair[0] in FIRST else len(FIRST))
