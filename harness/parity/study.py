"""Verdict of a study: every arm of its last request against its own control."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.config.errors import BadRequest, refuse
from harness.config.words import ask_again
from harness.parity.compare import CHECKOUT, judge
from harness.parity.outcome import Outcome, StudyVerdict, Verdict
from harness.parity.record import load
from harness.parity.tiers.equivalence import Pair, over_seeds, reduced
from harness.store import commands
from harness.store.identity import repeated
from harness.store.provenance import sources_digest
from harness.store.rundir import RunDir, Store
from harness.store.screen import counted
from harness.store.study import asked_for, read_study


def verdict(root: Path | str, study: str, *, sources: str | None = CHECKOUT) -> StudyVerdict:
    """Verdict on the cells of a study's last request (`study.json`); older runs in its folder are no arms.

    Each arm has the control composed for it; a repetition of a control is compared with the first, an A/A pair. Args:
    root: `launch.root`. sources: as in `compare`.

    Raises `BadRequest`: no such study, no control, or cells never started.
    """
    folder, record, absent = _record(Path(root), study)
    if absent:
        fix = f"{ask_again(root, study)} starts what is missing"
        raise refuse(f"verdict {study}", absence(absent, len(record["cells"])), fix=fix)
    return _judged(folder, record, sources)


def so_far(root: Path | str, study: str, *, sources: str | None = CHECKOUT) -> tuple[StudyVerdict, list[str]]:
    """`verdict` of an unfinished study: on the existing arms, with the names of cells never started.

    Raises `BadRequest`: there is no such study, or it names no control.
    """
    folder, record, absent = _record(Path(root), study)
    gone = {cell["signature"] for cell in record["cells"] if cell["directory"] in absent}
    cells = [cell for cell in record["cells"] if cell["signature"] not in gone and cell["control"] not in gone]
    return _judged(folder, {**record, "cells": cells}, sources), absent


def absence(absent: Sequence[str], count: int) -> str:
    was = "was" if len(absent) == 1 else "were"
    return f"{len(absent)} of {counted(count, 'cell')} {was} never started, or {was} removed: {', '.join(absent[:4])}"


def _record(root: Path, study: str) -> tuple[Path, dict[str, Any], list[str]]:
    """Folder and record of a study, and its cells that were never started."""
    record = read_study(root, study)
    if record is None:
        raise unknown(f"verdict {study}", root, study)
    if not record["cells"]:
        raise refuse(f"verdict {study}", "its study.json lists no cells", fix=ask_again(root, study))
    if not any(cell["control"] for cell in record["cells"]):
        fix = f"control: {{sharding: no_shard}} in the study's file, then {ask_again(root, study)}"
        raise refuse(f"study.control of {study}", "is empty: an arm needs something to be held against", fix=fix)
    folder, cells = Store(root).root / study, [cell["directory"] for cell in record["cells"]]
    return folder, record, [each for each in cells if not (folder / each / "config.yaml").exists()]


def _judged(folder: Path, record: dict[str, Any], sources: str | None) -> StudyVerdict:
    cells = record["cells"]
    digest = sources_digest() if sources == CHECKOUT else sources
    paths = {cell["signature"]: folder / cell["directory"] for cell in cells}
    pairs = [(paths[cell["signature"]], paths[cell["control"]]) for cell in cells if cell["control"]]
    first: dict[str, Path] = {}
    for control in (paths[cell["signature"]] for cell in cells if not cell["control"]):
        before = first.setdefault(repeated(RunDir(control).config()), control)
        pairs += [(control, before)] if before is not control else []  # a repetition of a control with the first
    margins = record.get("margins") or {}
    judged = _judge(pairs, digest, margins, int(record.get("window") or 0))
    together = over_seeds([pair for _, pair in judged if pair is not None], margins)
    return StudyVerdict(folder.name, record["question"], tuple(each for each, _ in judged), tuple(together))


def _judge(
    pairs: Sequence[tuple[Path, Path]], digest: str | None, margins: Mapping[str, float], window: int
) -> list[tuple[Verdict, Pair | None]]:
    """Verdict on each pair, and what `over_seeds` needs of a comparable one where there are margins."""
    control_of = lru_cache(64)(lambda path: load(path, digest))
    found: list[tuple[Verdict, Pair | None]] = []
    for path, control_path in pairs:
        arm, control = load(path, digest), control_of(control_path)
        judged = judge(arm, control)
        kept = margins and judged.outcome is not Outcome.NOT_COMPARABLE
        found.append((judged, reduced(arm, control, margins, window) if kept else None))
    return found


def against(arms: Sequence[Path], control: Path, *, sources: str | None = CHECKOUT) -> StudyVerdict:
    """Verdict on runs without a study, each against one control, which is left out of `arms`.

    Raises `BadRequest`: no run is left, or one is a series of numbers alone. `StoreError`: one is no run.
    """
    chosen = [path for path in dict.fromkeys(Path(each).resolve() for each in arms) if path != Path(control).resolve()]
    if not chosen:
        raise refuse(f"verdict --control {control}", "has no run to hold against it", fix="name runs before --control")
    digest = sources_digest() if sources == CHECKOUT else sources
    judged = _judge([(path, Path(control)) for path in chosen], digest, {}, 0)
    return StudyVerdict("", "", tuple(each for each, _ in judged))


def unknown(subject: str, root: Path, study: str) -> BadRequest:
    known, store = ", ".join(asked_for(root)) or "none yet", Store(root)
    if not (runs := store.runs(study)):
        text = f"no study of this name was run under {root}"
        return refuse(subject, text, choices=known, fix=commands.request("-m study=NAME"))
    text = f"no study asked for its {counted(len(runs), 'run')}, so none is a control"
    words = f"verdict {commands.shown(store.root / study)} --control RUN"
    return refuse(subject, text, choices=f"studies: {known}", fix=commands.verb(words, root))
