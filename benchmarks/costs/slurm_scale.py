"""What a study of 1,000 cells costs on SLURM: asked for dry, frozen and submitted, then watched, shown and tidied up.

    python benchmarks/costs/slurm_scale.py        writes benchmarks/data/slurm_scale.json

A real slurmctld on this machine (tests/slurm/cluster.py) takes the jobs and holds them: its partition is down. A store
of 100 cells and one of 1,000 are measured alike, so that growth is told: bytes on disk, and each command's largest
memory. Seconds are processor seconds of the command and its children (user and system); wall seconds say little where
other processes run, and the load averages before and after say whether they did.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.slurm.cluster import Cluster, running

ROOT = Path(__file__).resolve().parents[2]

OUTPUT = ROOT / "benchmarks" / "data" / "slurm_scale.json"
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SIZES = (100, 1000)
PROMISED = {"dry_run": 60.0, "submit": 60.0, "watch": 2.0, "show": 2.0, "gc": 2.0}
"""Most processor seconds of a command over the larger store."""
GROWTH_MIB = 50.0
"""Most that a store, or a command's memory, may grow by from the smaller to the larger."""


def measured(command: list[str], folder: Path, environment: dict[str, str]) -> dict[str, float]:
    """Processor and wall seconds of a command, and its largest memory in MiB.

    Raises:
        RuntimeError: it failed.
    """
    began = time.perf_counter()
    with (folder / "out.txt").open("wb") as out:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT)
        _, code, usage = os.wait4(process.pid, 0)
    if code:
        raise RuntimeError(f"{command}: {(folder / 'out.txt').read_text()[-2000:]}")
    return {
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "wall_s": round(time.perf_counter() - began, 2),
        "rss_mib": round(usage.ru_maxrss / 1024, 1),
    }


def disk_mib(folder: Path) -> float:
    paths = [folder, *folder.rglob("*")]
    return round(sum(path.lstat().st_blocks for path in paths) * 512 / 2**20, 1)


def scale(cells: int, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    study = {"sharding": list(STRATEGIES), "train.seed": list(range(cells // len(STRATEGIES)))}
    (folder / "scale.yaml").write_text(json.dumps({"question": "does it scale?", "grid": study}))
    python, verb = sys.executable, [sys.executable, "-m", "harness"]
    ask = [python, str(ROOT / "run.py"), "-m", "study=./scale.yaml", "cluster=slurm"]
    found = {"dry_run": measured([*ask, "launch.dry_run=true"], folder, environment)}
    found["submit"] = measured(ask, folder, environment)
    runs = sorted((folder / "runs" / "scale").glob("*/status.json"))
    if len(runs) != cells:
        raise RuntimeError(f"{len(runs)} runs, not {cells}")
    found["submit_again"] = measured(ask, folder, environment)
    found["watch"] = measured([*verb, "watch", "scale", "--once"], folder, environment)
    if f"{cells} queued" not in (folder / "out.txt").read_text():
        raise RuntimeError((folder / "out.txt").read_text()[-500:])
    found["show"] = measured([*verb, "show", runs[-1].parent.name.rpartition("-")[2]], folder, environment)
    found["gc"] = measured([*verb, "gc"], folder, environment)
    return {"cells": cells, "commands": found, "disk_mib": disk_mib(folder / "runs")}


def main() -> int:
    """Measure and write; 1 if a promise is not kept."""
    before = os.getloadavg()[0]
    rows = []
    for cells in SIZES:
        folder = Path(tempfile.mkdtemp(prefix="scale-", dir="/tmp"))
        try:
            with running(folder / "slurm") as cluster:
                rows.append(scale_on(cluster, cells, folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    small, large = rows
    growth = {"disk": round(large["disk_mib"] - small["disk_mib"], 1)}
    for name in PROMISED:
        growth[name] = round(large["commands"][name]["rss_mib"] - small["commands"][name]["rss_mib"], 1)
    broken = [name for name, limit in PROMISED.items() if large["commands"][name]["cpu_s"] > limit]
    broken += [f"growth of {name}" for name, mib in growth.items() if mib > GROWTH_MIB]
    result = {
        "command": "python benchmarks/costs/slurm_scale.py",
        "unit": "cpu_s: processor seconds, children included; wall_s: seconds; rss_mib, disk_mib: MiB",
        "rows": rows,
        "growth_mib": growth,
        "promised": {"cpu_s": PROMISED, "growth_mib": GROWTH_MIB, "broken": broken},
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average": {"before": before, "after": os.getloadavg()[0]},
    }
    OUTPUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(OUTPUT.read_text(encoding="utf-8"), end="")
    return int(bool(broken))


def scale_on(cluster: Cluster, cells: int, folder: Path) -> dict[str, Any]:
    """`scale` against a SLURM that takes jobs and starts none."""
    cluster.hold()
    return scale(cells, folder, cluster.environment | {"PYTHONPATH": str(ROOT)})


if __name__ == "__main__":
    sys.exit(main())
