"""What it costs that every step is looked at (`measure.step_checks`). Writes data/step_checks_cost.json.

    python benchmarks/costs/step_checks_cost.py [CELL ...]

Two ranks of one thread train 12.7 M weights (the model of `experiment=bench_comm`) in fp32, so that computing decides,
on 4096 tokens a rank and step, in one microbatch or in two: local gradients, and weights as forwards see them, are
looked at in each. Figures are processor seconds of rank 0 around all that looking does, in hooks and between
(`Cadence`), over those of the rest: caches that looking empties count as training.

- `looked`: of a step that is looked at, with a bootstrap interval over steps (harness/bench/stats.py).
- `run`: of a whole run at the default `measure.step_checks_share`, and of its second half, with the steps looked at.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pages import tables
from harness.bench.stats import Interval, median_ratio
from harness.config.schema import CkptPolicy, EngineName, Strategy
from harness.train import loop
from harness.train.step_checks import StepChecks
from tests.support.factory import small_config, train
from tests.support.spawn import run_ranks

WARMUP, STEPS, RUN_STEPS, SEQUENCES, SEQ_LEN = 2, 6, 64, 16, 512
IN_TWO, SMALL, RUN = ", two microbatches", ", 3.4 M weights", ", a run"
CELLS = {
    **{f"native {each.name}": (EngineName.native, each) for each in Strategy},
    "fsdp2 optim_grads_params": (EngineName.fsdp2, Strategy.optim_grads_params),
    "ddp": (EngineName.ddp, Strategy.no_shard),
}
MODEL = {"dim": 512, "num_layers": 4, "ffn_dim": 1344, "vocab_size": 256, "max_seq_len": 2048}
MODEL |= {"num_heads": 8, "num_kv_heads": 8}
OURS = ("native no_shard", "native optim_grads_params")
CELLS |= {f"{name}{kind}": CELLS[name] for kind in (IN_TWO, SMALL) for name in OURS}
CELLS |= {f"native no_shard{kind}": CELLS["native no_shard"] for kind in (RUN, f"{SMALL}{RUN}")}


class Step(NamedTuple):
    """Seconds of one step, and of looking within it."""

    wall: float
    looking: float


def one_cell(rank: int, name: str) -> list[Step]:
    """Every step of this rank, in processor seconds."""
    found: list[StepChecks] = []

    class Opened:
        @staticmethod
        def open(*args: Any) -> StepChecks:
            step_checks = StepChecks.open(*args)
            assert step_checks is not None
            found.append(step_checks)
            return step_checks

    loop.StepChecks = Opened  # type: ignore[misc, assignment] # in this process alone
    engine, strategy = CELLS[name]
    sizes = MODEL | ({"dim": 256, "ffn_dim": 704} if SMALL in name else {})
    config = small_config(
        **{f"model__{key}": size for key, size in sizes.items()},
        engine__name=engine,
        mesh__world_size=2,
        sharding__strategy=strategy,
        data__seq_len=SEQ_LEN,
        data__num_sequences=256,
        train__steps=RUN_STEPS if name.endswith(RUN) else WARMUP + STEPS,
        train__global_batch_size=SEQUENCES,
        train__microbatch_size=SEQUENCES // (4 if IN_TWO in name else 2),
        train__param_norm_every=0,
        ckpt__policy=CkptPolicy.none,
        measure__capture_steps=[],
        measure__step_checks=True,
        measure__again=0.0,
    )
    if not name.endswith(RUN):
        config.measure.step_checks_share = 1.0
    ends: list[Step] = [Step(time.process_time(), 0.0)]

    def over(_: Any) -> None:
        ends.append(Step(time.process_time(), found[0].cadence.looking_s))

    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder), rank, progress=over)
    return [Step(*(after - before for before, after in zip(*pair, strict=True))) for pair in zip(ends, ends[1:])]  # noqa: B905, RUF007 - one fewer


def summary(name: str) -> dict[str, Any]:
    steps = run_ranks(one_cell, 2, name)[0]
    if not name.endswith(RUN):
        steps = steps[WARMUP:]
        looked = median_ratio([each.wall for each in steps], [each.wall - each.looking for each in steps])
        step_s = round(statistics.median(each.wall - each.looking for each in steps), 3)
        return {"step_s": step_s, "looked": share(looked)}
    return {"run": over_run(steps, looked_at=sum(each.looking > 1e-3 for each in steps))}


def over_run(steps: list[Step], looked_at: int) -> dict[str, float]:
    halves = {"whole": steps, "second_half": steps[len(steps) // 2 :]}
    shares = {
        name: round(sum(e.looking for e in of) / sum(e.wall - e.looking for e in of), 4) for name, of in halves.items()
    }
    return {"steps": len(steps), "looked_at": looked_at, **shares}


def figures(steps: list[Step]) -> dict[str, Any]:
    """Args: steps: in turns without and with what is looked at."""
    without, having = ([step.wall for step in steps[begin::2]] for begin in (0, 1))
    rest = [step.wall - step.looking for step in steps[1::2]]
    return {
        "step_s": round(statistics.median(without), 3),
        "direct": share(median_ratio(having, rest)),
        "extra": share(median_ratio(having, without)),
    }


def share(ratio: Interval | None) -> dict[str, float]:
    assert ratio is not None
    return {key: round(getattr(ratio, key) - 1.0, 4) for key in ("value", "low", "high")}


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = tables.parser(__doc__)
    parser.add_argument("cells", nargs="*", metavar="CELL", help=f"{'; '.join(CELLS)} (default: all)")
    names = parser.parse_args().cells or list(CELLS)
    if unknown := set(names) - set(CELLS):
        parser.error(f"no cell {', '.join(sorted(unknown))}")
    found = {}
    for name in names:
        load = os.getloadavg()[0]
        found[name] = summary(name) | {"load_average": {"before": load, "after": os.getloadavg()[0]}}
        print(name, found[name], flush=True)
    if names == list(CELLS):
        weights, tokens = f"12.7 M, or what{SMALL} says; fp32", SEQUENCES // 2 * SEQ_LEN
        told = {"weights": weights, "tokens_a_rank": tokens, "cells": found}
        tables.write("step_checks_cost.json", told | {"versions": tables.versions("torch"), "cores": os.cpu_count()})


if __name__ == "__main__":
    from benchmarks.costs import step_checks_cost  # ranks import what they run by name

    step_checks_cost.main()
