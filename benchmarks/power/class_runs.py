"""Make the runs of `benchmarks.power.classes`, see how strong its faults are, judge them once, and say what was found.

    python benchmarks/power/class_runs.py strength                writes data/power_strength.csv
    python benchmarks/power/class_runs.py train    --root DIR [--kind clean]
    python benchmarks/power/class_runs.py judge    --root DIR --out FILE.csv
    python benchmarks/power/class_runs.py table    --out FILE.csv

Ranks are forked once for many runs (tests/study/short.py), so that a run costs its steps and no start. What is there is
not made again: the same command takes up a campaign that was broken off.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from benchmarks.pages.tables import markdown_table
from benchmarks.power import classes
from benchmarks.power.classes import ClassPair
from benchmarks.power.steps import PASSES, compose_all
from harness.analysis.judge import interval
from harness.config.compose import Cell
from harness.config.schema import Config
from harness.parity.compare import judge
from harness.parity.record import load
from harness.probe.step_checks.pieces import local_part
from harness.store import status
from harness.store.identity import directory_name
from harness.store.rundir import RunDir, Store
from harness.store.status import State
from tests.faults.corpus import corpus
from tests.study import short
from tests.support.factory import train as train_once
from tests.support.spawn import RankFailed, run_ranks

DATA = Path(__file__).resolve().parents[1] / "data" / "power_classes.csv"
STRENGTH = DATA.with_name("power_strength.csv")

BEGINS = 3
"""The step at which faults begin where their strength is seen."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("verb", choices=("strength", "train", "judge", "table"))
    parser.add_argument("--root", type=Path, default=Path("runs"), help="where the runs are (default: runs)")
    parser.add_argument("--kind", default="", help="classes, or clean, separated by commas (default: all)")
    parser.add_argument("--out", type=Path, help=f"table (default: {DATA.name}, of strength {STRENGTH.name})")
    arguments = parser.parse_args()
    arguments.out = arguments.out or (STRENGTH if arguments.verb == "strength" else DATA)
    if arguments.verb == "table":
        print("\n\n".join(tables(pd.read_csv(arguments.out, keep_default_na=False))))
        return 0
    if arguments.verb == "strength":
        pd.DataFrame(strengths(arguments.root)).to_csv(arguments.out, index=False)
        return 0
    pairs, kinds = [*classes.faulty(), *classes.clean()], arguments.kind.split(",")
    chosen = [pair for pair in pairs if kinds == [""] or pair.kind in kinds]
    cells = compose_all((e for pair in chosen for e in (pair.arm, pair.control)), (f"launch.root={arguments.root}",))
    if arguments.verb == "train":
        train(chosen, cells, Store(arguments.root))
    else:
        rows = pd.DataFrame(judged(chosen, cells, arguments.root))
        rows[rows["outcome"] != NOT_MADE].drop(columns="sentence").to_csv(arguments.out, index=False)
    return 0


# -- runs --------------------------------------------------------------------------------------------------------------

TOGETHER = 24
"""Runs that ranks make before they end: what a campaign that is broken off loses at most."""


def train(chosen: Sequence[ClassPair], cells: Mapping[tuple[str, ...], Cell], store: Store) -> None:
    halved = {cells[pair.arm].signature for pair in chosen if pair.resumes}
    missing = [cell for cell in {cell.signature: cell for cell in cells.values()}.values() if not _is_made(store, cell)]
    missing.sort(key=lambda cell: cell.typed.mesh.world_size)
    for begin in range(0, len(missing), TOGETHER):
        _make(missing[begin : begin + TOGETHER], halved, store)
        print(f"{min(begin + TOGETHER, len(missing))} of {len(missing)} runs", flush=True)


def _is_made(store: Store, cell: Cell) -> bool:
    state = status.effective(store.path_of(cell))
    return state is not None and state.state in (State.done, State.failed)


def _make(batch: Sequence[Cell], halved: set[str], store: Store) -> None:
    """Runs that fail together are made one by one, and the one at fault is left failed."""
    try:
        short.trained({cell.signature: cell for cell in batch}, halved, store, classes.PREEMPT_AT)
    except RankFailed as error:
        for cell in batch if len(batch) > 1 else ():
            _make([cell], halved, store)
        if len(batch) == 1:
            run = RunDir(store.path_of(batch[0]))
            status.move(run.path, run.attempts()[-1], State.failed, "a rank failed")
            print(f"{run.path.name} failed: {str(error)[-500:]}", flush=True)


# -- verdicts ----------------------------------------------------------------------------------------------------------

STAGES = [*("data", "weights", "gather", "forward", "gradient", "reduction", "clipping", "optimizer"), "checkpoint"]
"""In the order of a step."""
CLAIM = re.compile(r"at steps? (?P<step>[0-9]+)|\((?:between (?P<first>[a-z]+) and )?(?P<last>[a-z]+)[,)]")
BEGUN = re.compile(r"; begun (?:after step (?P<after>[0-9]+)|at any step so far)")
"""Of an interval of steps, up to the one that is named."""
_record = lru_cache(maxsize=96)(load)


def judged(
    chosen: Sequence[ClassPair], cells: Mapping[tuple[str, ...], Cell], root: Path
) -> Iterator[dict[str, object]]:
    for pair in chosen:
        arm, control = (root / classes.STUDY / directory_name(cells[each].config) for each in (pair.arm, pair.control))
        row = {"kind": pair.kind, "name": pair.name, "world": pair.world, "against": pair.against, "step": pair.step}
        states = [status.effective(run) for run in (arm, control)]
        if any(state is None or state.state is not State.done for state in states):
            yield {**row, "outcome": NOT_MADE}
            continue
        left, right = _record(arm), _record(control)
        verdict = judge(left, right)
        if pair.kind not in ("clean", "peer"):
            row |= {"stage": corpus()[pair.name].stage}
        if pair.against == "twin":
            key = "final_weights"
            row |= {"acts": left.columns != right.columns or left.summary.get(key) != right.summary.get(key)}
        row |= {"outcome": verdict.outcome.value, "sentence": verdict.sentence}
        yield row | claimed(verdict.sentence, control)


def claimed(sentence: str, control: Path) -> dict[str, object]:
    """What a sentence says of the arm: its first step, all that it names in one clause, stages; whether of every step.

    A clause about the control is passed over where another one follows: megatron-fsdp's Adam explains itself.
    """
    first, *besides = sentence.split("; and besides, ")
    own = [first, *besides] if f"; in {control.parent.name}/{control.name}" not in first else besides
    found = list(CLAIM.finditer(own[0])) if own else []
    steps = [int(each["step"]) for each in found if each["step"]]
    if own and steps and (began := BEGUN.search(own[0])):
        steps += range(int(began["after"] or 0) + 1, steps[-1])
    stages = set[str]()
    for each in found:
        first_stage, last = each["first"] or each["last"], each["last"]
        if last in STAGES and first_stage in STAGES:
            stages |= {*STAGES[STAGES.index(first_stage) : STAGES.index(last) + 1]}
    told = {"claimed": bool(own and steps), "steps": " ".join(map(str, steps)), "stages": " ".join(sorted(stages))}
    return told | {"every": "at every step" in sentence}


# -- tables ------------------------------------------------------------------------------------------------------------


def tables(rows: pd.DataFrame, found: Sequence[str] = ("DIFFERENT", "UNDECIDED")) -> Iterator[str]:
    """By class and kind of training, by control, and of clean pairs. Rates have one-sided 95 % bounds."""
    idle = set(rows[rows["acts"].astype(str) == "False"][KEY].apply(tuple, axis=1))
    faulty = rows[~rows["kind"].isin(("clean", "peer")) & ~rows[KEY].apply(tuple, axis=1).isin(idle)]
    faulty = faulty.assign(
        found=(faulty["claimed"].astype(str) == "True") & faulty["outcome"].isin(found),
        placed=[stage in str(stages).split() for stage, stages in zip(faulty["stage"], faulty["stages"], strict=True)],
        begun=[str(step) in str(steps).split() for step, steps in zip(faulty["step"], faulty["steps"], strict=True)],
    )
    for by in (["kind", "world"], ["kind", "against"]):
        told = [
            (*name, share(own["found"]), least(own["found"]), (own["outcome"] == "DIFFERENT").sum(),
             share(own[own["found"]]["placed"]), share(own[own["found"]]["begun"]))
            for name, own in faulty.groupby(by, sort=False)
        ]  # fmt: skip
        head = ["class", "training" if by[1] == "world" else "control", "found", "at least", "DIFFERENT"]
        yield markdown_table([*head, "stage right or stated", "step right or stated"], told)
    missed = faulty[~faulty["found"]][[*KEY, "against", "outcome", "every"]]
    yield markdown_table([*missed.columns], missed.itertuples(index=False))
    clean = rows[rows["kind"].isin(("clean", "peer"))].groupby(["kind", "world"], sort=False)
    counts = [(*name, len(own), *(own["outcome"].eq(each).sum() for each in OUTCOMES)) for name, own in clean]
    yield markdown_table(["pairs", "training", "all", *OUTCOMES], counts)


def share(hits: pd.Series) -> str:
    return f"{hits.sum()} of {len(hits)} ({100 * hits.mean():.1f} %)" if len(hits) else "none"


def least(hits: pd.Series) -> str:
    """Lower one-sided 95 % bound of a rate (Clopper and Pearson 1934)."""
    return f"{100 * interval(int(hits.sum()), len(hits), 0.1)[0]:.1f} %"


OUTCOMES = (*PASSES, "UNDECIDED", "DIFFERENT")
KEY = ["kind", "name", "world"]
NOT_MADE = "not made"
"""For a pair of which there was no time to make a run."""


# -- strength ----------------------------------------------------------------------------------------------------------


@dataclass
class Kept:
    """An engine of which the tensors of one step are kept, as whoever calls it sees them."""

    engine: Any
    tensors: dict[str, Tensor]
    step_: int = 1
    losses: list[Tensor] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def forward_backward(self, batch: Any, *, last: bool) -> Tensor:
        loss: Tensor = self.engine.forward_backward(batch, last=last)
        self.losses.append(loss.clone())
        return loss

    def step(self, lr: float) -> float:
        self.engine.finish_gradients()
        gradients = {f"gradient/{name}": each.clone() for name, each in self.engine.local_gradients().items()}
        before = {f"before/{key}": local_part(each).clone() for key, each in self.engine.state().tensors.items()}
        norm: float = self.engine.step(lr)
        if self.step_ == BEGINS:
            after = {f"state/{key}": local_part(each).clone() for key, each in self.engine.state().tensors.items()}
            scalars = {"loss": torch.stack(self.losses).mean(), "norm": torch.tensor(norm, dtype=torch.float64)}
            self.tensors |= gradients | before | after | scalars
        self.losses, self.step_ = [], self.step_ + 1
        return norm


def kept(rank: int, jobs: Sequence[tuple[Path, Config]]) -> list[float]:
    """The movement of each job's step `BEGINS` from that of the job before it that has no fault, in tenfold bounds."""
    found, clean = [], dict[str, Tensor]()
    for path, config in jobs:
        tensors: dict[str, Tensor] = {}
        with short.functions_given_back():
            train_once(config, path, rank, wrap_engine=lambda engine, tensors=tensors: Kept(engine, tensors))
        if config.fault.name == "none":
            clean = tensors
        found.append(max(_moved(key, tensors, clean) for key in tensors))
    return found


def _moved(key: str, tensors: Mapping[str, Tensor], clean: Mapping[str, Tensor]) -> float:
    """How far one tensor is from the clean one, in what full strength asks; see [Note: Full strength]."""
    difference, size = (tensors[key] - clean[key]).double().norm(), clean[key].double().norm()
    if key.startswith("state/") and not key.startswith("state/optimizer"):
        update = (clean[key] - clean["before" + key.removeprefix("state")]).norm()
        return float(difference / update.clamp(min=1e-30)) / 1e-4
    return float(difference / size.clamp(min=1e-30)) / 4e-6


def strengths(root: Path) -> Iterator[dict[str, object]]:
    faults = [each for each in corpus().values() if each.edition == classes.EDITION and not each.resumes]
    extra = (*classes.OWN, "dtype=fp64", "train.steps=4", "measure.step_checks=false", "measure.capture_steps=[]")
    jobs: dict[str, tuple[str, ...]] = {}
    for own in dict.fromkeys(fault.cell for fault in faults):
        twin = classes.cell("fp32", *extra, *own)
        jobs[" ".join(own)] = twin
        alike = [fault for fault in faults if fault.cell == own]
        jobs |= {f.name: (*twin, f"fault.name={f.target}_once", f"fault.begins_at={BEGINS}") for f in alike}
    cells = compose_all(jobs.values())
    made = [(root / "strength" / str(number), cells[each].typed) for number, each in enumerate(jobs.values())]
    for name, *moved in zip(jobs, *run_ranks(kept, 2, made), strict=True):
        yield {"name": name, "moved": max(moved)}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
