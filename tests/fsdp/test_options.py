"""Options change what a step costs, never what it computes: the same bits with each, and the cost they promise."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch

from harness.config.schema import GradBuffer
from harness.engines.protocol import Ranks, engine_class
from harness.models.workload import workload_for
from tests.fsdp.trial import Case, batches
from tests.support.covering import Cover, once
from tests.support.spawn import run_ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
PLAIN: tuple[tuple[str, Any], ...] = ()
OPTIONS: dict[str, tuple[tuple[str, Any], ...]] = {
    "double_buffer": (("double_buffer", True),),
    "no_prefetch": (("prefetch", 0),),
    "prefetch_all": (("prefetch", 100),),
    "concat": (("grad_buffer", GradBuffer.concat),),
    "own_gather_group": (("separate_gather_group", True),),
    "offloaded": (("offload_optimizer", True),),
    "everything": (
        ("double_buffer", True),
        ("grad_buffer", GradBuffer.concat),
        ("separate_gather_group", True),
        ("offload_optimizer", True),
    ),
}


def case(strategy: str, options: tuple[tuple[str, Any], ...], model: str, outer: int = 1) -> Case:
    return Case(
        "native", strategy, 2, 2, 0, "adamw", 0.5, "bf16" if model == "tiny" else "fp32", "ordered", 3, model=model,
        outer=outer, outer_strategy="optim" if outer > 1 else "no_shard", options=options,
    )  # fmt: skip


Trial = tuple[str, str, str]
"""Strategy, option, and model: tiny, odd, or hybrid, which is tiny on two axes."""
TRIALS = Cover(itertools.product(STRATEGIES, OPTIONS, ("tiny", "odd", "hybrid")))


def of(strategy: str, options: tuple[tuple[str, Any], ...], model: str) -> Case:
    name, outer = ("tiny", 2) if model == "hybrid" else (model, 1)
    return case(strategy, options, name, outer)


def measure(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    return [_measure(rank, each) for each in cases]


def _measure(rank: int, case: Case) -> dict[str, Any]:
    config = case.config()
    engine = engine_class(config.engine.name)(
        workload_for(config), config, Ranks(rank, case.world_size, rank, torch.device("cpu"))
    )
    model = engine.model  # type: ignore[attr-defined]
    norms, live = [], []
    for step in range(1, case.steps + 1):
        for index, batch in enumerate(batches(case, rank, step)):
            engine.forward_backward(batch, last=index == case.k - 1)
        norms.append(engine.step(1e-3))
        live.append(model.engine.memory.live_bytes)
    found = {"norms": norms, "weights": dict(engine.named_weights()), "live": live}
    engine.close()
    return found


Found = list[dict[str, Any]]
"""Of each of two ranks."""


@once
def visit(cases: tuple[Case, ...]) -> dict[Case, Found]:
    per_rank = run_ranks(measure, 2, list(cases))
    return {case: [found[index] for found in per_rank] for index, case in enumerate(cases)}


@cache
def compared(trials: tuple[Trial, ...]) -> dict[Trial, tuple[Found, Found]]:
    """Of each trial what was found without the option and with it."""
    cases = {(s, o, m): (of(s, PLAIN, m), of(s, OPTIONS[o], m)) for s, o, m in trials}
    found = visit(tuple(dict.fromkeys(itertools.chain(*cases.values()))))
    return {trial: (found[plain], found[chosen]) for trial, (plain, chosen) in cases.items()}


@cache
def measured() -> dict[Case, Found]:
    """What the tests of single options look at."""
    return visit(tuple(case("optim_grads_params", options, "odd") for options in (PLAIN, OPTIONS["double_buffer"])))


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    equal = all(torch.equal(a["weights"][name], b["weights"][name]) for name in a["weights"])
    return equal and a["norms"] == b["norms"]


@pytest.mark.parametrize("trial", TRIALS.params("-".join))
def test_an_option_changes_no_bit(trial: Trial) -> None:
    plain, chosen = compared(TRIALS.batch(trial))[trial]
    assert all(same(a, b) for a, b in zip(plain, chosen, strict=True))


def test_fixed_buffers_are_all_there_is() -> None:
    """The same bytes after every step: nothing is allocated or freed once all units have run."""
    plain = measured()[case("optim_grads_params", PLAIN, "odd")][0]
    fixed = measured()[case("optim_grads_params", OPTIONS["double_buffer"], "odd")][0]
    assert set(plain["live"]) == {0}
    assert len(set(fixed["live"])) == 1
    assert fixed["live"][0] > 0
