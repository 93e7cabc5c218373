"""Processor time of commands, and files of a run, beside those of another revision, for docs/records/structure.md.

    python benchmarks/costs/verbs.py

Sides take turns; a figure is the least of them, user and system time of all processes of a command. Both sides have a
pair of runs of their own: `tiny`, 20 steps, two ranks. Writes data/verbs.json and the table at the end of the page.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.pages import tables

BASE, TURNS = "5135ba6", 5
PAGE = tables.DOCS / "records" / "structure.md"
SEEDS = ",".join(map(str, range(1, 48)))
COMMANDS = {
    "--help": "-m harness --help",
    "run.py --help": "run.py --help",
    "show": "-m harness show {0}",
    "watch --once": "-m harness watch --once --root {root}",
    "compare of a pair": "-m harness compare {0} {1}",
    "a dry run": "run.py launch.dry_run=true sharding=optim",
    "a dry run of 141 cells": f"run.py -m launch.dry_run=true train.seed={SEEDS} engine.prefetch=1,2,3",
}


def used(side: Path, words: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(side), "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run([sys.executable, *words.split()], cwd=side, env=environment, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    figures: dict[str, dict[str, float]] = defaultdict(dict)
    with tempfile.TemporaryDirectory() as folder:
        sides, runs = {BASE: Path(tempfile.mkdtemp(dir=folder)), "here": tables.ROOT}, dict[str, list[Path]]()
        subprocess.run(f"git archive {BASE} | tar x -C {sides[BASE]}", shell=True, cwd=tables.ROOT, check=True)
        for name, side in sides.items():
            for arm in ("sharding=optim", "engine=ddp sharding=no_shard"):
                used(side, f"run.py {arm} train.steps=20 launch.root={folder}/{name}")
            runs[name] = sorted(path.parent for path in Path(folder, name).glob("*/*/config.yaml"))
            kept = [path.stat().st_size for path in runs[name][-1].rglob("*") if path.is_file()]
            figures["files of a run"][name] = len(kept)
            figures["MiB of a run"][name] = round(sum(kept) / 2**20, 1)
        for name, verb in [(name, verb) for _ in range(TURNS) for name in sides for verb in COMMANDS]:
            took = round(used(sides[name], COMMANDS[verb].format(*runs[name], root=Path(folder, name))), 2)
            figures[verb][name] = min(took, figures[verb].get(name, took))
    tables.write("verbs.json", {"turns": TURNS, "figures": figures, "versions": tables.versions("hydra-core")})
    table = tables.markdown_table(["", *sides], [[verb, *found.values()] for verb, found in figures.items()])
    PAGE.write_text(tables.made(PAGE, {"verbs": table}), encoding="utf-8")


if __name__ == "__main__":
    main()
