"""The power of verdicts on loops that are not this harness's: faults of the corpus put into them, and clean pairs.

    python benchmarks/power/foreign.py train --root DIR
    python benchmarks/power/foreign.py judge --root DIR     writes data/power_foreign_corpus.csv
    python benchmarks/power/foreign.py table

Loops by hand (tests/capture/corpus_loops.py) of the corpus' own model, under torch's DDP and FSDP2 and DeepSpeed's
ZeRO-2, watched by `harness.capture`: tensors whole at steps 1 and 10 of 12, sketches at all. A fault has full strength,
as the corpus says it. It acts from step `LATE` on (`late`), its twin in step `ONCE` alone (`once`); or where
a run is resumed behind step `PREEMPT_AT`, or at its end. Each faulty run is held against the same loop without the
fault (`twin`), another parallelism, and one process. A verdict finds a fault that is DIFFERENT or UNDECIDED by its own
clause, or NOT_COMPARABLE by what it names: data or a learning rate that are other ones at some step.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from benchmarks.pages.tables import markdown_table
from benchmarks.power import class_runs, classes
from benchmarks.power.steps import compose_all
from harness.config.compose import Cell
from harness.parity.compare import judge
from harness.parity.outcome import Grade, Outcome, Verdict
from harness.parity.record import load
from tests.capture.corpus_runs import trained
from tests.capture.loops import everywhere
from tests.faults.corpus import MUON, Fault, corpus
from tests.support.spawn import run_ranks

DATA = Path(__file__).resolve().parents[1] / "data" / "power_foreign_corpus.csv"
LATE, ONCE, PREEMPT_AT = 8, 9, classes.PREEMPT_AT
ONE = ("sharding=no_shard", "mesh.world_size=1", "train.microbatch_size=8")
LOOPS = {
    "fsdp2": ("sharding=optim_grads_params",),
    "ddp": ("sharding=no_shard",),
    "zero_2": ("sharding=optim_grads",),
}
CONTROLS = {"fsdp2": "ddp", "ddp": "fsdp2", "zero_2": "fsdp2"}
"""Beside the twin and one process."""
ARMS = {
    "single": ("single", *ONE),
    "ddp": ("ddp", *LOOPS["ddp"]),
    "ddp k=2": ("ddp", *LOOPS["ddp"], "train.microbatch_size=2"),
    "ddp four": ("ddp", *LOOPS["ddp"], "mesh.world_size=4", "train.microbatch_size=2"),
    "fsdp2": ("fsdp2", *LOOPS["fsdp2"]),
    "fsdp2 k=2": ("fsdp2", *LOOPS["fsdp2"], "train.microbatch_size=2"),
    "fsdp2 four": ("fsdp2", *LOOPS["fsdp2"], "mesh.world_size=4", "train.microbatch_size=2"),
    "zero_2": ("zero_2", *LOOPS["zero_2"]),
    "zero_2 k=2": ("zero_2", *LOOPS["zero_2"], "train.microbatch_size=2"),
    "ours": ("ours", *LOOPS["fsdp2"]),
}
"""Of clean pairs: what must not matter. Loops, and overrides."""
SEEDS = {"fp32": (60, 61, 62), "sgd": (63,), "hot": (64, 65), "clipped": (66,), "long": (67,)}
NO_MEANING = {
    "F21_norm_of_one_rank": "of the norm that is logged: a watch takes that of what it sees",
    "F26_second_use_lost": "of a module that is used twice: this model has none",
    "F27_outer_finalize_wrong": "of a second data-parallel axis",
    "garbage_in_padding": "of what lies between parameters: these loops take the norm of parameters alone",
}


def no_meaning(fault: Fault, loop: str) -> str:
    """Why a loop cannot have a fault; empty if it can."""
    strategy = LOOPS[loop][0].partition("=")[2]
    for applies, reason in (
        (fault.name in NO_MEANING, NO_MEANING.get(fault.name, "")),
        (fault.recipes, "of 8-bit weights of our engine"),
        (fault.tensor_parallel, "of tensor parallelism"),
        (MUON in fault.cell, "of our engine's step of whole matrices"),
        (fault.stage == "gather" and loop == "ddp", "of gathered weights, which DDP has not"),
        (fault.strategies and strategy not in fault.strategies, f"of {' and '.join(fault.strategies)} alone"),
    ):
        if applies:
            return reason
    return ""


@dataclass(frozen=True)
class Job:
    loop: str
    overrides: tuple[str, ...]
    resumes: bool = False


class Pair(NamedTuple):
    kind: str
    name: str
    world: str
    """Kind of training of a clean pair, loop of a fault."""
    against: str
    step: int
    arm: Job
    control: Job


def faulty() -> Iterator[Pair]:
    for fault in corpus().values():
        own = [text for text in fault.cell if not text.startswith(("sharding=", "mesh"))]
        for loop in (each for each in LOOPS if not no_meaning(fault, each)):
            twin = {each: Job(each, classes.cell("fp32", *classes.OWN, *own, *cell)) for each, cell in LOOPS.items()}
            twin["single"] = Job("single", classes.cell("fp32", *classes.OWN, *own, *ONE))
            for kind in ("late", "once") if fault.edition == classes.EDITION and not fault.resumes else ("late",):
                step = LATE if kind == "late" else ONCE
                suffix, begins = "_once" * (kind == "once"), (f"fault.begins_at={step}",)
                if fault.resumes or fault.ends:
                    step, begins = (LATE if fault.resumes else classes.LAST), ()
                asked = (*twin[loop].overrides, f"fault.name={fault.target}{suffix}", *begins)
                arm = Job(loop, asked, fault.resumes)
                for against in ("twin", CONTROLS[loop], "single"):
                    yield Pair(kind, fault.name, loop, against, step, arm, twin[loop if against == "twin" else against])


def clean() -> Iterator[Pair]:
    for world, seeds in SEEDS.items():
        own = ("optimizer.clip_norm=0.1",) if world == "clipped" else ()
        for seed in seeds:
            made = {
                name: Job(loop, classes.cell("fp32" if own else world, f"train.seed={seed}", *own, *cell))
                for name, (loop, *cell) in ARMS.items()
            }
            for left, right in combinations(made, 2):
                yield Pair("clean", f"{left}, {right}, seed {seed}", world, "arm", 0, made[left], made[right])


def pairs() -> list[Pair]:
    return [*faulty(), *clean()]


def cells(root: Path, chosen: Sequence[Pair]) -> dict[Job, tuple[Path, Cell]]:
    """Where each run is, and what it is."""
    wanted = dict.fromkeys(job for pair in chosen for job in (pair.arm, pair.control))
    composed = compose_all(job.overrides for job in wanted)
    return {
        job: (root / "study" / f"{job.loop}-{composed[job.overrides].signature[:16]}{'-resumed' * job.resumes}",
              composed[job.overrides])
        for job in wanted
    }  # fmt: skip


def make(root: Path, chosen: Sequence[Pair]) -> None:
    """Make what is not there, 16 runs at once on ranks that are forked for them; one that fails is told and left."""
    alike: dict[int, list[tuple[Any, ...]]] = {}
    for job, (path, cell) in cells(root, chosen).items():
        if not (path / "summary.json").exists():
            shutil.rmtree(path, ignore_errors=True)
            arguments = (job.loop, path, cell.typed, PREEMPT_AT if job.resumes else 0)
            alike.setdefault(cell.typed.mesh.world_size, []).append((trained, arguments, {}))
    for ranks, jobs in alike.items():
        jobs.sort(key=lambda job: str(job[1][0]))  # DeepSpeed is imported by few processes
        for begin in range(0, len(jobs), 16):
            _together(ranks, jobs[begin : begin + 16])
            print(f"{min(begin + 16, len(jobs))} of {len(jobs)} runs of {ranks} ranks", flush=True)


def _together(ranks: int, jobs: list[tuple[Any, ...]]) -> None:
    try:
        run_ranks(everywhere, ranks, jobs, apart=True)
    except Exception as error:
        for job in jobs if len(jobs) > 1 else ():
            path = job[1][1]
            if not (path / "summary.json").exists():
                shutil.rmtree(path, ignore_errors=True)
                _together(ranks, [job])
        if len(jobs) == 1:
            print(f"{jobs[0][1][2].fault.name} on {jobs[0][1][0]} failed: {str(error)[-700:]}", flush=True)


_record = lru_cache(maxsize=96)(load)


def judged(root: Path, chosen: Sequence[Pair]) -> Iterator[dict[str, object]]:
    made = cells(root, chosen)
    for pair in chosen:
        row = {"kind": pair.kind, "name": pair.name, "world": pair.world, "against": pair.against, "step": pair.step}
        arm, control = made[pair.arm][0], made[pair.control][0]
        if not all((each / "summary.json").exists() for each in (arm, control)):
            yield {**row, "outcome": class_runs.NOT_MADE}
            continue
        left, right = _record(arm), _record(control)
        verdict = judge(left, right)
        if pair.kind != "clean":
            row |= {"stage": corpus()[pair.name].stage}
        if pair.against == "twin":
            key = "final_weights"
            row |= {"acts": left.columns != right.columns or left.summary.get(key) != right.summary.get(key)}
        yield {**row, "outcome": verdict.outcome.value, **told(verdict, control), "sentence": verdict.sentence}


def told(verdict: Verdict, control: Path) -> dict[str, object]:
    named = [each for each in verdict.findings if each.grade is Grade.bad and each.step]
    if verdict.outcome is Outcome.NOT_COMPARABLE and named:
        stages = " ".join(sorted(each.value for each in named[0].stages))
        return {"claimed": True, "steps": str(named[0].step), "stages": stages, "every": False}
    return class_runs.claimed(verdict.sentence, control)


FOUND = ("DIFFERENT", "UNDECIDED", "NOT_COMPARABLE")


def tables(rows: pd.DataFrame) -> Iterator[str]:
    by_loop, by_control, _, clean = class_runs.tables(rows, FOUND)
    yield from (by_loop, by_control, clean)
    faulty = rows[rows["kind"] != "clean"]
    missed = faulty[(faulty["claimed"].astype(str) != "True") | ~faulty["outcome"].isin(FOUND)]
    places = (
        (name, corpus()[name].does, ", ".join(f"{loop} against {' and '.join(dict.fromkeys(own['against']))}"
         for loop, own in each.groupby("world", sort=False)))
        for name, each in missed.groupby("name", sort=False)
    )  # fmt: skip
    yield markdown_table(["missed", "what it does", "where"], places)
    reasons: dict[str, dict[str, list[str]]] = {}
    for fault in corpus().values():
        for loop in LOOPS:
            if reason := no_meaning(fault, loop):
                reasons.setdefault(reason, {}).setdefault(fault.name, []).append(loop)
    named = {reason: (f"{name} ({', '.join(on)})" if len(on) < len(LOOPS) else name for name, on in each.items())
             for reason, each in reasons.items()}  # fmt: skip
    yield markdown_table(["no meaning, as it is", "faults, on all loops or these"],
                         ((reason, ", ".join(names)) for reason, names in named.items()))  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("verb", choices=("train", "judge", "table"))
    parser.add_argument("--root", type=Path, default=Path("runs/foreign"), help="where runs are (default: %(default)s)")
    chosen = parser.parse_args()
    if chosen.verb == "train":
        make(chosen.root, pairs())
    elif chosen.verb == "judge":
        rows = pd.DataFrame(judged(chosen.root, pairs()))
        rows[rows["outcome"] != class_runs.NOT_MADE].drop(columns="sentence").to_csv(DATA, index=False)
    else:
        print("\n\n".join(tables(pd.read_csv(DATA, keep_default_na=False))))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
