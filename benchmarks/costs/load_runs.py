"""How long `load.runs` takes for a thousand runs. Writes data/load_runs.json.

    python benchmarks/costs/load_runs.py

One real run of the tiny model, copied under a thousand seeds as a study with a control, judged as far as its record of
outcomes goes, and read in fresh processes. Processor time is user's and system's of the whole process, and of the call
alone; other processes on the machine take the clock's seconds, not these.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from benchmarks.costs.verdict_time import Copied
from harness.store import checksums, judged
from harness.store.identity import directory_name, signature
from harness.store.reading import Loader
from harness.store.rundir import Dumper
from harness.store.study import write_study

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "benchmarks" / "data" / "load_runs.json"
RUNS, STEPS, REPETITIONS, LIMIT_S = 1000, 50, 5, 2.0
CELL = (f"train.steps={STEPS}", "data.seq_len=32", "train.global_batch_size=8", "train.microbatch_size=2", "ckpt=none")
READ = """
import json, sys, time
from harness.analysis import load
begun = time.process_time()
runs = load.runs(sys.argv[1])
took = time.process_time() - begun
assert runs["verdict"].notna().sum() == len(runs) - 1, runs["verdict"].value_counts()
print(json.dumps({"runs": len(runs), "call_s": took, "process_s": time.process_time()}))
"""


def study_of(source: Path, root: Path) -> None:
    """A thousand copies of a run under other seeds: the first is the control of all."""
    config = yaml.load((source / "config.yaml").read_text(encoding="utf-8"), Loader=Loader)
    cells, paths = [], []
    for seed in range(RUNS):
        own = {**config, "train": {**config["train"], "seed": seed}, "study": {**config["study"], "name": "many"}}
        target = root / "many" / directory_name(own)
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("capture", "step_checks", "ckpt"))
        (target / "config.yaml").write_text(yaml.dump(own, Dumper=Dumper, sort_keys=False), encoding="utf-8")
        checksums.renew(target)
        cells.append(Copied(own))
        paths.append(target)
    first = signature(cells[0].config)
    write_study(root, cells, {signature(cell.config): first for cell in cells[1:]})
    judged.keep(root, "many", [(path, paths[0], "EQUIVALENT") for path in paths[1:]])


def measure(root: Path) -> list[dict[str, Any]]:
    """Processor seconds of each repetition."""
    command = [sys.executable, "run.py", *CELL, "study.name=one", f"launch.root={root}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    study_of(next((root / "one").glob("*/config.yaml")).parent, root)
    shutil.rmtree(root / "one")
    done = [
        subprocess.run([sys.executable, "-c", READ, str(root)], cwd=ROOT, check=True, capture_output=True, text=True)
        for _ in range(REPETITIONS)
    ]
    return [json.loads(each.stdout) for each in done]


def main() -> int:
    """Measure and write; 1 where the limit is passed."""
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    seconds = {
        key: {
            name: round(of([each[key] for each in found]), 3)
            for name, of in (("median", statistics.median), ("most", max))
        }
        for key in ("call_s", "process_s")
    }
    facts = {
        "unit": "s of processor time",
        "limit_s": LIMIT_S,
        "runs": RUNS,
        "steps_a_run": STEPS,
        "repetitions": REPETITIONS,
        **seconds,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("pandas", "PyYAML")}},
        "cores": os.cpu_count(),
    }
    OUTPUT.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(OUTPUT.read_text(encoding="utf-8"), end="")
    return int(facts["call_s"]["most"] > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
