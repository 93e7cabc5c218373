"""`<root>/<study>/study.json`: what was last asked for, so that a verdict knows its arms and their controls."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.store.errors import StoreError
from harness.store.files import write_json
from harness.store.identity import directory_name, signature, study_name
from harness.store.reading import read_json
from harness.store.rundir import CellLike, Store
from harness.store.shapes import STUDY

FILE = "study.json"


def write_study(root: Path, cells: Sequence[CellLike], controls: Mapping[str, str]) -> None:
    """Replace the record by this request's cells. A study is what was asked for last: asking again costs nothing.

    Args:
        root: the store's root.
        cells: every cell of the request, of one study.
        controls: signature of an arm -> signature of the cell it is compared with.
    """
    folder = root / study_name(cells[0].config)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, study_record(cells, controls))


def study_record(cells: Sequence[CellLike], controls: Mapping[str, str]) -> dict[str, Any]:
    """The record as plain values.

    `cells` stand in the order they are started; `order_seed` is what timed ones were shuffled with. Each cell has a
    `signature`, `directory` (under the study's folder), `overrides` and `control`: the signature of the cell it is
    compared with; null for a control, and where the study names none.
    """
    study = cells[0].config["study"]
    return {
        "name": study["name"],
        "question": study["question"],
        "order_seed": study["order_seed"],
        "margins": study["margins"],
        "window": study["window"],
        "cells": [
            {
                "signature": (own := signature(cell.config)),
                "directory": directory_name(cell.config),
                "overrides": list(cell.overrides),
                "control": controls.get(own),
            }
            for cell in cells
        ],
    }


def asking_word(root: Path, study: str) -> str:
    """The word that asks for a study again, ready for a shell: its name, or the path by which it was last asked for."""
    record = read_study(root, study)
    typed = [word for cell in record["cells"] for word in cell.get("overrides", ())] if record else []
    return shlex.quote(next((word for word in typed if word.startswith("study=")), f"study={study}"))


def read_study(root: Path, study: str) -> dict[str, Any] | None:
    """The record of a study; None where it was never asked for as a whole.

    Raises:
        StoreError: it cannot be read, or holds an arm against a cell that it does not list.
    """
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
    """Names of the studies that have a record, whether or not it can be read."""
    return [name for name in Store(root).studies() if (root / name / FILE).exists()]


def judging_verb(root: Path, study: str, runs: Sequence[str], alone: str) -> str:
    """The verb that judges runs of a study: its verdict where it has a control, else two of them held together.

    Args:
        root: the store's root.
        study: its name.
        runs: what names some of its runs (`Store.short`), ready for a shell; the last is held against the first.
        alone: the verb where there is but one.
    """
    record = read_study(root, study)
    if record is not None and any(cell["control"] for cell in record["cells"]):
        return f"verdict {shlex.quote(study)}"
    return f"compare {runs[-1]} {runs[0]}" if len(runs) > 1 else alone
