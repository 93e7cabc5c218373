"""`<root>/<study>/study.json`: the last request of a study, with arms and controls for its verdict."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.store.errors import StoreError
from harness.store.files import write_json
from harness.store.identity import signature, study_name
from harness.store.reading import read_json
from harness.store.rundir import SHARED, CellLike, RunDir, Store
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
    """Words of a study's last request, without those of `ONCE`, and their folder."""
    record = read_study(root, study) or {}
    words = [word for word in record.get("request", ()) if word.partition("=")[0] not in ONCE]
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


def done(runs: Iterable[RunDir]) -> list[RunDir]:
    found = []
    for run in runs:
        with contextlib.suppress(StoreError):
            if (state := run.status()) is not None and state.state is State.done:
                found.append(run)
    return found


def judging_verb(store: Store, study: str, runs: Iterable[RunDir], otherwise: str) -> str:
    """Verb that judges runs of a study: its verdict where it has a control, else a comparison of the last two.

    Args: otherwise: verb if too few are done.
    """
    record, ended = read_study(store.root, study), done(runs)
    if record and any(cell["control"] for cell in record["cells"]):
        return f"verdict {shlex.quote(study)}" if ended else otherwise
    if len(ended) < 2:
        return otherwise
    return f"compare {shlex.quote(store.short(ended[-1]))} {shlex.quote(store.short(ended[-2]))}"
