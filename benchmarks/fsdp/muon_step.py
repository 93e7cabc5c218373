"""Step time of Muon: ours, FSDP2's with torch.optim.Muon, and AdamW's; work and bytes planned for 64 and 1,024 ranks.

    python benchmarks/fsdp/muon_step.py      in some five minutes; data/muon_step.json, parts of docs/records/muon.md

All arms stand in the same ranks of one thread and take turns, so that whatever else the machine does meets all of them.
A figure is the wall time of a step on rank 0 (forward, backward, update, zero_grad); a turn has the median of its
steps. Bytes are those that a rank sends in `optimizer.step()`, counted outside the engines.

torchtitan's DistMuon is planned as its `Owned` layout does (torchtitan/distributed/flex_shard at 0b8ed47e): owners
along one axis, longest first by work, each copy of the parameters for itself, in the dtype of storage, which is fp32.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.costs import peers_step
from benchmarks.pages import tables
from harness.bench.stats import median_ratio
from harness.fsdp import fully_shard_model, fully_shard_optimizer
from harness.fsdp.update.matrices import Work, owners_of
from harness.muon import MuonWithAdamW, multiplications
from harness.probe.collectives import CollectiveMeter
from tests.support.spawn import run_ranks

DATA, PAGE = "muon_step.json", tables.DOCS / "records" / "muon.md"
DIM, FFN, TOKENS, RANKS, STEPS = 256, 704, 128, (2, 4), 3
MUON, FSDP2, ADAMW, FSDP2_ADAMW = ARMS = ("ours, Muon", "FSDP2, torch.optim.Muon", "ours, AdamW", "FSDP2, AdamW")
LAYER = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
MATRICES = LAYER * 32
"""Of an 8B decoder."""


def made(arm: str) -> tuple[Callable[[Tensor], Tensor], list[torch.optim.Optimizer]]:
    module: Any = peers_step.decoder(DIM, FFN, TOKENS)
    if arm != MUON:
        module, adamw = peers_step.prepare(peers_step.OURS[-1] if arm == ADAMW else peers_step.FSDP2, module)
        if arm != FSDP2:
            return module, [adamw]
    else:
        module = fully_shard_model(module, fsdp_unit_modules=[*peers_step.UNITS])
    kinds: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, param in module.named_parameters():
        kinds[param.dim() == 2 and not name.startswith(("embedding", "head"))].append(param)
    if arm == FSDP2:
        return module, [torch.optim.Muon(kinds[True], lr=1e-3), torch.optim.AdamW(kinds[False], lr=1e-4, fused=True)]
    groups = [{"params": kinds[True], "muon": True, "lr": 1e-3}, {"params": kinds[False]}]
    return module, [fully_shard_optimizer(module, MuonWithAdamW(groups, lr=1e-4, fused=True))]


def measure(rank: int, turns: int) -> dict[str, tuple[list[float], int]]:
    """By arm: milliseconds of the turns, and bytes sent in an update."""
    batch = torch.randint(0, 256, (1, TOKENS + 1), generator=torch.Generator().manual_seed(1 + rank))
    arms = {arm: made(arm) for arm in ARMS}

    def step(arm: str, before_update: Callable[[], object] = int) -> float:
        (model, optimizers), began = arms[arm], time.perf_counter()
        logits = model(batch[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        before_update()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return 1e3 * (time.perf_counter() - began)

    found: dict[str, tuple[list[float], int]] = {}
    with closing(CollectiveMeter()) as meter:
        for arm in ARMS:
            step(arm)  # makes state
            step(arm, meter.take)
            found[arm] = [], sum(row.bytes for row in meter.take())
    for turn in range(turns):
        for arm in peers_step.in_order(turn, ARMS):
            found[arm][0].append(round(median(step(arm) for _ in range(STEPS)), 2))
    return found


def planned() -> list[tuple[str, str, str, str]]:
    """Ranks, scheme, the busiest rank's work over an even share, and MB a rank sends."""
    works = [Work(multiplications(*shape, 5), 2 * shape[0] * shape[1]) for shape in MATRICES]
    costs, elements = [work.cost for work in works], sum(rows * columns for rows, columns in MATRICES)
    found = []
    for copies, shards in ((1, 64), (8, 8), (1, 1024), (16, 64)):
        ranks, others = copies * shards, 1 - 1 / shards
        ours, theirs = [0] * ranks, [0] * shards
        for cost, owner in zip(costs, owners_of(works, ranks), strict=True):
            ours[owner] += cost
        for cost in sorted(costs, reverse=True):
            theirs[theirs.index(min(theirs))] += cost
        name = f"{ranks:,}" if copies == 1 else f"{ranks:,}: {copies} copies of {shards} shards"
        # to an owner the other shards of one copy, and back to all ranks but itself: each keeps 1 / shards of it
        for scheme, loads, sent in (
            ("ours", ours, 2 * (others + copies - 1 / shards) / ranks),
            ("DistMuon, Owned", theirs, 4 * 2 * others / shards),
        ):
            busiest, moved = max(loads) * ranks / sum(costs), sent * elements / 1e6
            found.append((name, scheme, f"{busiest:.2f}", f"{moved:,.1f}"))
    return found


def render(facts: dict[str, Any]) -> str:
    rows = []
    for ranks, arms in facts["ranks"].items():
        for arm, (ms, sent) in arms.items():
            ratio = median_ratio(ms, arms[MUON][0])
            assert ratio is not None
            times = f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
            rows.append((ranks, arm, f"{median(ms):.1f}", times, f"{sent / 1e6:.2f}"))
    head = ["ranks", "arm", "ms a step", f"times *{MUON}*", "MB sent in the update"]
    heads = ["ranks", "scheme", "busiest", "MB"]
    parts = {"times": f"{facts['setting']}\n\n{tables.markdown_table(head, rows)}"}
    return tables.made(PAGE, parts | {"planned": tables.markdown_table(heads, facts["planned"])})


def main() -> None:
    parser = tables.parser(__doc__)
    parser.add_argument("--turns", type=int, default=12, help="of each arm, 3 or more (default: %(default)s)")
    turns, load = parser.parse_args().turns, os.getloadavg()[0]
    found: dict[int, Any] = {}
    for count in RANKS:
        ranks = run_ranks(measure, count, turns)
        found[count] = {arm: (ms, fmean(each[arm][1] for each in ranks)) for arm, (ms, _) in ranks[0].items()}
    setting = (
        f"{os.cpu_count()} cores, {tables.versions('torch')}, ranks of one thread over gloo; fp32, {TOKENS} tokens a"
        f" rank and step. {turns} turns of {STEPS} steps, all arms in the same ranks; load before: {load:.1f}."
    )
    tables.write(DATA, {"setting": setting, "ranks": found, "planned": planned()})
    PAGE.write_text(render(tables.read(DATA)), encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    from benchmarks.fsdp import muon_step  # ranks import what they run by name

    muon_step.main()
