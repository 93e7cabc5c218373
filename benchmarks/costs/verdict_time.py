"""Processor time and memory of commands that read many runs, and of the largest plan. Writes data/verdict_time.json.

    python benchmarks/costs/verdict_time.py

Whole commands in fresh processes. `compare`: two runs of 1,000 steps. `verdict`: a study of 12 arms and 5 seeds against
a control of 5 seeds, 200 steps each. `verdict, 2,000 cells` is of short runs whose sketches alone speak for them
(measure=light), in 5 seeds and with margins; `load.runs` reads them into a table. `verdict, 100 cells captured` is of
runs as they are by default. `plan` is of 70B weights on 16,384 ranks.

The records are those of three short real runs of the tiny model (a control by DDP, a clean arm, one with a fault) with
gradients, witnesses and updates of three steps. Last lines are repeated to the wanted length; a study's runs are copies
under other seeds and prefetch depths. Processor time is of all processes; memory is the largest process's.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.pages import tables
from harness.config.compose import Cell
from harness.store import checksums
from harness.store.identity import directory_name, signature
from harness.store.metrics import encode
from harness.store.reading_yaml import Loader
from harness.store.rundir import Dumper
from harness.store.study import write_study

OUTPUT = "verdict_time.json"
SHORT, LONG, STUDY_STEPS = 12, 1000, 200
SEEDS, ARMS, CELLS, CAPTURED = 5, 12, 2000, 100
REPETITIONS = 3
TABLE = f"import sys; from harness.analysis import load; assert len(load.runs(sys.argv[1], 'cells')) == {CELLS}"
BATCH = ("data.seq_len=32", "train.global_batch_size=8", "train.microbatch_size=2")
CELL = (f"train.steps={SHORT}", "train.schedule=constant", "ckpt=none", *BATCH)
CAPTURING = ("measure.capture_steps=[1,2,3]", "measure.update_steps=[1,2,3]")
KINDS = {
    "control": ("engine=ddp",),
    "clean": ("sharding=optim_grads",),
    "faulty": ("sharding=optim_grads", "fault.name=tests.faults.sums:F12_boundary_resets"),
}
LARGEST = (
    *("model=llama_70b", "model.num_layers=80", "model.vocab_size=128256", "model.max_seq_len=8192", "data=synthetic"),
    *("model.activation_checkpointing=true", "dtype=bf16", "cluster=slurm", "cluster.device=cuda", "data.seq_len=8192"),
    *("mesh.world_size=16384", "mesh.tp=8", "sharding=hsdp", "mesh.dp_outer=32", "cluster.nodes=2048"),
    *("data.num_sequences=32768", "train.global_batch_size=2048", "train.microbatch_size=1", "cluster.gpus_per_node=8"),
)
# Linux counts a starter's memory as that of what it starts (`exec` keeps the peak): a small process starts the command.
STARTER = """
import json, resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=sys.stderr).returncode
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([code, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6]))
"""


def real_runs(root: Path, study: str, *more: str) -> dict[str, Path]:
    found = {}
    for name, words in KINDS.items():
        command = [sys.executable, "run.py", *CELL, *words, *more, f"study.name={study}_{name}", f"launch.root={root}"]
        subprocess.run(command, cwd=tables.ROOT, check=True, stdout=subprocess.DEVNULL)
        found[name] = next((root / f"{study}_{name}").glob("*/config.yaml")).parent
    return found


def extended(source: Path, root: Path, study: str, steps: int, **changes: dict[str, Any]) -> Cell:
    """Copy of a run that has so many steps and other settings."""
    config = yaml.load((source / "config.yaml").read_text(encoding="utf-8"), Loader=Loader)
    config["train"]["steps"], config["study"]["name"] = steps, study
    for group, settings in changes.items():
        config[group].update(settings)
    target = root / study / directory_name(config)
    shutil.copytree(source, target, copy_function=_link_captures)
    (target / "config.yaml").write_text(yaml.dump(config, Dumper=Dumper, sort_keys=False), encoding="utf-8")
    lines = [json.loads(line) for line in (source / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    lines += [{**lines[-1], "step": step} for step in range(len(lines) + 1, steps + 1)]
    (target / "metrics.jsonl").write_text("".join(encode(line) + "\n" for line in lines), encoding="utf-8")
    checksums.renew(target)
    return Cell(config, ())


def _link_captures(source: str, target: str) -> None:
    (os.link if source.endswith(".safetensors") else shutil.copy2)(source, target)


def make_study(root: Path, study: str, runs: dict[str, Path], steps: int, seeds: int, kinds: Sequence[str]) -> None:
    """A control in so many seeds, and an arm of each kind against each of them."""
    cells, controls = [], {}
    for seed in range(seeds):
        control = extended(runs["control"], root, study, steps, train={"seed": seed})
        cells.append(control)
        for depth, kind in enumerate(kinds):
            cells.append(extended(runs[kind], root, study, steps, train={"seed": seed}, engine={"prefetch": depth}))
            controls[signature(cells[-1].config)] = signature(control.config)
    margins = {"loss": 1e-3, "grad_norm": 0.05} if seeds > 1 else {}
    for cell in cells:
        cell.config["study"].update(question="How long?", margins=margins)
    write_study(root, cells, controls)


def timed(expected: int, *words: str) -> dict[str, Any]:
    """Medians of Python with these words, and the spread of its processor time."""
    seconds, megabytes = [], []
    for _ in range(REPETITIONS):
        command = [sys.executable, "-S", "-c", STARTER, sys.executable, *words]
        done = subprocess.run(command, cwd=tables.ROOT, capture_output=True, text=True, check=True)
        code, took, most = json.loads(done.stdout)
        if code != expected:
            raise RuntimeError(f"exit code {code}, not {expected}:\n{done.stderr}")
        seconds.append(took)
        megabytes.append(most)
    spread = {
        name: round(of(seconds), 2) for name, of in (("median", statistics.median), ("least", min), ("most", max))
    }
    answer = done.stderr.partition("\n")[0].split(":")[0]
    return {"answer": answer, "processor_s": spread, "megabytes": round(max(megabytes))}


def of_compare(root: Path) -> dict[str, Any]:
    for name, run in real_runs(root, "short", *CAPTURING).items():
        extended(run, root, name, LONG)
    clean, control, faulty = (str(next((root / name).iterdir())) for name in ("clean", "control", "faulty"))
    return {
        "compare, EQUIVALENT": timed(0, "-m", "harness", "compare", clean, control),
        "compare, DIFFERENT": timed(1, "-m", "harness", "compare", faulty, control),
    }


def verdict_on(root: Path, study: str, expected: int = 0) -> dict[str, Any]:
    return timed(expected, "-m", "harness", "verdict", study, "--root", str(root))


def of_study(root: Path) -> dict[str, Any]:
    runs = real_runs(root, "timed", *CAPTURING)
    make_study(root, "study", runs, STUDY_STEPS, SEEDS, [*["clean"] * (ARMS - 1), "faulty"])
    return {"verdict": verdict_on(root, "study", 1)}


def of_cells(root: Path) -> dict[str, Any]:
    make_study(root, "cells", real_runs(root, "light", "measure=light"), SHORT, SEEDS, ["clean"] * (CELLS // SEEDS - 1))
    return {
        "verdict, 2,000 cells": verdict_on(root, "cells"),
        "load.runs, 2,000 runs": timed(0, "-c", TABLE, str(root)),
    }


def of_captured(root: Path) -> dict[str, Any]:
    make_study(root, "captured", real_runs(root, "default"), SHORT, 1, ["clean"] * (CAPTURED - 1))
    return {"verdict, 100 cells captured": verdict_on(root, "captured")}


def of_plan(_: Path) -> dict[str, Any]:
    return {"plan, 16,384 ranks": timed(0, "-P", "-m", "harness", "plan", *LARGEST)}


def main() -> None:
    before, commands = os.getloadavg()[0], dict[str, Any]()
    for part in (of_compare, of_study, of_cells, of_captured, of_plan):
        with tempfile.TemporaryDirectory() as folder:
            commands |= part(Path(folder))
    facts = {
        "repetitions": REPETITIONS,
        "commands": commands,
        "versions": tables.versions("numpy", "scipy", "pandas"),
        "cores": os.cpu_count(),
        "load_average": {"before": before, "after": os.getloadavg()[0]},
    }
    tables.write(OUTPUT, facts)
    print(json.dumps(commands, indent=1))


if __name__ == "__main__":
    main()
