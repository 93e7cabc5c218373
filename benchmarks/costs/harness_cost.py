"""What the harness itself costs a step: data, control exchange, record, meters. Writes data/harness_cost.json.

    python benchmarks/costs/harness_cost.py

An engine that does nothing is run through the real loop, so that all of a step's time is the harness's own. With two
ranks the data is loaded while the exchange is under way. Figures are lower quartiles in milliseconds: other processes
on the machine only ever add, and the load averages before and after say whether they did.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from harness.config.schema import CkptPolicy, Config, EngineName
from harness.control import Control
from harness.probe.collectives import CollectiveMeter
from harness.store.metrics import read_metrics
from tests.support.factory import ranks_of, small_config, train
from tests.support.spawn import run_ranks
from tests.train.wrapped import Idle

STEPS = 400
CALLS = 2000
OUTPUT = Path(__file__).resolve().parents[1] / "data" / "harness_cost.json"


def idle_config(world_size: int) -> Config:
    """The default batch (16 sequences, four to a microbatch), nothing captured or saved."""
    return small_config(
        engine__name=EngineName.single if world_size == 1 else EngineName.ddp,
        mesh__world_size=world_size,
        train__steps=STEPS,
        train__global_batch_size=16,
        train__microbatch_size=4,
        train__param_norm_every=0,
        measure__capture_steps=[],
        ckpt__policy=CkptPolicy.none,
    )


def loop_cost(rank: int, world_size: int) -> dict[str, float]:
    """Milliseconds a step of the loop around an idle engine, and the data's part of it."""
    ticks: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        train(
            idle_config(world_size),
            run_dir,
            rank,
            progress=lambda _: ticks.append(time.perf_counter()),
            wrap_engine=Idle,
        )
        data = [record["time"]["data_s"] for record in read_metrics(run_dir / "metrics.jsonl")]
    whole = [after - before for before, after in itertools.pairwise(ticks)]
    return {"loop": quartile_ms(whole)} | ({"of_which_data": quartile_ms(data)} if data else {})


def one_rank(rank: int) -> dict[str, float]:
    """The loop, and a collective with nobody to wait for: what counting adds to it is the meter's own cost."""
    tensor = torch.ones(1024)
    rounds = range(5)  # the best of five: a whole round can meet a busy machine
    bare = min(timed(lambda: dist.all_reduce(tensor), CALLS) for _ in rounds)  # before any meter has installed itself
    with closing(CollectiveMeter()):
        metered = min(timed(lambda: dist.all_reduce(tensor), CALLS) for _ in rounds)
    return loop_cost(rank, 1) | {"all_reduce_4KiB": bare, "all_reduce_4KiB_metered": metered}


def two_ranks(rank: int) -> dict[str, float]:
    """The loop, and the exchange of losses, digests and stop flags that is part of it."""
    config = idle_config(2)
    with closing(CollectiveMeter()) as meter:
        control = Control(ranks_of(config, rank), dist.new_group(backend="gloo"), meter)
        exchange = timed(lambda: control.report([1.0, 1.0], rank, rank, False), CALLS)
    costs = loop_cost(rank, 2)
    return costs | {"of_which_control": exchange}


def timed(call: Callable[[], Any], count: int) -> float:
    """Lower quartile of a call's milliseconds."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return quartile_ms(seconds)


def quartile_ms(seconds: list[float]) -> float:
    """Lower quartile in milliseconds, to a microsecond."""
    return round(statistics.quantiles(seconds, n=4)[0] * 1e3, 3)


def main() -> None:
    """Measure and write."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    before = os.getloadavg()[0]
    result = {
        "unit": "ms, lower quartile",
        "steps": STEPS,
        "calls": CALLS,
        "one_rank": run_ranks(one_rank, 1)[0],
        "two_ranks": run_ranks(two_ranks, 2)[0],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "cores": os.cpu_count(),
        "load_average": {"before": before, "after": os.getloadavg()[0]},
    }
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(OUTPUT.read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    main()
