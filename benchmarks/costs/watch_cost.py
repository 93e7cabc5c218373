"""What it costs that `harness.capture` watches a loop. Writes data/watch_cost.json.

    python benchmarks/costs/watch_cost.py

Two ranks of one thread train 12.7 M weights in fp32 (the model of `step_checks_cost.py`) on 4096 tokens a rank and
step, in a loop that knows of `watch` alone. Steps are in turns without and with the watch, whose hooks stay and return
at once in those without. Figures are shares of the step without, with a bootstrap interval (harness/bench/stats.py):

- `direct`: rank 0's clock around all that the watch does, in hooks and in `run.step`, over the rest of the same step.
- `extra`: steps with over steps without. Leaves nothing out, and needs a quiet machine.
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

from benchmarks.costs.step_checks_cost import SEQ_LEN, SEQUENCES, WARMUP, Step, figures
from benchmarks.pages import tables
from harness.capture import run as runs, watch
from harness.models.workload import workload_for
from tests.support.factory import small_config
from tests.support.spawn import run_ranks

BLOCKS = 6
CELLS = ("fsdp2", "ddp")


def model_of(name: str) -> nn.Module:
    config = small_config()
    model = config.model
    model.dim, model.num_layers, model.ffn_dim, model.vocab_size = 512, 4, 1344, 256
    model.num_heads = model.num_kv_heads = 8
    model.max_seq_len = 2048
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


def one_cell(rank: int, name: str, folder: str) -> list[Step]:
    """Every step of this rank after the warm-up."""
    looking = [0.0]
    inner = runs.Guarded.__call__

    def timed(guarded: Any, *args: Any, **keywords: Any) -> Any:
        began = time.perf_counter()
        try:
            return inner(guarded, *args, **keywords)
        finally:
            looking[0] += time.perf_counter() - began

    runs.Guarded.__call__ = timed  # type: ignore[method-assign] # in this process alone
    model = model_of(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = watch(model, optimizer, Path(folder) / "study" / name, steps=[])
    generator = torch.Generator().manual_seed(rank)
    found = []
    for number in range(WARMUP + 2 * BLOCKS):
        rows = torch.randint(0, 256, (SEQUENCES // 2, SEQ_LEN + 1), generator=generator)
        watches = number % 2 == 1
        began, looking[0], run.problem = time.perf_counter(), 0.0, "" if watches else "left out"
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss, data=rows)
        found.append(Step(time.perf_counter() - began, looking[0]))
    run.problem = ""
    run.close()
    return found[WARMUP:]


def summary(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return figures(run_ranks(partial(one_cell, folder=folder), 2, name)[0])


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
