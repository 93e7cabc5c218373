"""Step time of the engine of another revision against the one that lies here.

Writes data/engine_versions.json and docs/records/engine_versions.md.

    python benchmarks/costs/engine_versions.py                   against f5f18313, in about an hour on two idle cores
    python benchmarks/costs/engine_versions.py --base HEAD~3 --turns 12 --steps 40
    python benchmarks/costs/engine_versions.py --only compute together --turns 48    one regime again; others stay

The base revision is exported by `git archive` into a temporary folder. Each side runs in two processes of its own over
gloo; only one side steps at a time, and they take turns, A B A B, so that whatever else the machine does meets both.
Models and arms are those of each checkout's benchmarks/costs/peers_step.py, at its three shapes: each arm in processes
of its own (`apart`), or all arms in the same ones (`together`), with DDP and FSDP2, which are the same on both sides.

A figure is the wall time of a step on rank 0: forward, backward, update, zero_grad; a turn has the median of its steps.
What is told is the ratio of medians over turns, with a bootstrap interval of pairs of turns (harness/bench/stats.py).
`start` is construction and the first step, in processes of their own: the least of each side's starts, as whatever
disturbs one only adds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ.get("PYTHONPATH") or str(Path(__file__).resolve().parents[2]))

import torch

import harness
from benchmarks.costs import peers_step
from harness.bench.stats import median_ratio

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "benchmarks" / "data" / "engine_versions.json"
PAGE = ROOT / "docs" / "records" / "engine_versions.md"
HEAD = """# The engine beside an earlier one

*Record. How long a step takes, beside the engine of another revision. Made by `{command}`; the data are in
`benchmarks/data/engine_versions.json`.*

Two ranks of one thread on {cores} cores, torch {torch}, Python {python}: revision {here} beside {base}. A figure is the
ratio of medians over turns of {steps} steps, with its bootstrap interval. *apart*: each arm in processes of its own;
*together*: all arms in the same ones. *start* is construction and first step, the least of {starts}. DDP and FSDP2 are
the same on both sides: what they differ by is the noise of the machine. A row that names a later revision was measured
again at that one (`--only`).

| shape | regime | arm | turns | ms before | ms here | here / before |
|---|---|---|---|---|---|---|
"""
RANKS = 2
APART, TOGETHER, START = "apart", "together", "start"
REGIMES = tuple(itertools.product(peers_step.SHAPES, (APART, TOGETHER)))
STARTS = 5
"""Of each arm, shape and side."""


# -- one rank ----------------------------------------------------------------------------------------------------------


def serve(shape: str, names: Sequence[str], rank: int, port: int) -> None:
    """Make the arms, answer with the seconds of construction and first step of the first, then step an arm as often as
    each line of the standard input says, and answer with seconds a step as JSON."""
    import torch.distributed as dist

    checkout = Path.cwd().resolve()
    for module in (peers_step, harness):
        if not Path(str(module.__file__)).resolve().is_relative_to(checkout):
            raise RuntimeError(f"{module.__name__} comes from {module.__file__}, not from {checkout}")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    dim, ffn_dim, tokens = peers_step.SHAPES[shape]
    batch = torch.randint(0, 256, (1, tokens + 1), generator=torch.Generator().manual_seed(1 + rank))

    def step(model: Any, optimizer: torch.optim.Optimizer) -> float:
        began = time.perf_counter()
        logits = model(batch[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    made = [peers_step.decoder(dim, ffn_dim, tokens) for _ in names]
    dist.barrier()
    began, arms = time.perf_counter(), dict[str, Any]()
    for name, module in zip(names, made, strict=True):
        arms[name] = peers_step.prepare(name, module)
        if len(arms) == 1:
            step(*arms[name])
            print(json.dumps([time.perf_counter() - began]), flush=True)
    for line in sys.stdin:
        name, _, count = line.rpartition(" ")
        print(json.dumps([step(*arms[name]) for _ in range(int(count))]), flush=True)
    dist.destroy_process_group()


# -- two versions ------------------------------------------------------------------------------------------------------


class Side:
    """The ranks of one version with models of these arms; they wait until they are asked to step."""

    def __init__(self, checkout: Path, shape: str, names: Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        file = checkout / "benchmarks" / "costs" / Path(__file__).name
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-P", file, "--serve", shape, ";".join(names), str(rank), str(port)],
                env=environment,
                cwd=checkout,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        (self.start,) = self._told()
        """Seconds of construction and first step."""

    def _told(self) -> list[float]:
        told = [rank.stdout.readline() for rank in self.ranks if rank.stdout is not None]
        if not all(told):
            raise RuntimeError(f"a rank ended: exit codes {[rank.poll() for rank in self.ranks]}")
        return [float(each) for each in json.loads(told[0])]

    def steps(self, name: str, count: int) -> list[float]:
        """Seconds of so many steps of an arm on rank 0."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{name} {count}\n")
            rank.stdin.flush()
        return self._told()

    def close(self) -> None:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait(60)


@contextlib.contextmanager
def exported(revision: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        shutil.copy(__file__, Path(folder) / "benchmarks" / "costs")
        yield Path(folder)


def compare(base: Path, shape: str, names: Sequence[str], turns: int, steps: int) -> dict[str, dict[str, Any]]:
    """By arm: milliseconds a step of both versions, and the ratio here / base, over all turns."""
    found = {name: {"base": list[float](), "here": list[float]()} for name in names}
    made = Side(base, shape, names), Side(ROOT, shape, names)
    with contextlib.closing(made[0]) as other, contextlib.closing(made[1]) as this:
        sides = {"base": other, "here": this}
        for side, name in itertools.product(sides.values(), names):
            side.steps(name, 3)
        for turn in range(turns):
            for name in peers_step.in_order(turn, tuple(names)):
                for which, side in [*sides.items()][:: 1 if turn % 2 else -1]:
                    found[name][which].append(1e3 * statistics.median(side.steps(name, steps)))
    return {name: row(each["here"], each["base"]) for name, each in found.items()}


def row(here: list[float], base: list[float]) -> dict[str, Any]:
    ratio = peers_step.told(median_ratio(here, base))
    before, now = (round(statistics.median(each), 2) for each in (base, here))
    return {"turns": len(here), "base_ms": before, "here_ms": now, "ratio": ratio}


def starts(base: Path, shape: str, name: str) -> dict[str, float]:
    """The least seconds of construction and first step of each version, and the ratio here / base."""
    found: dict[str, list[float]] = {"base": [], "here": []}
    for _ in range(STARTS):
        for which, checkout in (("base", base), ("here", ROOT)):
            with contextlib.closing(Side(checkout, shape, (name,))) as side:
                found[which].append(side.start)
    least = {which: min(each) for which, each in found.items()}
    return {**least, "ratio": round(least["here"] / least["base"], 3)}


def page(facts: dict[str, Any]) -> str:
    command = f"python benchmarks/costs/engine_versions.py --base {facts['base'][:8]}"
    lines = []
    for shape, regimes in facts["rows"].items():
        for regime, arms in regimes.items():
            for name, each in arms.items():
                if regime == START:
                    turns, before, here, ratio = STARTS, 1e3 * each["base"], 1e3 * each["here"], f"{each['ratio']:.3f}"
                else:
                    turns, before, here = each["turns"], each["base_ms"], each["here_ms"]
                    ratio = "{value:.3f} ({low:.3f} to {high:.3f})".format(**each["ratio"])
                    if each.get("revision", facts["here"]) != facts["here"]:
                        ratio += f", {each['revision'][:8]}"
                lines.append(f"| {shape} | {regime} | {name} | {turns} | {before:.1f} | {here:.1f} | {ratio} |")
    head = HEAD.format(
        **{key: facts[key] for key in ("cores", "steps")},
        **facts["versions"],
        command=command,
        here=facts["here"][:8],
        base=facts["base"][:8],
        starts=STARTS,
    )
    return head + "\n".join(lines) + "\n"


def revision_of(name: str) -> str:
    told = subprocess.run(["git", "rev-parse", name], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return told.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="f5f18313", help="revision to compare with (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=36, help="of each version, 3 or more (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="steps in a turn (default: %(default)s)")
    parser.add_argument("--serve", nargs=4, metavar=("SHAPE", "ARMS", "RANK", "PORT"), help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs=2, metavar=("SHAPE", "REGIME"), help="measure this again, beside what stands")
    chosen = parser.parse_args()
    if chosen.serve:
        shape, names, rank, port = chosen.serve
        return serve(shape, names.split(";"), int(rank), int(port))
    if chosen.turns < 3:
        parser.error(f"--turns={chosen.turns} must be 3 or more: an interval needs three")
    revisions = {"base": revision_of(chosen.base), "here": revision_of("HEAD")}
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    with exported(chosen.base) as base:
        for shape, regime in REGIMES:
            if chosen.only and (shape, regime) != tuple(chosen.only):
                continue
            names = peers_step.ARMS if regime == TOGETHER else peers_step.OURS
            visits = [names] if regime == TOGETHER else [(name,) for name in names]
            found = rows.setdefault(shape, {})[regime] = {}
            for visit in visits:
                found |= compare(base, shape, visit, chosen.turns, chosen.steps)
            for name, told in found.items():
                told["revision"] = revisions["here"]
                print(shape, regime, name, told, flush=True)
        for shape in () if chosen.only else rows:
            rows[shape][START] = {name: starts(base, shape, name) for name in peers_step.OURS}
            print(shape, START, {name: told["ratio"] for name, told in rows[shape][START].items()}, flush=True)
    if chosen.only:
        before = json.loads(OUTPUT.read_text(encoding="utf-8"))
        revisions, (shape, regime) = {key: before[key] for key in revisions}, chosen.only
        rows = before["rows"] | {shape: before["rows"][shape] | rows[shape]}
    facts = {
        **revisions,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "cores": os.cpu_count(),
        "ranks": RANKS,
        "steps": chosen.steps,
        "rows": rows,
    }
    OUTPUT.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(facts), encoding="utf-8")


if __name__ == "__main__":
    main()
