"""How long a verdict takes, as a user types it, and the table of a thousand runs. Writes data/verdict_time.json.

    python benchmarks/costs/verdict_time.py [--only NAME]

Whole commands in fresh processes: `compare` of two runs of 1,000 steps, and `verdict` of a study of 12 arms and 5 seeds
against a control of 5 seeds, 200 steps each. The records are those of three short real runs of the tiny model (a
control by DDP, a clean arm, one with a fault) with gradients, witnesses and updates of three steps. Their last lines
are repeated to the length that is wanted, and the study's runs are copies under other seeds and prefetch depths,
captures as hard links. `verdict, 1,000 cells` is of runs whose sketches alone
speak for them (measure=light), `verdict, 100 cells captured` of runs as they are by default; `load.runs` reads the
thousand into a table. Processor time is user's and system's, of all threads; other processes on the machine take the
clock's seconds, not these.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.pages import tables
from harness.store import checksums
from harness.store.identity import directory_name, signature
from harness.store.metrics import encode
from harness.store.reading import Loader
from harness.store.rundir import Dumper
from harness.store.study import write_study

OUTPUT = "verdict_time.json"
SHORT, LONG, STUDY_STEPS = 12, 1000, 200
CELLS, CAPTURED = 1000, 100
ARMS, SEEDS = 12, 5
REPETITIONS = {"compare": 7, "verdict": 5, "cells": 3}
LIMITS = {"compare": 2.0, "verdict": 20.0, "verdict, 1,000 cells": 10.0, "load.runs, 1,000 runs": 2.0}
TABLE = "import sys; from harness.analysis import load; assert len(load.runs(sys.argv[1], 'cells')) == 1000"
CELL = (
    f"train.steps={SHORT}",
    "train.schedule=constant",
    "data.seq_len=32",
    "train.global_batch_size=8",
    "train.microbatch_size=2",
    "measure.capture_steps=[1,2,3]",
    "measure.update_steps=[1,2,3]",
    "ckpt=none",
)
KINDS = {
    "control": ("engine=ddp",),
    "clean": ("sharding=optim_grads",),
    "faulty": ("sharding=optim_grads", "fault.name=tests.faults.sums:F12_boundary_resets"),
}


@dataclass(frozen=True)
class Copied:
    """A run made of another, as a cell of a study."""

    config: dict[str, Any]
    overrides: tuple[str, ...] = ()


def real_run(root: Path, name: str, study: str = "", *more: str) -> Path:
    """Train one cell; its directory."""
    own = [word for word in CELL if not more or not word.startswith("measure.")]
    command = [sys.executable, "run.py", *own, *KINDS[name], *more, f"study.name={study or name}"]
    subprocess.run([*command, f"launch.root={root}"], cwd=tables.ROOT, check=True, stdout=subprocess.DEVNULL)
    return next((root / (study or name)).glob("*/config.yaml")).parent


def extended(source: Path, root: Path, study: str, steps: int, **changes: dict[str, Any]) -> Copied:
    """Write a copy of a run that has so many steps and other settings."""
    config = yaml.load((source / "config.yaml").read_text(encoding="utf-8"), Loader=Loader)
    config["train"]["steps"], config["study"]["name"] = steps, study
    for group, settings in changes.items():
        config[group].update(settings)
    target = root / study / directory_name(config)
    shutil.copytree(source, target, copy_function=link_captures)
    (target / "config.yaml").write_text(yaml.dump(config, Dumper=Dumper, sort_keys=False), encoding="utf-8")
    lines = [json.loads(line) for line in (source / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    lines += [{**lines[-1], "step": step} for step in range(len(lines) + 1, steps + 1)]
    (target / "metrics.jsonl").write_text("".join(encode(line) + "\n" for line in lines), encoding="utf-8")
    checksums.renew(target)
    return Copied(config)


def link_captures(source: str, target: str) -> None:
    """Copy a file, or link it where it is large and never written to."""
    (os.link if source.endswith(".safetensors") else shutil.copy2)(source, target)


def make_study(runs: dict[str, Path], root: Path) -> None:
    """Twelve arms, the last of them faulty, and a control, each with five seeds."""
    cells, controls = [], {}
    for seed in range(SEEDS):
        control = extended(runs["control"], root, "timed", STUDY_STEPS, train={"seed": seed})
        cells.append(control)
        for arm in range(ARMS):
            kind = "faulty" if arm == ARMS - 1 else "clean"
            changes: dict[str, Any] = {"train": {"seed": seed}, "engine": {"prefetch": arm}}
            cells.append(extended(runs[kind], root, "timed", STUDY_STEPS, **changes))
            controls[signature(cells[-1].config)] = signature(control.config)
    for cell in cells:
        cell.config["study"].update(question="How long?", margins={"loss": 1e-3, "grad_norm": 0.05})
    write_study(root, cells, controls)


def many(root: Path, study: str, count: int, measure: str) -> None:
    """A study of so many cells against one control, each a copy of one real run under a depth of its own."""
    runs = {name: real_run(root, name, f"{study}_{name}", f"measure={measure}") for name in ("control", "clean")}
    control = extended(runs["control"], root, study, SHORT)
    arms = [extended(runs["clean"], root, study, SHORT, engine={"prefetch": depth}) for depth in range(count - 1)]
    controls = {signature(arm.config): signature(control.config) for arm in arms}
    for cell in (control, *arms):
        cell.config["study"].update(question="How long?", margins={})
    write_study(root, [control, *arms], controls)


VERB = ("-m", "harness")


def timed(repetitions: int, expected: int, *words: str) -> dict[str, Any]:
    """Seconds of Python with these words: the median of its repetitions, and their spread."""
    found: dict[str, list[float]] = {"wall_s": [], "processor_s": []}
    command = [sys.executable, *words]
    for _ in range(repetitions):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(command, cwd=tables.ROOT, capture_output=True, text=True)
        found["wall_s"].append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found["processor_s"].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if done.returncode != expected:
            raise RuntimeError(f"exit code {done.returncode}, not {expected}:\n{done.stdout}\n{done.stderr}")
    return {"repetitions": repetitions, "answer": done.stdout.split(":")[0]} | {
        key: {name: round(of(each), 2) for name, of in (("median", statistics.median), ("least", min), ("most", max))}
        for key, each in found.items()
    }


def of_many(root: Path) -> dict[str, Any]:
    """Verdicts on many short runs."""
    many(root, "cells", CELLS, "light")
    many(root, "captured", CAPTURED, "default")
    count = REPETITIONS["cells"]
    return {
        "verdict, 1,000 cells": timed(count, 0, *VERB, "verdict", "cells", "--root", str(root)),
        "load.runs, 1,000 runs": timed(count, 0, "-c", TABLE, str(root)),
        "verdict, 100 cells captured": timed(count, 0, *VERB, "verdict", "captured", "--root", str(root)),
    }


def measure(root: Path) -> dict[str, Any]:
    """Every command on long runs."""
    runs = {name: real_run(root, name) for name in KINDS}
    for name, run in runs.items():
        extended(run, root, f"long_{name}", LONG)
    long = {name: next((root / f"long_{name}").iterdir()) for name in runs}
    make_study(runs, root)
    count = REPETITIONS["compare"]
    return {
        "compare, EQUIVALENT": timed(count, 0, *VERB, "compare", str(long["clean"]), str(long["control"])),
        "compare, DIFFERENT": timed(count, 1, *VERB, "compare", str(long["faulty"]), str(long["control"])),
        "verdict": timed(REPETITIONS["verdict"], 1, *VERB, "verdict", "timed", "--root", str(root)),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=("long", "many"), help="keep the figures of the others")
    only = parser.parse_args().only
    before = os.getloadavg()[0]
    commands = tables.read(OUTPUT)["commands"] if only else {}
    with tempfile.TemporaryDirectory() as folder:
        for name, part in (("long", measure), ("many", of_many)):
            if only in (None, name):
                commands |= part(Path(folder))
    facts = {
        "unit": "s",
        "limits_s": LIMITS,
        "records": {
            "kind": "real runs of the tiny model, their last line repeated; captures are hard links",
            "compare_steps": LONG,
            "study": {"arms": ARMS, "seeds": SEEDS, "controls": SEEDS, "steps": STUDY_STEPS, "faulty_arms": 1},
            "captured_steps": [1, 2, 3],
            "many": {"steps": SHORT, "cells": CELLS, "cells captured by default": CAPTURED},
        },
        "commands": commands,
        "versions": tables.versions("numpy", "scipy", "pandas"),
        "cores": os.cpu_count(),
        "load_average": {"before": before, "after": os.getloadavg()[0]},
    }
    tables.write(OUTPUT, facts)
    print(json.dumps(commands, indent=1))


if __name__ == "__main__":
    main()
