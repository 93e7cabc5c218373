"""Tensor bytes of a ZeRO-3 step at its peak, ours beside FSDP2's. Writes data/peak_bytes.json.

    python benchmarks/costs/peak_bytes.py

The model, batch and optimizer of `experiment=bench_comm` on two ranks, engines and dtypes in turns, each several times
in processes of its own. What is counted is what torch's allocator hands out, whoever asks (`harness.probe.storage`): of
the rank that holds most, in the last of four steps. How far ranks part within a step decides how long one holds what
another still reads, so peaks differ a little from time to time: the median stands beside the least and the most.
"""

from __future__ import annotations

import platform
import statistics

import torch

from benchmarks.pages import tables
from harness.config.compose import compose
from harness.engines.protocol import Microbatch, engine_class
from harness.models.workload import LlamaWorkload
from harness.probe.storage import StorageMeter
from tests.support.factory import ranks_of
from tests.support.spawn import run_ranks

RANKS, STEPS, TIMES = 2, 4, 5
ENGINES = ("native", "fsdp2")
DTYPES = ("fp32", "bf16", "bf16_comm")
MIB = 2.0**20


def measure(rank: int, engine_name: str, dtype: str) -> tuple[int, int]:
    """Bytes between steps and at the peak of the last one, on this rank."""
    asked = (f"engine={engine_name}", "experiment=bench_comm", "sharding=optim_grads_params", f"dtype={dtype}")
    config = compose([*asked, f"mesh.world_size={RANKS}"]).typed
    meter = StorageMeter()
    engine = engine_class(config.engine.name)(LlamaWorkload(config), config, ranks_of(config, rank))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        shape = config.train.microbatch_size, config.data.seq_len + 1
        tokens = torch.randint(0, config.model.vocab_size, shape, generator=generator)
        with meter.step():
            engine.forward_backward(Microbatch(tokens[:, :-1], tokens[:, 1:]), last=True)
            engine.step(1e-3)
    steps = meter.finish()
    engine.close()
    if steps is None:
        raise RuntimeError("this build of torch does not let every thread's allocations be followed")
    return steps[-1].persistent, steps[-1].peak


def main() -> None:
    found: dict[str, dict[str, list[tuple[int, int]]]] = {dtype: {name: [] for name in ENGINES} for dtype in DTYPES}
    for _ in range(TIMES):
        for dtype, engine in ((dtype, engine) for dtype in DTYPES for engine in ENGINES):
            kept, peaks = zip(*run_ranks(measure, RANKS, engine, dtype), strict=True)
            found[dtype][engine].append((max(kept), max(peaks)))
    rows = {dtype: {name: row(runs) for name, runs in each.items()} for dtype, each in found.items()}
    for dtype, each in rows.items():
        for name, figures in each.items():
            print(dtype, name, *(f"{key} {count / MIB:.1f}" for key, count in figures.items()), sep="  ")
    facts = {"torch": torch.__version__, "machine": platform.machine(), "times": TIMES, "rows": rows}
    tables.write("peak_bytes.json", facts)


def row(runs: list[tuple[int, int]]) -> dict[str, int]:
    """Bytes between steps, and the peak: median, least and most."""
    kept, peaks = zip(*runs, strict=True)
    middle = {"kept": int(statistics.median(kept)), "peak": int(statistics.median(peaks))}
    return {**middle, "least": min(peaks), "most": max(peaks)}


if __name__ == "__main__":
    from benchmarks.costs import peak_bytes  # ranks import what they run by name

    peak_bytes.main()
