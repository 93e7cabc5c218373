"""A study's verdict: every arm against its own control, as the study was last asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.config.errors import refuse
from harness.parity.compare import CHECKOUT, judge
from harness.parity.outcome import Outcome, StudyVerdict
from harness.parity.record import Record, load
from harness.parity.tiers.seeds import over_seeds
from harness.store.provenance import sources_digest
from harness.store.rundir import Store
from harness.store.study import read_study

REPETITION = "train.replicate"


def verdict(root: Path | str, study: str, *, sources: str | None = CHECKOUT) -> StudyVerdict:
    """Judge the cells of a study's last request, recorded in its `study.json`; older runs in its folder are no arms.

    Each arm is held against the control that was composed for it. A repetition of a control is held against the first
    of its kind: an A/A pair that shows the noise.

    Args:
        root: the store, `launch.root`.
        study: name of the study.
        sources: as in `compare`.

    Raises:
        BadRequest: there is no such study, it names no control, or some of its cells were never started.
    """
    record = read_study(Path(root), study)
    if record is None:
        raise _unknown(Path(root), study)
    cells = record["cells"]
    if not any(cell["control"] for cell in cells):
        fix = f"control: {{sharding: no_shard}} in sweeps/{study}.yaml, then python run.py -m study={study}"
        raise refuse(f"study.control of {study}", "is empty: an arm needs something to be held against", fix=fix)
    folder = Store(root).root / study
    absent = [cell["directory"] for cell in cells if not (folder / cell["directory"] / "config.yaml").exists()]
    if absent:
        text = f"{len(absent)} of {len(cells)} cells were never started: {', '.join(absent[:4])}"
        raise refuse(f"verdict {study}", text, fix=f"python run.py -m study={study} starts what is missing")
    digest = sources_digest() if sources == CHECKOUT else sources
    runs = {cell["signature"]: load(folder / cell["directory"], digest) for cell in cells}
    pairs = [(runs[cell["signature"]], runs[cell["control"]]) for cell in cells if cell["control"]]
    pairs += _repetitions([runs[cell["signature"]] for cell in cells if not cell["control"]])
    verdicts = tuple(judge(arm, control) for arm, control in pairs)
    comparable = [
        pair for pair, each in zip(pairs, verdicts, strict=True) if each.outcome is not Outcome.NOT_COMPARABLE
    ]
    margins, window = record.get("margins") or {}, int(record.get("window") or 0)
    return StudyVerdict(study, record["question"], verdicts, tuple(over_seeds(comparable, margins, window)))


def _repetitions(controls: list[Record]) -> list[tuple[Record, Record]]:
    """Controls that differ from an earlier one in nothing but the number of the repetition, with that one."""
    first: dict[Any, Record] = {}
    pairs = []
    for control in controls:
        kind = tuple(sorted((key, str(value)) for key, value in control.config.items() if key != REPETITION))
        if first.setdefault(kind, control) is not control:
            pairs.append((control, first[kind]))
    return pairs


def _unknown(root: Path, study: str) -> Exception:
    known = ", ".join(name for name in Store(root).studies() if read_study(root, name) is not None) or "none yet"
    text = f"no study of this name was run under {root}"
    return refuse(f"verdict {study}", text, choices=known, fix="python run.py -m study=NAME")
