"""What it costs that `harness.capture` watches a loop. Writes data/watch_cost.json.

    python benchmarks/costs/watch_cost.py

Two ranks of one thread train 12.7 M weights in fp32 (the model of `step_checks_cost.py`) on 4096 tokens a rank and
step, in a loop that knows of `watch` alone. All figures are of processor seconds of rank 0. Steps are in turns without
and with the watch, whose hooks stay and return at once in those without: shares of the step without, with a bootstrap
interval (harness/bench/stats.py).

- `direct`: all that the watch does in a step that is looked at, in hooks and in `run.step`, over the rest of the step.
- `extra`: steps that are looked at over steps without. Leaves nothing out.
- `run`: all that the watch does in a whole run by default but its first step, over the rest; and of its second half.
"""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.costs.step_checks_cost import MODEL, RUN_STEPS, SEQ_LEN, SEQUENCES, WARMUP, Step, figures, over_run
from benchmarks.pages import tables
from harness.capture import watch
from harness.models.workload import workload_for
from tests.support.factory import small_config
from tests.support.spawn import run_ranks

BLOCKS = 6
CELLS = ("fsdp2", "ddp")


def model_of(name: str) -> nn.Module:
    config = small_config(**{f"model__{key}": size for key, size in MODEL.items()})
    workload = workload_for(config)
    net = workload.build("cpu", torch.float32)
    with torch.no_grad():
        for key, param in net.named_parameters():
            param.copy_(workload.initial_weight(key, param.shape))
    if name == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    for module in net.modules():
        if isinstance(module, tuple(workload.unit_classes)):
            fully_shard(module)
    return fully_shard(net)


def one_cell(rank: int, name: str, folder: str) -> tuple[list[Step], list[Step], int]:
    """Steps of this rank in turns without and with the watch, all steps of a run by default, and those looked at."""
    turns, _ = watched(rank, name, Path(folder) / "study" / "turns", WARMUP + 2 * BLOCKS, share=1.0)
    steps, looked_at = watched(rank, name, Path(folder) / "study" / "run", RUN_STEPS)
    return turns[WARMUP:], steps, looked_at


def watched(rank: int, name: str, path: Path, steps: int, **options: Any) -> tuple[list[Step], int]:
    """Processor seconds of each step, and how many were looked at. With options: of every second step alone."""
    model = model_of(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = watch(model, optimizer, path, **(options and {"steps": [], **options}))
    generator = torch.Generator().manual_seed(rank)
    found = []
    for number in range(steps):
        rows = torch.randint(0, 256, (SEQUENCES // 2, SEQ_LEN + 1), generator=generator)
        run.problem = "left out" if options and number % 2 == 0 else ""
        began, looking = time.process_time(), run.cadence.looking_s
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss, data=rows)
        found.append(Step(time.process_time() - began, run.cadence.looking_s - looking))
    run.problem = ""
    run.close()
    return found, run.cadence.steps


def summary(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        turns, steps, looked_at = run_ranks(partial(one_cell, folder=folder), 2, name)[0]
    return figures(turns) | {"run": over_run(steps[1:], looked_at)}  # the first step has an account of its own


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    tables.parser(__doc__).parse_args()
    found = {}
    for name in CELLS:
        load = os.getloadavg()[0]
        found[name] = summary(name) | {"load_average": {"before": load, "after": os.getloadavg()[0]}}
        print(name, found[name], flush=True)
    facts = {"weights": "12.7 M, fp32", "blocks": BLOCKS, "tokens_a_rank": SEQUENCES // 2 * SEQ_LEN, "cells": found}
    tables.write("watch_cost.json", facts | {"versions": tables.versions("torch"), "cores": os.cpu_count()})


if __name__ == "__main__":
    from benchmarks.costs import watch_cost  # ranks import what they run by name

    watch_cost.main()
