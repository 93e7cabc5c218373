"""`<root>/<study>/study.json`: what was last asked for, so that a verdict knows its arms and their controls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.store.files import read_json, write_json
from harness.store.identity import directory_name
from harness.study.cells import Desired

FILE = "study.json"
ADHOC = "adhoc"
"""The study of cells that belong to none; it is never recorded, because no request asks for all of it."""


def write_study(wanted: Desired) -> None:
    """Replace the record by this request's cells. A study is what was asked for last: asking again costs nothing."""
    first = wanted.cells[0]
    if first.study == ADHOC or len(wanted.cells) == 1:
        return
    folder = Path(first.typed.launch.root) / first.study
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, study_record(wanted))


def study_record(wanted: Desired) -> dict[str, Any]:
    """The record as plain values.

    `cells` has a `signature`, `directory` (under the study's folder), `overrides` and `control` each: the signature of
    the cell it is compared with; null for a control, and where the study names none.
    """
    study = wanted.cells[0].typed.study
    return {
        "name": study.name,
        "question": study.question,
        "cells": [
            {
                "signature": cell.signature,
                "directory": directory_name(cell.config),
                "overrides": list(cell.overrides),
                "control": wanted.controls.get(cell.signature),
            }
            for cell in wanted.cells
        ],
    }


def read_study(root: Path, study: str) -> dict[str, Any] | None:
    """The record of a study; None where it was never asked for as a whole."""
    record: dict[str, Any] | None = read_json(root / study / FILE)
    return record
