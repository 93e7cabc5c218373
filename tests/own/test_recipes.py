"""The recipes of docs/own.md, run as printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.own.guide import FILES, ROOT

RANKS = 2


def test_each_recipe_trains(tmp_path: Path) -> None:
    (tmp_path / "my_recipes.py").write_text(FILES["my_recipes.py"], encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONUNBUFFERED", None)  # what a rank prints is written at once, at its end
    done = subprocess.run(
        [*command, "my_recipes.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, list[float]] = {}
    for name, value in (line.split() for line in done.stdout.splitlines() if len(line.split()) == 2):
        told.setdefault(name, []).append(float(value))
    assert {name: len(values) for name, values in told.items()} == dict.fromkeys(
        ("average", "judge", "scale", "preferences"), RANKS
    )
    assert len(set(told["average"])) == 1  # of ones, through the same weights on both ranks
    assert told["scale"] == [2.0**16] * RANKS
    assert all(value < 0.6931 for value in told["preferences"])  # log 2 before the first step
