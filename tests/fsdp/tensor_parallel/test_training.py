"""Data-parallel by tensor-parallel ranks against one process in fp64, and against each other to the bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fsdp.pairs import STRATEGIES
from tests.fsdp.tensor_parallel.training import (
    Case,
    Record,
    Shape,
    alone,
    train_all,
)
from tests.support.covering import Cover, once
from tests.support.spawn import run_ranks

MESHES = {"2x2": (1, 2, 2), "1x4": (1, 1, 4), "4x1": (1, 4, 1), "2x1x2": (2, 1, 2)}
"""Outer, inner and tensor-parallel ranks."""
TRAINED = {"sgd, clipped": ("sgd", 0.05), "adamw": ("adamw", None)}
MODELS = {
    "untied": Shape(),
    "tied": Shape(tied=True),
    "sequence": Shape(sequence_parallel=True),
    "tied sequence": Shape(tied=True, sequence_parallel=True),
}
CLOSE = {"sgd": 1e-13, "adamw": 3e-10}
"""How far a few steps in fp64 may part: gradients of sums in another order differ by 1e-16, and of one that is as small
as Adam's eps = 1e-8 Adam makes lr / eps = 1e6 times as much in each step."""


def case(mesh: str, strategy: str, outer: str, k: int, trained: str, model: str, **more: Any) -> Case:
    sizes = MESHES[mesh]
    optimizer, clip = TRAINED[trained]
    given: dict[str, Any] = {"outer": sizes[0], "outer_strategy": outer, "k": k, "shape": MODELS[model], "steps": 2}
    return Case(sizes[1], sizes[2], strategy=strategy, optimizer=optimizer, clip=clip, **given | more)


Point = tuple[str, str, str, int, str, str]
POINTS = Cover(
    (
        point
        for point in itertools.product(MESHES, STRATEGIES, ("no_shard", "optim"), (1, 2), TRAINED, MODELS)
        if point[0] == "2x1x2" or point[2] == "no_shard"
    ),
    values=tuple,
    key=lambda _: "four ranks",
)


@once
def records(points: tuple[Point, ...]) -> dict[Point, list[Record]]:
    """Point -> its record on each rank."""
    ran = run_ranks(train_all, 4, [case(*point) for point in points])
    return {point: [of_rank[place] for of_rank in ran] for place, point in enumerate(points)}


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, str]:
    assert list(found) == [name for name in wanted if name in found], "other names, or in another order"
    apart = [(float((value - wanted[name]).abs().max()), name) for name, value in found.items()]
    return max(apart)


@pytest.mark.parametrize("point", POINTS.params(lambda point: "-".join(map(str, point))))
def test_training_equals_one_process_in_fp64(point: Point) -> None:
    ran, wanted = records(POINTS.batch(point))[point], alone(case(*point))
    asked = case(*point)
    close = CLOSE[asked.optimizer]
    told = [ran[place * asked.tp].losses for place in range(asked.data_parallel)]
    assert [sum(each) / len(each) for each in zip(*told, strict=True)] == pytest.approx(wanted.losses, abs=close)
    for record in ran:
        assert furthest(record.gradients, wanted.gradients)[0] < 1e-14
        assert set(record.gradients) == set(wanted.gradients), "the frozen one has none"
        assert set(record.weights) == set(wanted.weights)
        assert furthest(record.weights, wanted.weights)[0] < close
        assert record.norms == pytest.approx(wanted.norms, rel=1e-13)
    assert len({tuple(record.norms) for record in ran}) == 1, "every rank knows the same norm"


# -- to the bit --------------------------------------------------------------------------------------------------------


def exact(sizes: tuple[int, int, int], strategy: str, outer: str, k: int) -> Case:
    """Eight sequences a step, whatever the mesh; fp32."""
    options = (("numerics", "exact"), ("exact_terms", 4), ("grad_divisor", 4))
    return Case(
        sizes[1], sizes[2], sizes[0], strategy, outer, k, Shape(layers=1, sequence_parallel=True), "adamw", 0.05, 2,
        torch.float32, options,
    )  # fmt: skip


EXACT = {
    2: [exact((1, 2, 2), strategy, "no_shard", 2) for strategy in STRATEGIES]
    + [exact((2, 1, 2), "optim_grads_params", "optim", 2)],
    4: [exact((1, 1, 4), strategy, "no_shard", 4) for strategy in ("no_shard", "optim_grads_params")],
    1: [exact((1, 4, 1), strategy, "no_shard", 1) for strategy in ("optim", "optim_grads_params")]
    + [exact((2, 2, 1), "optim_grads", "optim", 1)],
}
"""Meshes by their tensor-parallel ranks: within one, all have the same bits; between them sums of a row differ."""


@once
def exact_runs() -> dict[int, list[Record]]:
    flat = [each for cases in EXACT.values() for each in cases]
    found = iter(run_ranks(train_all, 4, flat)[0])
    return {tp: [next(found) for _ in cases] for tp, cases in EXACT.items()}


@pytest.mark.parametrize("tp", EXACT)
def test_exact_has_the_same_bits_on_every_mesh_with_the_same_tensor_parallelism(tp: int) -> None:
    first, *others = exact_runs()[tp]
    for other in others:
        assert [name for name, value in first.weights.items() if not torch.equal(value, other.weights[name])] == []
        assert other.norms == first.norms
