"""Tied, frozen, unused, scalar, empty and twice-called parameters, in odd shapes, against plain torch in fp64."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache

import pytest
import torch

from tests.fsdp.awkward import Outcome, Setup, train_plain, train_sharded
from tests.support.covering import Cover, once
from tests.support.spawn import run_ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SETUPS = [
    *(Setup(s, k, d, o) for s, k, d, o in itertools.product(STRATEGIES, (1, 2), (False, True), ("sgd", "adamw"))),
    *(Setup(s, 2, True, units=False) for s in STRATEGIES),
    *(Setup("optim_grads_params", 2, d, prefetch=p) for p, d in itertools.product((0, 3), (False, True))),
    *(Setup(s, 2, False, compute=torch.float64) for s in STRATEGIES),
]


TRAININGS = Cover(
    itertools.product((1, 2, 3, 4), SETUPS),
    values=lambda case: (case[0], *dataclasses.astuple(case[1])),
    key=lambda case: case[0],
)
"""Ranks and what they train."""


def ordered(strategy: str, diverging: bool) -> Setup:
    return Setup(strategy, 2, diverging, numerics="ordered")


ALIKE = (STRATEGIES[:2], STRATEGIES[2:])
"""Strategies that sum microbatches and ranks in the same order."""
BITWISE = Cover(itertools.product((2, 3, 4), ALIKE, (False, True)), key=lambda case: case[0])


@once
def outcomes(world_size: int, setups: tuple[Setup, ...]) -> dict[Setup, Outcome]:
    return dict(zip(setups, run_ranks(train_sharded, world_size, list(setups))[0], strict=True))


@cache
def reference(world_size: int, setup: Setup) -> Outcome:
    return train_plain(world_size, setup, torch.float64)


def setup_name(case: tuple[int, Setup]) -> str:
    return f"{case[0]}-{case[1]}"


@pytest.mark.parametrize("case", TRAININGS.params(setup_name))
def test_awkward_models_train_as_plain_torch_does(case: tuple[int, Setup]) -> None:
    world_size, setup = case
    found = outcomes(world_size, tuple(each for _, each in TRAININGS.batch(case)))[setup]
    check(found, world_size, setup)


def check(found: Outcome, world_size: int, setup: Setup) -> None:
    plain = Setup("plain", setup.k, setup.diverging, setup.optimizer)
    right = reference(world_size, plain)
    unit = 2.0**-52 if setup.compute is torch.float64 else 2.0**-24
    assert set(found.gradients) == set(right.gradients)
    for name, gradient in right.gradients.items():
        error = (found.gradients[name].double() - gradient).norm()
        assert error <= 64 * unit * (gradient.norm() + 1e-3), f"gradient of {name}"
    for name, weight in right.weights.items():
        # eps = 1e-4 bounds how far Adam can stretch a rounding: lr / eps per step, three steps
        error = (found.weights[name].double() - weight).abs()
        assert not error.numel() or error.max() <= 3 * (0.02 / 1e-4) * 64 * unit, f"weight {name}"
    for norm, expected in zip(found.norms, right.norms, strict=True):
        assert norm == pytest.approx(expected, rel=4096 * unit)
    assert min(right.norms) > setup.clip, "clipping must act"


@pytest.mark.parametrize("case", BITWISE.params())
def test_ordered_holds_for_awkward_models(case: tuple[int, tuple[str, str], bool]) -> None:
    world_size, strategies, diverging = case
    batch = tuple(ordered(each, split) for _, alike, split in BITWISE.batch(case) for each in alike)
    one, other = (outcomes(world_size, batch)[ordered(strategy, diverging)] for strategy in strategies)
    check(one, world_size, ordered(strategies[0], diverging))
    assert one.norms == other.norms
    assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
