"""What looking for NaN in every gradient costs a step. Writes data/nan_guard.json.

    python benchmarks/costs/nan_guard.py

Figures are processor time of one rank (its threads together), lower quartiles: other processes on the machine take wall
time, not that. `off` and `on`: whole steps, taken in turns. `alone`: the guard's own work of a step, by itself, which
a difference of two steps is too small to resolve.
"""

from __future__ import annotations

import platform
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.pages import tables
from harness.config.schema import Config, EngineName, Strategy
from harness.engines.adapters.native import NativeEngine
from harness.engines.protocol import Microbatch, Ranks
from harness.models.workload import LlamaWorkload
from tests.support.spawn import run_ranks

RANKS = 2
STEPS = 12
TOKENS = 256
"""Of one microbatch. The guard's work does not grow with it, the step's does: real runs have far more."""


def config_of(strategy: str, guarded: bool) -> Config:
    """About 7 million parameters in fp32 on two ranks, one microbatch a rank and step."""
    config = Config()
    model = config.model
    model.vocab_size, model.dim, model.num_layers, model.ffn_dim = 1024, 256, 8, 768
    model.num_heads, model.num_kv_heads, model.max_seq_len = 4, 4, TOKENS
    config.data.seq_len = TOKENS
    config.engine.name, config.sharding.strategy = EngineName.native, Strategy[strategy]
    config.engine.report_nan_in_param_grad = guarded
    config.mesh.world_size = RANKS
    config.train.microbatch_size, config.train.global_batch_size = 1, RANKS
    return config


def batch_of(rank: int) -> Microbatch:
    tokens = torch.randint(0, 1024, (1, TOKENS + 1), generator=torch.Generator().manual_seed(rank))
    return Microbatch(tokens[:, :-1], tokens[:, 1:])


def quartile(seconds: list[float]) -> float:
    """Lower quartile, in milliseconds."""
    return statistics.quantiles(seconds, n=4)[0] * 1e3


def measure(rank: int, strategy: str) -> dict[str, float]:
    """Milliseconds of a step without and with the guard, and of the guard alone."""
    engines = {}
    for guarded in (False, True):
        config = config_of(strategy, guarded)
        ranks = Ranks(rank, RANKS, rank, torch.device("cpu"))
        engines[guarded] = NativeEngine(LlamaWorkload(config), config, ranks)
    batch = batch_of(rank)
    times: dict[bool, list[float]] = {False: [], True: []}
    for step in range(STEPS + 3):
        for guarded in (False, True) if step % 2 else (True, False):
            began = time.process_time()
            engines[guarded].forward_backward(batch, last=True)
            engines[guarded].step(1e-3)
            if step >= 3:
                times[guarded].append(time.process_time() - began)
    alone = [_alone(engines[True]) for _ in range(STEPS)]
    for engine in engines.values():
        engine.close()
    return {"off_ms": quartile(times[False]), "on_ms": quartile(times[True]), "alone_ms": quartile(alone)}


def _alone(engine: Any) -> float:
    """Seconds of looking at buckets of the model's sizes and reporting."""
    model = engine.model
    guard = model._parts.guard
    buckets: list[tuple[Any, Tensor]] = [
        (bucket, torch.ones(bucket.layout.bucket_numel, dtype=bucket.dtypes.wire))
        for bucket in model.buckets
        if bucket.trainable
    ]
    began = time.process_time()
    guard.begin_backward()
    for bucket, gradients in buckets:
        guard.look(bucket, gradients)
    guard.report()
    guard.forget()
    return time.process_time() - began


def measure_all(rank: int) -> dict[str, dict[str, float]]:
    return {strategy.name: measure(rank, strategy.name) for strategy in Strategy}


def main() -> None:
    rows = run_ranks(measure_all, RANKS)[0]
    print(f"{'strategy':20} {'off ms':>8} {'on ms':>8} {'alone ms':>9} {'alone / off':>12}")
    for strategy, row in rows.items():
        row["alone_share"] = row["alone_ms"] / row["off_ms"]
        figures = f"{row['off_ms']:8.1f} {row['on_ms']:8.1f} {row['alone_ms']:9.2f} {row['alone_share']:12.2%}"
        print(f"{strategy:20} {figures}")
    facts = {"torch": torch.__version__, "machine": platform.machine(), "tokens": TOKENS, "rows": rows}
    tables.write("nan_guard.json", facts)


if __name__ == "__main__":
    from benchmarks.costs import nan_guard  # ranks import what they run by name

    nan_guard.main()
