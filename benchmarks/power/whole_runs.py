"""The power of verdicts over whole runs: make the runs of `benchmarks.power.whole`, judge them, write what was found.

    python benchmarks/power/whole_runs.py train   --root DIR [--part fixed|held_out|all|fresh]
    python benchmarks/power/whole_runs.py judge   --root DIR [--part ...] --out FILE.csv
    python benchmarks/power/whole_runs.py table   --out FILE.csv

Runs are made one after another on ranks that are forked once for many of them (tests/study/short.py), so that a run
costs its steps and no start. What is there is not made again: a campaign that was broken off is taken up by the same
command. Judging reads the runs, and may be done as often as judges change; held-out pairs are for once. `all` has the
parts before it; `fresh`, which is held out as a whole, stands apart.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pandas as pd

from benchmarks.pages.tables import markdown_table
from benchmarks.power.steps import PASSES, Kind, compose_all
from benchmarks.power.whole import PREEMPT_AT, SPREAD, STUDY, WholePair, fresh, pairs
from harness.analysis.stats import interval
from harness.config.compose import Cell
from harness.parity.compare import judge
from harness.parity.outcome import Grade
from harness.parity.record import Record, load
from harness.store import status
from harness.store.identity import directory_name
from harness.store.rundir import RunDir, Store
from harness.store.status import State
from tests.faults.corpus import corpus
from tests.study import short
from tests.support.spawn import RankFailed

TOGETHER = 24
"""Runs that ranks make before they end: what a campaign that is broken off loses at most."""

DATA = Path(__file__).resolve().parents[1] / "data" / "power.csv"
COLUMNS = (
    *("part", "kind", "name", "world", "begins", "strength", "against", "group", "stage"),
    *("acts", "view", "outcome", "step", "stages", "check"),
)
"""Of the table: `acts` is False where a fault left no trace; `stages` are all that the first finding leaves open."""

VIEWS = ("default", "full", "unwitnessed", "full, unwitnessed")
"""What is known of the runs: captures as by default or at every step, with and without what they say of themselves."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("verb", choices=("train", "judge", "table"))
    parser.add_argument("--root", type=Path, default=Path("runs"), help="where the runs are (default: runs)")
    parser.add_argument("--part", choices=("fixed", "held_out", "all", "fresh"), default="fixed")
    parser.add_argument("--out", type=Path, default=DATA, help="table of what was found (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.verb == "table":
        print("\n\n".join(tables(pd.read_csv(arguments.out, keep_default_na=False))))
        return 0
    chosen = [
        pair
        for pair in (fresh() if arguments.part == "fresh" else pairs())
        if arguments.part in ("all", "fresh") or pair.held_out is (arguments.part == "held_out")
    ]
    cells = compose_all(
        (each for pair in chosen for each in (pair.arm, pair.control)), (f"launch.root={arguments.root}",)
    )
    if arguments.verb == "train":
        train(chosen, cells, Store(arguments.root))
    else:
        with arguments.out.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows({"part": arguments.part, **row} for row in judged(chosen, cells, arguments.root))
    print(f"{_cpu_seconds():.0f} CPU seconds")
    return 0


def tables(rows: pd.DataFrame) -> Iterator[str]:
    """Faults that act, by training and strength; clean pairs, by training. Rates have one-sided 95 % bounds."""
    rows = rows[rows["view"] == "default"]
    rows = rows.assign(found=~rows["outcome"].isin(PASSES), different=rows["outcome"] == "DIFFERENT")
    cells = rows[["name", "world", "begins", "strength"]].apply(tuple, axis=1)
    idle = set(cells[~rows["found"] & (rows["acts"].astype(str) == "False")])
    rows = rows[~cells.isin(idle)]
    rows["placed"] = [stage in stages.split() for stage, stages in zip(rows["stage"], rows["stages"], strict=True)]
    faulty = rows[rows["kind"] == "faulty"].groupby(["begins", "world", "strength", "part"], sort=True)
    told = [
        (*name, share(own["found"]), least(own["found"]), own["different"].sum(), share(own[own["found"]]["placed"]))
        for name, own in faulty
    ]
    head = ["begins", "training", "strength", "part", "found", "at least", "DIFFERENT", "stage right"]
    yield markdown_table(head, told)
    clean = rows[rows["kind"] == "clean"].groupby("world", sort=False)
    counts = [(world, len(own), own["group"].nunique(), *map(own["outcome"].eq, OUTCOMES)) for world, own in clean]
    yield markdown_table(
        ["training", "pairs", "groups", *OUTCOMES], [(*each[:3], *(of.sum() for of in each[3:])) for each in counts]
    )


OUTCOMES = ("EQUAL", "EQUIVALENT", "UNDECIDED", "DIFFERENT")


def share(hits: pd.Series) -> str:
    return f"{hits.sum()} of {len(hits)} ({100 * hits.mean():.1f} %)" if len(hits) else "none"


def least(hits: pd.Series) -> str:
    """Lower one-sided 95 % bound of a rate (Clopper and Pearson 1934)."""
    return f"{100 * interval(int(hits.sum()), len(hits), 0.1)[0]:.1f} %"


def train(chosen: Sequence[WholePair], cells: Mapping[tuple[str, ...], Cell], store: Store) -> None:
    halved = {cells[pair.arm].signature for pair in chosen if pair.resumes}
    missing = [cell for cell in {cell.signature: cell for cell in cells.values()}.values() if not _is_done(store, cell)]
    missing.sort(key=lambda cell: cell.typed.mesh.world_size)
    for begin in range(0, len(missing), TOGETHER):
        _make(missing[begin : begin + TOGETHER], halved, store)
        done = min(begin + TOGETHER, len(missing))
        print(f"{done} of {len(missing)} runs, {_cpu_seconds():.0f} CPU seconds", flush=True)


def _is_done(store: Store, cell: Cell) -> bool:
    state = status.effective(store.path_of(cell))
    return state is not None and state.state in (State.done, State.failed)


def _make(batch: Sequence[Cell], halved: set[str], store: Store) -> None:
    """Runs that fail together are made one by one, and the one at fault is left failed."""
    try:
        short.trained({cell.signature: cell for cell in batch}, halved, store, PREEMPT_AT)
    except RankFailed as error:
        for cell in batch if len(batch) > 1 else ():
            _make([cell], halved, store)
        if len(batch) == 1:
            run = RunDir(store.path_of(batch[0]))
            status.move(run.path, run.attempts()[-1], State.failed, "a rank failed")
            print(f"{run.path.name} failed: {str(error)[-500:]}", flush=True)


def judged(
    chosen: Sequence[WholePair], cells: Mapping[tuple[str, ...], Cell], root: Path
) -> Iterator[dict[str, object]]:
    for number, pair in enumerate(chosen, start=1):
        arm, control = (root / STUDY / directory_name(cells[each].config) for each in (pair.arm, pair.control))
        facts = {key: getattr(pair, key) for key in ("name", "world", "begins", "strength", "against", "group")}
        facts |= {"kind": pair.kind.value, "stage": corpus()[pair.name].stage if pair.kind is Kind.faulty else ""}
        acts = _acts(arm, control) if pair.against == "baseline" else ""
        for view in _views(pair):
            yield {**facts, "acts": acts, "view": view, **_seen(arm, control, view)}
        if number % 100 == 0:
            print(f"{number} of {len(chosen)} pairs, {_cpu_seconds():.0f} CPU seconds", flush=True)


def _views(pair: WholePair) -> tuple[str, ...]:
    if pair.kind is Kind.clean:  # which capture nothing more
        return ("default", "unwitnessed")
    return VIEWS if pair.strength == "full" else VIEWS[:1]


@lru_cache(maxsize=64)
def _record(path: Path) -> Record:
    return load(path)


@lru_cache(maxsize=256)
def _view(path: Path, view: str) -> Record:
    record = _record(path)
    if not view.startswith("full"):
        record = seen_at(record, SPREAD, SPREAD)
    return record.unwitnessed() if view.endswith("unwitnessed") else record


def seen_at(run: Record, captured: Collection[int], updated: Collection[int]) -> Record:
    """A run as it would be, had it captured no more than these steps, and the updates of those."""
    chosen = {"measure.capture_steps": sorted(captured), "measure.update_steps": sorted(updated)}
    return replace(
        run,
        config={**run.config, **chosen},
        captures={step: each for step, each in run.captures.items() if step in captured},
        updates={step: each for step, each in run.updates.items() if step in updated},
        witnesses={step: each for step, each in run.witnesses.items() if step in captured},
        weights={step: each for step, each in run.weights.items() if step in updated},
        moments={step: each for step, each in run.moments.items() if step in updated},
        final=None,
    )


def _seen(arm: Path, control: Path, view: str) -> dict[str, object]:
    verdict = judge(_view(arm, view), _view(control, view))
    first = next((finding for finding in verdict.findings if finding.grade is not Grade.ok), None)
    if first is None:
        return {"outcome": verdict.outcome.value}
    stages = " ".join(stage.value for stage in first.stages)
    return {"outcome": verdict.outcome.value, "step": first.step, "stages": stages, "check": first.check}


def _acts(arm: Path, baseline: Path) -> bool:
    """True if a faulty run has other losses, norms or weights than its baseline."""
    left, right = _record(arm), _record(baseline)
    return left.columns != right.columns or left.summary.get("final_weights") != right.summary.get("final_weights")


def _cpu_seconds() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
