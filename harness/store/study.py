"""`<root>/<study>/study.json`: the last request of a study, with arms and controls for its verdict."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.store import provenance
from harness.store.errors import StoreError
from harness.store.files import write_json
from harness.store.identity import must_agree, signature, study_name
from harness.store.reading import read_json
from harness.store.rundir import CONFIG, SHARED, CellLike, RunDir, Store, flatten
from harness.store.shapes import STUDY
from harness.store.status import State

FILE = "study.json"


def write_study(
    root: Path, cells: Sequence[CellLike], controls: Mapping[str, str], request: Sequence[str] = ()
) -> None:
    """Replace the record by this request's cells.

    They are in order of start, shuffled with `order_seed` if timed. Each has `signature`, `directory` (under the
    study's folder), `overrides` and `control` (a signature; null for a control, or without one). `request` was typed in
    `folder`.

    Args: controls: signature of an arm -> signature of its control. request: the words after `-m`, as typed in the
    working directory.
    """
    study, store = cells[0].config["study"], Store(root)
    folder = root / study_name(cells[0].config)
    folder.mkdir(SHARED, parents=True, exist_ok=True)
    record = {
        **{name: study[name] for name in ("name", "question", "order_seed", "margins", "window")},
        "request": list(request),
        "folder": os.getcwd(),
        "cells": [
            {
                "signature": (own := signature(cell.config)),
                "directory": store.path_of(cell).name,
                "overrides": list(cell.overrides),
                "control": controls.get(own),
            }
            for cell in cells
        ],
    }
    write_json(folder / FILE, record)


ONCE = ("launch.root", "launch.rerun", "launch.dry_run", "launch.preempt_at")


def asked(root: Path, study: str) -> tuple[list[str], str]:
    """Words of a study's last request, without those of `ONCE`, and their folder.

    A record of an older version only has the words common to every cell.
    """
    record = read_study(root, study) or {"cells": []}
    each = [cell.get("overrides", ()) for cell in record["cells"]] or [()]
    shared = [word for word in each[0] if all(word in words for words in each)]
    words = [word for word in record.get("request") or shared if word.partition("=")[0] not in ONCE]
    named = any(word.startswith("study=") for word in words)
    return [*([] if named else [f"study={study}"]), *words], record.get("folder", "")


def read_study(root: Path, study: str) -> dict[str, Any] | None:
    """Record of a study; None without one. Raises `StoreError`: it is unreadable, or an arm's control is not listed."""
    path = root / study / FILE
    record: dict[str, Any] | None = read_json(path, STUDY)
    cells = record["cells"] if record else []
    listed = {cell["signature"] for cell in cells}
    for cell in cells:
        if cell["control"] and cell["control"] not in listed:
            what = f"compares {cell['directory']} with {cell['control'][:8]}, which it does not list"
            raise StoreError(f"{path} {what}; remove the file and request the study again")
    return record


def asked_for(root: Path) -> list[str]:
    return [name for name in Store(root).studies() if (root / name / FILE).exists()]


def comparable(runs: Iterable[RunDir]) -> list[list[RunDir]]:
    """Groups of two or more done runs of today's sources that agree in every setting that must.

    Of other programs' runs nothing but the number of steps must.
    """
    groups: dict[Any, list[RunDir]] = {}
    digest = provenance.sources_digest()
    for run in filter(is_done, runs):
        with contextlib.suppress(StoreError):  # one that cannot be read is compared with none
            if not provenance.is_stale(run.path, digest):
                flat = flatten(run.config())
                held = [path for path in flat if must_agree(path)]
                held = ["watched.version", "train.steps"] if "watched.version" in flat else held
                key = frozenset((path, str(flat[path])) for path in held)
                groups.setdefault(key, []).append(run)
    return [group for group in groups.values() if len(group) > 1]


def is_done(run: RunDir) -> bool:
    try:
        found = run.status()
    except StoreError:
        return False
    return found is not None and found.state is State.done


def judging_verb(store: Store, study: str, runs: Sequence[RunDir], otherwise: str) -> str:
    """Verb that judges runs of a study: its verdict where it has a control, else a comparison of two.

    Args: otherwise: verb if no comparable pair is done.
    """
    record = read_study(store.root, study)
    folders = {cell["signature"]: store.root / study / cell["directory"] for cell in record["cells"]} if record else {}
    pairs = [(cell["signature"], cell["control"]) for cell in (record["cells"] if record else ()) if cell["control"]]
    if pairs:
        started = all((folder / CONFIG).is_file() for folder in folders.values())
        judged = started and any(all(is_done(RunDir(folders[each])) for each in pair) for pair in pairs)
        return f"verdict {shlex.quote(study)}" if judged else otherwise
    if not (groups := comparable(runs)):
        return otherwise
    control, *_, arm = max(groups, key=lambda group: runs.index(group[-1]))
    return f"compare {shlex.quote(store.short(arm))} {shlex.quote(store.short(control))}"
