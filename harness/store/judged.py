"""`<root>/<study>/verdict.json`: last outcomes of a study's arms, for tables of many runs.

An outcome is valid while both runs have the same last change of state and digest of sources.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.store import provenance, status
from harness.store.errors import StoreError
from harness.store.files import write_json
from harness.store.reading import read_json
from harness.store.shapes import Each

FILE = "verdict.json"
_SHAPE = {"arms": Each(list, {"arm": str, "control": str, "outcome": str, "marks": Each(list, str)})}


def keep(root: Path, study: str, judged: Iterable[tuple[Path, Path, str]]) -> None:
    """Replace the record. Raises `OSError`: the store cannot be written.

    Args: judged: arm, control and outcome; runs of other studies are dropped.
    """
    folder = root / study
    rows = [
        {"arm": arm.name, "control": control.name, "outcome": outcome, "marks": [_mark(arm), _mark(control)]}
        for arm, control, outcome in judged
        if arm.parent.name == control.parent.name == study
    ]
    write_json(folder / FILE, {"arms": rows})


def outcomes(root: Path, study: str) -> dict[Path, str]:
    try:
        record: dict[str, Any] = read_json(root / study / FILE, _SHAPE) or {"arms": []}
    except StoreError:
        return {}
    marks: dict[str, str] = {}
    found = {}
    for row in record["arms"]:
        for name in (row["arm"], row["control"]):
            marks.setdefault(name, _mark(root / study / name))
        if [marks[row["arm"]], marks[row["control"]]] == row["marks"]:
            found[root / study / row["arm"]] = row["outcome"]
    return found


def _mark(run: Path) -> str:
    try:
        state, origin = status.read(run), provenance.read(run)
    except StoreError:
        return ""
    return "" if state is None else f"{state.attempt} {state.updated} {origin.get('sources_digest')}"
