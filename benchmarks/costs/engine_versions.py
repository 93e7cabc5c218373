"""Step time of the engine of another revision against the one that lies here. Writes data/engine_versions.json.

    python benchmarks/costs/engine_versions.py                   against 9fd760c, in about 15 minutes on two idle cores
    python benchmarks/costs/engine_versions.py --base HEAD~3 --turns 12 --steps 40

The base revision is exported by `git archive` into a temporary folder. Each side runs in two processes of its own over
gloo, started once for each strategy; only one side steps at a time, and they take turns, A B A B, so that whatever else
the machine does meets both. Both import nothing of their checkout but the public face (`harness.fsdp`). A figure is the
wall time of a step on rank 0: forward, backward, update, zero_grad. The ratio of a turn is the median of B's steps
through that of A's next to it; what is told is the median ratio over turns, with its quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "benchmarks" / "data" / "engine_versions.json"
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
RANKS = 2
BATCH = 32
"""Rows a rank."""
SHAPES = {"wide": (384, 8), "many": (16, 72)}
"""Width and number of units: about 9.5 million parameters in 34 tensors, where a step is numbers, and 0.15 million
in 290, where it is what the engine does for each tensor."""


# -- one rank ----------------------------------------------------------------------------------------------------------


def serve(shape: str, strategy: str, rank: int, port: int) -> None:
    """Step as often as each line of the standard input says, and answer with seconds a step as JSON."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import harness.fsdp
    from harness.fsdp import fully_shard_model, fully_shard_optimizer

    checkout = Path.cwd().resolve()
    if not Path(str(harness.fsdp.__file__)).resolve().is_relative_to(checkout):
        raise RuntimeError(f"harness.fsdp comes from {harness.fsdp.__file__}, not from {checkout}")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    width, depth = SHAPES[shape]
    block = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)]
    module = nn.Sequential(*block, nn.Linear(width, 16))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    model = fully_shard_model(module, fsdp_unit_modules=[nn.Sequential], zero_dp_strategy=strategy)
    fully_shard_optimizer(model, optimizer)
    x = torch.randn(BATCH, width)

    def step() -> float:
        began = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    for line in sys.stdin:
        print(json.dumps([step() for _ in range(int(line))]), flush=True)
    dist.destroy_process_group()


# -- two versions ------------------------------------------------------------------------------------------------------


class Side:
    """The ranks of one version with one model under one strategy; they wait until they are asked to step."""

    def __init__(self, checkout: Path, shape: str, strategy: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-P", __file__, "--serve", shape, strategy, str(rank), str(port)],
                env=environment,
                cwd=checkout,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]

    def steps(self, count: int) -> list[float]:
        """Seconds of so many steps on rank 0."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{count}\n")
            rank.stdin.flush()
        told = [rank.stdout.readline() for rank in self.ranks if rank.stdout is not None]
        if not all(told):
            raise RuntimeError(f"a rank ended: exit codes {[rank.poll() for rank in self.ranks]}")
        return [float(each) for each in json.loads(told[0])]

    def close(self) -> None:
        """Let the ranks end."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait(60)


@contextlib.contextmanager
def exported(revision: str) -> Iterator[Path]:
    """A folder with the files of a revision."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "p25": low, "p75": high}


def compare(base: Path, shape: str, strategy: str, turns: int, steps: int) -> dict[str, Any]:
    """Milliseconds a step of both versions, and the ratio here / base, over all turns."""
    found: dict[str, list[list[float]]] = {"base": [], "here": []}
    made = Side(base, shape, strategy), Side(ROOT, shape, strategy)
    with contextlib.closing(made[0]) as other, contextlib.closing(made[1]) as this:
        sides = {"base": other, "here": this}
        for side in sides.values():
            side.steps(3)
        for _ in range(turns):
            for name, side in sides.items():
                found[name].append([seconds * 1e3 for seconds in side.steps(steps)])
    pairs = zip(found["here"], found["base"], strict=True)
    ratios = [statistics.median(here) / statistics.median(before) for here, before in pairs]
    rows = {f"{name}_ms": spread([each for turn in found[name] for each in turn]) for name in sides}
    return rows | {"ratio": spread(ratios), "ratios": ratios}


def revision_of(name: str) -> str:
    """The full hash of a revision."""
    told = subprocess.run(["git", "rev-parse", name], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return told.stdout.strip()


def main() -> None:
    """Compare under every strategy, print a table, keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="9fd760c", help="revision to compare with (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=20, help="turns of each version, 2 or more (default: 20)")
    parser.add_argument("--steps", type=int, default=30, help="steps in a turn (default: 30)")
    parser.add_argument("--out", type=Path, default=OUTPUT, help="file to write (default: data/engine_versions.json)")
    parser.add_argument("--serve", nargs=4, metavar=("SHAPE", "STRATEGY", "RANK", "PORT"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        shape, strategy, rank, port = chosen.serve
        return serve(shape, strategy, int(rank), int(port))
    if chosen.turns < 2:
        parser.error(f"--turns={chosen.turns} must be 2 or more: quartiles need two ratios")
    print(f"{'shape':5} {'strategy':20} {'base ms':>9} {'here ms':>9} {'here / base':>24}")
    rows: dict[str, dict[str, Any]] = {shape: {} for shape in SHAPES}
    with exported(chosen.base) as base:
        for shape, strategy in itertools.product(SHAPES, STRATEGIES):
            row = rows[shape][strategy] = compare(base, shape, strategy, chosen.turns, chosen.steps)
            ratio = row["ratio"]
            told = f"{ratio['median']:.3f} ({ratio['p25']:.3f}..{ratio['p75']:.3f})"
            times = f"{row['base_ms']['median']:9.2f} {row['here_ms']['median']:9.2f}"
            print(f"{shape:5} {strategy:20} {times} {told:>24}", flush=True)
    facts = {
        "base": revision_of(chosen.base),
        "here": revision_of("HEAD"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "ranks": RANKS,
        "turns": chosen.turns,
        "steps": chosen.steps,
        "rows": rows,
    }
    chosen.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
