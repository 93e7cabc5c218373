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
    command += ["--log-dir=logs", "--redirects=1"]  # a file for each rank: in one, their lines run into each other
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "my_recipes.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, list[float]] = {}
    for log in tmp_path.glob("logs/*/attempt_0/*/stdout.log"):
        for name, value in map(str.split, log.read_text().splitlines()):
            told.setdefault(name, []).append(float(value))
    assert {name: len(values) for name, values in told.items()} == dict.fromkeys(
        ("average", "judge", "scale", "preferences"), RANKS
    )
    assert len(set(told["average"])) == 1  # of ones, through the same weights on both ranks
    assert told["scale"] == [2.0**16] * RANKS
    assert all(value < 0.6931 for value in told["preferences"])  # log 2 before the first step
