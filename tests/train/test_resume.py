"""The resume oracle: interrupted after every step, and every logged number is that of the uninterrupted run.

Our own engine is interrupted after every step here, the others after some; `make test-all` does all of all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.config.schema import (
    Config,
    Dtype,
    EngineName,
    FaultStrength,
    Numerics,
    OptimizerName,
    OuterStrategy,
    Strategy,
)
from harness.store.fields import compared
from harness.store.metrics import read_metrics
from tests.support.factory import small_config, stopping, train
from tests.support.layouts import local_of
from tests.support.mutants import kills
from tests.support.spawn import run_ranks
from tests.train.runs import Passing, summary

STEPS = 12
EVERY_STEP, SOME = tuple(range(1, STEPS)), (1, 4, STEPS - 1)
"""After which a run is interrupted: `SOME` are in the warm-up, past it, and the last there is."""


def config_of(**changes: Any) -> Config:
    """Twelve steps with a schedule that still moves at the end; norms every step."""
    return small_config(
        **{"train__steps": STEPS, "train__warmup_steps": 3, "train__param_norm_every": 1, "optimizer__clip_norm": 0.5}
        | changes
    )


def native(**changes: Any) -> Config:
    config = config_of(engine__name=EngineName.native, mesh__world_size=2, **changes)
    config.dtype.compute, config.dtype.grad_comm = Dtype.bf16, Dtype.bf16
    config.dtype.grad_accum = Dtype.fp32
    return config


def exact(strategy: Strategy, world: int, outer: OuterStrategy | None = None, **changes: Any) -> Config:
    config = config_of(
        engine__name=EngineName.native,
        mesh__world_size=world,
        sharding__strategy=strategy,
        numerics__mode=Numerics.exact,
        **changes,
    )
    if outer is not None:
        config.mesh.dp_outer, config.sharding.outer = 2, outer
    return config


CONFIGS: dict[str, Config] = {
    "single sgd": config_of(optimizer__name=OptimizerName.sgd, optimizer__momentum=0.9),
    "native zero-3 bf16": native(sharding__strategy=Strategy.optim_grads_params),
    "fsdp2 zero-2": config_of(
        engine__name=EngineName.fsdp2, mesh__world_size=2, sharding__strategy=Strategy.optim_grads
    ),
    "ddp": config_of(engine__name=EngineName.ddp, mesh__world_size=2),
    "native hfsdp exact": exact(Strategy.optim_grads_params, 4, OuterStrategy.optim),
}


def numbers(run: Path) -> list[dict[str, Any]]:
    """Every logged number but costs, as text: bit for bit."""
    return [
        {key: json.dumps(value) for key, value in compared(line).items()}
        for line in read_metrics(run / "metrics.jsonl")
    ]


class Watched(Passing):
    """An engine that notes what state it has when its first microbatch after building comes."""

    def __init__(self, engine: Any, seen: list[dict[str, Tensor]]) -> None:
        super().__init__(engine)
        self.seen_first = seen

    def forward_backward(self, batch: Any, *, last: bool) -> Any:
        if not self.seen_first:
            self.seen_first.append(copied(self.engine))
        return self.engine.forward_backward(batch, last=last)


def copied(engine: Any) -> dict[str, Tensor]:
    return {key: local_of(tensor).clone() for key, tensor in engine.state().tensors.items()}


def interrupted(rank: int, root: Path, config: Config, steps: Sequence[int]) -> list[str]:
    """What differs, for an interruption after each of these steps."""
    whole = root / "whole"
    states: dict[int, dict[str, Tensor]] = {}

    class Noting(Watched):
        steps = 0

        def step(self, lr: float) -> float:
            norm: float = self.engine.step(lr)
            Noting.steps += 1
            states[Noting.steps] = copied(self.engine)
            return norm

    train(config, whole, rank, wrap_engine=lambda engine: Noting(engine, []))
    told = []
    for after in steps:
        run = root / f"stopped-{after}"
        torch.manual_seed(100 * after + rank)
        first = train(config, run, rank, should_stop=stopping(after))
        if (first.status, first.step) != ("preempted", after):
            told.append(f"{after}: {first}")
        random_state = torch.get_rng_state()
        torch.manual_seed(1)
        seen: list[dict[str, Tensor]] = []
        train(config, run, rank, wrap_engine=lambda engine, seen=seen: Watched(engine, seen))
        told += [f"{after}: random numbers"] if not torch.equal(torch.get_rng_state(), random_state) else []
        told += [f"{after}: {key} before the first update" for key in different(seen[0], states[after])]
        if rank == 0:
            told += [f"{after}: {text}" for text in against(whole, run)]
            shutil.rmtree(run)
    return told


def different(a: dict[str, Tensor], b: dict[str, Tensor]) -> Iterator[str]:
    yield from sorted(a.keys() ^ b.keys())
    yield from (key for key in sorted(a.keys() & b.keys()) if not torch.equal(a[key], b[key]))


def against(whole: Path, run: Path) -> list[str]:
    """Lines, restored state, and final weights."""
    right, held = numbers(whole), numbers(run)
    told = [] if len(held) == len(right) == STEPS else [f"{len(held)} lines"]
    told += [
        f"{a['step']}: {sorted(k for k in a if a[k] != b[k])}" for a, b in zip(right, held, strict=False) if a != b
    ]
    ends = [summary(each) for each in (whole, run)]
    told += [] if ends[0]["final_weights"] == ends[1]["final_weights"] else ["final weights"]
    told += [f"restored {each}" for each in ends[1]["restored"]["wrong"]]
    return told


CASES = [
    *(pytest.param(name, SOME, id=f"{name}, some steps") for name in CONFIGS),
    *(pytest.param(name, EVERY_STEP, id=name, marks=pytest.mark.full) for name in CONFIGS),
]


@pytest.mark.parametrize(("name", "steps"), CASES)
def test_every_number_after_every_interruption(name: str, steps: Sequence[int], tmp_path: Path) -> None:
    config = CONFIGS[name]
    found = run_ranks(interrupted, config.mesh.world_size, tmp_path, config, steps)
    assert found == [[]] * config.mesh.world_size


# -- under another layout ----------------------------------------------------------------------------------------------

JOURNEY = (
    exact(Strategy.optim, 2),
    exact(Strategy.optim_grads_params, 4, OuterStrategy.optim),
    exact(Strategy.no_shard, 1),
    exact(Strategy.optim_grads, 4, OuterStrategy.no_shard),
)


def leg(rank: int, root: Path, config: Config, number: int) -> None:
    """Three steps under one layout, begun from the layout before."""
    if number:
        config.ckpt.load = str(root / f"leg-{number - 1}")
    train(config, root / f"leg-{number}", rank, should_stop=stopping(3))


def test_four_layouts_make_one_exact_run(tmp_path: Path) -> None:
    whole = exact(Strategy.no_shard, 1)
    whole.engine.name = EngineName.single
    train(whole, tmp_path / "whole")
    for number, config in enumerate(JOURNEY):
        run_ranks(leg, config.mesh.world_size, tmp_path, config, number)
    held = [line for number in range(len(JOURNEY)) for line in numbers(tmp_path / f"leg-{number}")]
    assert held == numbers(tmp_path / "whole")
    ends = [summary(tmp_path / name) for name in ("whole", "leg-3")]
    assert ends[0]["final_weights"] == ends[1]["final_weights"]
    assert ends[1]["restored"]["layout"]["strategy"] == "no_shard"
    assert ends[1]["step"] == STEPS


# -- faults of resuming ------------------------------------------------------------------------------------------------

RESUME_FAULTS = (
    "F16_tail_lost_on_resume",
    "F17_shards_not_refreshed",
    "F18_absent_weights_skipped",
    pytest.param(
        "optimizer_step_lost_on_resume",
        marks=kills(
            "The engine, by saved state", "step counts", "Loading restores all but the optimizer's step counts"
        ),
    ),
    "moments_lost_on_resume",
)


def faulty(rank: int, root: Path, name: str) -> list[str]:
    config = native(sharding__strategy=Strategy.optim_grads_params)
    train(config, root / "whole", rank)
    train(config, root / "run", rank, should_stop=stopping(5))
    config.fault.name, config.fault.strength = f"tests.faults.resume:{name}", FaultStrength.full
    train(config, root / "run", rank)
    return against(root / "whole", root / "run") if rank == 0 else []


@pytest.mark.parametrize("name", RESUME_FAULTS)
def test_a_fault_of_resuming_shows_at_once_and_in_the_numbers(name: str, tmp_path: Path) -> None:
    told, _ = run_ranks(faulty, 2, tmp_path, name)
    assert any(text.startswith("restored ") for text in told)
    assert any(text[0].isdigit() for text in told)
