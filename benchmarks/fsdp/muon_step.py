"""Step time of Muon: ours, FSDP2's with torch.optim.Muon, and AdamW's; work and bytes counted at 64 and 1,024 ranks.

    python benchmarks/fsdp/muon_step.py      in about four minutes; writes data/muon_step.json and records/muon.md
    python benchmarks/fsdp/muon_step.py --turns 24 --note "nothing ran beside"

All arms stand in the same ranks of one thread and take turns, so that whatever else the machine does meets all of them.
A figure is the wall time of a step on rank 0, of forward, backward, update and zero_grad: a turn has the median of its
steps. Bytes are those that a rank sends in `optimizer.step()`, counted outside the engines.

What is counted for more ranks is planned from shapes: the busiest rank's multiplications, over an even share of what
one process does, and the bytes that a rank sends on average. torchtitan's DistMuon is planned as its `Owned` layout
does (torchtitan/distributed/flex_shard at 0b8ed47e): owners along one axis, longest first by work, each copy of the
parameters for itself, in the dtype of storage, which is fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

from benchmarks.costs import peers_step
from harness.bench.stats import median_ratio
from harness.fsdp import fully_shard_model, fully_shard_optimizer
from harness.fsdp.update.owners import Work, owners_of
from harness.muon import MuonWithAdamW, multiplications
from harness.probe.collectives import CollectiveMeter
from tests.support.spawn import run_ranks

ROOT = Path(__file__).resolve().parents[2]
OUTPUT, PAGE = ROOT / "benchmarks" / "data" / "muon_step.json", ROOT / "docs" / "records" / "muon.md"
DIM, FFN, TOKENS = 256, 704, 128
MUON, ADAMW, FSDP2, FSDP2_ADAMW = "ours, Muon", "ours, AdamW", "FSDP2, torch.optim.Muon", "FSDP2, AdamW"
ARMS = (MUON, FSDP2, ADAMW, FSDP2_ADAMW)
RANKS = (2, 4)
SHAPES = [(64, 64), (176, 64), (64, 176), (64, 33), (3, 64), (1, 9)]
ITERATIONS = 5
LAYER = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
LAYERS = 32
"""Of an 8B decoder."""
HEAD = """# Muon on ranks

*Record. What a step of Muon costs beside AdamW's and beside FSDP2's, and what it would cost at 64 and 1,024 ranks. Made
by `python benchmarks/fsdp/muon_step.py`; the data are in `benchmarks/data/muon_step.json`.*

{cores} cores, torch {torch}, Python {python}, ranks of one thread over gloo; a decoder of {parameters} weights,
{tokens} tokens a rank and step, fp32. {turns} turns of {steps} steps, all arms in the same ranks. {note}

A ratio is that of medians over turns to *{base}*, with its bootstrap interval. Bytes are what a rank sends in the
update. `torch.optim.Muon` on FSDP2's DTensors multiplies rows of matrices, and gathers what the other side of each
product needs, in every iteration; its bits depend on the number of ranks.

| ranks | arm | ms a step | times *{base}* | MB sent in the update |
|---|---|---|---|---|
"""
APART = """
## Against one process

Distance of a matrix's first update from the one of a single process with the same gradient, over its size. On DTensors
torch adds what ranks multiply in bfloat16, and refuses matrices with fewer rows than ranks: `engine=fsdp2` takes no
`optimizer=muon` for that.

| ranks | matrix | ours | FSDP2, torch.optim.Muon |
|---|---|---|---|
"""
COUNTED = """
## Planned for more ranks

Matrices of an 8B decoder ({matrices} of them, {elements:.2f} billion elements). *busiest*: multiplications of the rank
that has most to do, over an even share of one process's. *MB*: sent a step by a rank on average, both ways. Ours
divides work over both axes; DistMuon's `Owned` matrices have an owner along the sharded axis, in each copy of the
parameters.

| ranks | scheme | busiest | MB |
|---|---|---|---|
"""


def made(arm: str) -> tuple[Callable[[Tensor], Tensor], list[torch.optim.Optimizer]]:
    module: nn.Module = peers_step.decoder(DIM, FFN, TOKENS)
    model: Any = module
    if arm in (FSDP2, FSDP2_ADAMW):
        for unit in module.modules():
            if isinstance(unit, peers_step.UNITS):
                torch_fsdp.fully_shard(unit)
        torch_fsdp.fully_shard(module)
    else:
        model = fully_shard_model(module, fsdp_unit_modules=[*peers_step.UNITS])
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.dim() == 2 and not name.startswith(("embedding", "head"))]
    rest = [p for p in named.values() if all(p is not matrix for matrix in matrices)]
    if arm == FSDP2:
        return model, [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-4, fused=True)]
    if arm == MUON:
        groups: list[dict[str, Any]] = [{"params": matrices, "muon": True, "lr": 1e-3}, {"params": rest}]
        return model, [fully_shard_optimizer(model, MuonWithAdamW(groups, lr=1e-4, fused=True))]
    optimizer = torch.optim.AdamW([*named.values()], lr=1e-4, fused=True)
    return model, [optimizer if arm == FSDP2_ADAMW else fully_shard_optimizer(model, optimizer)]


def measure(rank: int, turns: int, steps: int) -> dict[str, dict[str, Any]]:
    """By arm: seconds of the turns, and bytes sent in an update."""
    torch.set_num_threads(1)
    batch = torch.randint(0, 256, (1, TOKENS + 1), generator=torch.Generator().manual_seed(1 + rank))
    arms = {arm: made(arm) for arm in ARMS}

    def backward(arm: str) -> None:
        logits = arms[arm][0](batch[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()

    def update(arm: str) -> None:
        for optimizer in arms[arm][1]:
            optimizer.step()
            optimizer.zero_grad()

    def step(arm: str) -> float:
        began = time.perf_counter()
        backward(arm)
        update(arm)
        return time.perf_counter() - began

    found: dict[str, dict[str, Any]] = {arm: {"seconds": []} for arm in ARMS}
    with closing(CollectiveMeter()) as meter:
        for arm in ARMS:
            step(arm)
            backward(arm)
            meter.take()
            update(arm)
            found[arm]["bytes"] = sum(row.bytes for row in meter.take())
    for turn in range(turns):
        for arm in peers_step.in_order(turn, ARMS):
            found[arm]["seconds"].append(statistics.median(step(arm) for _ in range(steps)))
    return found


class One(nn.Module):
    """One matrix, whose gradient is known."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))

    def forward(self, factor: Tensor) -> Tensor:
        return (self.matrix * factor).sum()


def apart(rank: int) -> dict[str, list[float | str]]:
    """By shape, the distance of ours and FSDP2's first update from one process's, over that; or that it raises."""
    torch.set_num_threads(1)
    found: dict[str, list[float | str]] = {}
    for shape in SHAPES:
        factor = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        updates = []
        for kind in ("one", "ours", "FSDP2"):
            module: Any = One(shape)
            before, optimizer = module.matrix.detach().clone(), torch.optim.Muon(module.parameters(), lr=1.0)
            if kind == "ours":
                module = fully_shard_model(module)
                optimizer = fully_shard_optimizer(module, torch.optim.Muon(module.parameters(), lr=1.0))
            elif kind == "FSDP2":
                torch_fsdp.fully_shard(module)
                optimizer = torch.optim.Muon(module.parameters(), lr=1.0)
            module(factor).backward()
            try:
                optimizer.step()
                after = module.matrix if kind == "one" else module.matrix.full_tensor()
                updates.append(after.detach() - before)
            except RuntimeError:
                updates.append(None)
        one, *others = updates
        found["{} x {}".format(*shape)] = [
            "raises" if each is None else round(float((each - one).norm() / one.norm()), 4) for each in others
        ]
    return found


def rows_of(told: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    base = told[0][MUON]["seconds"]
    return {
        arm: {
            "ms": round(1e3 * statistics.median(told[0][arm]["seconds"]), 2),
            "ratio": peers_step.told(median_ratio(told[0][arm]["seconds"], [base])),
            "bytes": round(statistics.fmean(each[arm]["bytes"] for each in told)),
        }
        for arm in ARMS
    }


# -- planned -----------------------------------------------------------------------------------------------------------


def busiest(works: Sequence[Work], owners: int, ranks: int) -> float:
    loads = [0] * owners
    for work, owner in zip(works, owners_of(works, owners), strict=True):
        loads[owner] += work.cost
    return max(loads) * ranks / sum(loads)


def longest_first(works: Sequence[Work], owners: int, ranks: int) -> float:
    loads = [0] * owners
    for cost in sorted((work.cost for work in works), reverse=True):
        loads[loads.index(min(loads))] += cost
    return max(loads) * ranks / sum(loads)


def planned() -> list[tuple[str, str, float, float]]:
    """Ranks, scheme, the busiest rank's work over an even share, and MB a rank sends."""
    shapes = LAYER * LAYERS
    works = [Work(multiplications(*shape, ITERATIONS), 2 * shape[0] * shape[1]) for shape in shapes]
    elements = sum(rows * columns for rows, columns in shapes)
    found = []
    for copies, shards in ((1, 64), (8, 8), (1, 1024), (16, 64)):
        ranks = copies * shards
        name = f"{ranks:,}" if copies == 1 else f"{ranks:,}: {copies} copies of {shards} shards"
        # to an owner the other shards of one copy, and back to all ranks but itself: each keeps 1 / shards of it
        ours = 2 * elements * ((1 - 1 / shards) + (copies - 1 / shards)) / ranks / 1e6
        theirs = 4 * elements * 2 * (1 - 1 / shards) / shards / 1e6
        found.append((name, "ours", busiest(works, ranks, ranks), ours))
        found.append((name, "DistMuon, Owned", longest_first(works, shards, ranks), theirs))
    return found


def page(facts: dict[str, Any]) -> str:
    keys = {key: facts[key] for key in ("cores", "parameters", "turns", "steps", "note")}
    text = HEAD.format(**keys, **facts["versions"], tokens=TOKENS, base=MUON)
    for ranks, arms in facts["rows"].items():
        for arm, row in arms.items():
            ratio = "{value:.2f} ({low:.2f} to {high:.2f})".format(**row["ratio"])
            text += f"| {ranks} | {arm} | {row['ms']:.1f} | {ratio} | {row['bytes'] / 1e6:.2f} |\n"
    text += APART
    for ranks, found in facts["apart"].items():
        text += "".join(f"| {ranks} | {shape} | {ours} | {theirs} |\n" for shape, (ours, theirs) in found.items())
    shapes = LAYER * LAYERS
    text += COUNTED.format(matrices=len(shapes), elements=sum(rows * columns for rows, columns in shapes) / 1e9)
    return text + "".join(f"| {a} | {b} | {c:.2f} | {d:,.1f} |\n" for a, b, c, d in facts["planned"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=12, help="of each arm, 3 or more (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="steps in a turn (default: %(default)s)")
    parser.add_argument("--note", default="", help="a sentence about what ran beside")
    chosen = parser.parse_args()
    if chosen.turns < 3:
        parser.error(f"--turns={chosen.turns} must be 3 or more: an interval needs three")
    parameters = sum(param.numel() for param in peers_step.decoder(DIM, FFN, TOKENS).parameters())
    facts = {
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "cores": os.cpu_count(),
        "parameters": f"{parameters:,}",
        "turns": chosen.turns,
        "steps": chosen.steps,
        "note": chosen.note,
        "rows": {ranks: rows_of(run_ranks(measure, ranks, chosen.turns, chosen.steps)) for ranks in RANKS},
        "apart": {ranks: run_ranks(apart, ranks)[0] for ranks in RANKS},
        "planned": planned(),
    }
    OUTPUT.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(facts), encoding="utf-8")
    print(page(facts))


if __name__ == "__main__":
    main()
