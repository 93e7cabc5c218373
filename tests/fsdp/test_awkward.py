"""Tied, frozen, unused, scalar, empty and twice-called parameters, in odd shapes, against plain torch in fp64."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from tests.fsdp.awkward import Outcome, Setup, train_plain, train_sharded
from tests.support.spawn import run_ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SETUPS = [
    *(Setup(s, k, d, o) for s, k, d, o in itertools.product(STRATEGIES, (1, 2), (False, True), ("sgd", "adamw"))),
    *(Setup(s, 2, True, units=False) for s in STRATEGIES),
    *(Setup(s, 2, d, numerics="ordered") for s, d in itertools.product(STRATEGIES, (False, True))),
    *(Setup("optim_grads_params", 2, d, prefetch=p) for p, d in itertools.product((0, 3), (False, True))),
    *(Setup(s, 2, False, compute=torch.float64) for s in STRATEGIES),
]


@cache
def outcomes(world_size: int) -> dict[Setup, Outcome]:
    return dict(zip(SETUPS, run_ranks(train_sharded, world_size, SETUPS)[0], strict=True))


@cache
def reference(world_size: int, setup: Setup) -> Outcome:
    return train_plain(world_size, setup, torch.float64)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_awkward_models_train_as_plain_torch_does(world_size: int, setup: Setup) -> None:
    found = outcomes(world_size)[setup]
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


@pytest.mark.parametrize("diverging", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ordered_holds_for_awkward_models(world_size: int, diverging: bool) -> None:
    found = outcomes(world_size)

    def same(a: str, b: str) -> bool:
        x, y = (found[Setup(s, 2, diverging, numerics="ordered")] for s in (a, b))
        return x.norms == y.norms and all(torch.equal(x.weights[n], y.weights[n]) for n in x.weights)

    assert same("no_shard", "optim")
    assert same("optim_grads", "optim_grads_params")
