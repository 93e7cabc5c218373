"""Processor time of commands, and files of a run, beside those of another revision.

Writes data/verbs.json and the table at the end of docs/records/structure.md.

    python benchmarks/costs/verbs.py [--base 5135ba6] [--turns 5]

The base is exported by `git archive`. Sides take turns; a figure is the least of them, user and system time of all
processes of a command. Both sides have a pair of runs of their own: `tiny`, 20 steps, two ranks.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.pages import tables

PAGE = tables.DOCS / "records" / "structure.md"
PAIR = ("sharding=optim", "engine=ddp sharding=no_shard")
GRID = ("-m", "launch.dry_run=true", f"train.seed={','.join(map(str, range(1, 48)))}", "engine.prefetch=1,2,3")


def used(side: Path, words: Sequence[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, *words]
    subprocess.run(command, cwd=side, env={**os.environ, "PYTHONPATH": str(side)}, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def commands(root: Path, runs: Sequence[Path]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Name and words of each. The verb of a pair has been `compare`, and is an alias of it."""
    yield "--help", ("-m", "harness", "--help")
    yield "run.py --help", ("run.py", "--help")
    yield "show", ("-m", "harness", "show", str(runs[0]))
    yield "watch --once", ("-m", "harness", "watch", "--once", "--root", str(root))
    yield "compare of a pair", ("-m", "harness", "compare", *map(str, runs))
    yield "a dry run", ("run.py", "launch.dry_run=true", "sharding=optim")
    yield "a dry run of 141 cells", ("run.py", *GRID)


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--base", default="5135ba6")
    parser.add_argument("--turns", type=int, default=5)
    asked = parser.parse_args()
    seconds: dict[str, dict[str, float]] = defaultdict(dict)
    with tempfile.TemporaryDirectory() as folder:
        sides = {asked.base: Path(folder) / "base", "here": tables.ROOT}
        sides[asked.base].mkdir()
        packed = subprocess.run(["git", "archive", asked.base], cwd=tables.ROOT, stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "x", "-C", str(sides[asked.base])], input=packed.stdout, check=True)
        todo = {}
        for name, side in sides.items():
            root = Path(folder) / f"runs of {name}"
            for arm in PAIR:
                used(side, ["run.py", *arm.split(), "train.steps=20", f"launch.root={root}"])
            runs = sorted(path.parent for path in root.glob("*/*/config.yaml"))
            kept = [path for path in runs[-1].rglob("*") if path.is_file()]
            seconds["files of a run"][name] = len(kept)
            seconds["MiB of a run"][name] = round(sum(path.stat().st_size for path in kept) / 2**20, 1)
            todo[name] = dict(commands(root, runs))
        for _ in range(asked.turns):
            for name, side in sides.items():
                for verb, words in todo[name].items():
                    took = round(used(side, words), 2)
                    seconds[verb][name] = min(took, seconds[verb].get(name, took))
    tables.write("verbs.json", {"turns": asked.turns, "figures": seconds, "versions": tables.versions("hydra-core")})
    rows = [[verb, *(figures[name] for name in sides)] for verb, figures in seconds.items()]
    PAGE.write_text(tables.made(PAGE, {"verbs": tables.markdown_table(["", *sides], rows)}), encoding="utf-8")


if __name__ == "__main__":
    main()
