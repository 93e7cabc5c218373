"""Gradients that another optimizer forgot: refused on all ranks, also where one rank alone had any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from harness.fsdp.comm.communicator import Communicator
from tests.fsdp.checked import Mutant, holds, is_found
from tests.fsdp.pairs import STRATEGIES
from tests.fsdp.test_optimizers import World, _two, world_of
from tests.support.mutants import each


def begun(rank: int, strategy: str) -> tuple[World, Any, Any]:
    """A backward that reaches the generator on the first rank alone."""
    world = world_of(strategy)
    world.rank = rank
    makes, judges = _two(world)
    world.backward(0, detached=rank == 1)
    return world, makes, judges


def forgotten(rank: int, strategy: str) -> list[str]:
    world, makes, judges = begun(rank, strategy)
    judges.zero_grad()
    sharded = world.model._sharded_optimizer
    try:
        sharded.lost.check(makes, world.model._parts.everyone)  # type: ignore[union-attr,operator] # torch's __getattr__
    except RuntimeError as error:
        told = [] if "forgotten by the zero_grad() of another optimizer" in str(error) else [str(error)]
    else:
        told = ["it would step, on this rank"]
    world.model.close()  # type: ignore[operator] # as above
    return told


def stepping(rank: int, strategy: str) -> list[str]:
    """The same by step(); then each forgets its own, and goes on."""
    world, makes, judges = begun(rank, strategy)
    judges.zero_grad()
    try:
        makes.step()
        told = ["it stepped"]
    except RuntimeError as error:
        told = [] if "forgotten by the zero_grad() of another optimizer" in str(error) else [str(error)]
    makes.zero_grad()
    world.backward(1)
    judges.step()
    makes.step()
    world.model.close()  # type: ignore[operator] # as above
    return told


def nothing_was_lost(rank: int, strategy: str) -> list[str]:
    """The generator had no gradient on any rank: it steps without, as one process does, and then with one."""
    world = world_of(strategy)
    world.rank = rank
    makes, judges = _two(world)
    world.backward(0, detached=True)
    judges.step()
    judges.zero_grad()
    makes.step()
    world.backward(1)
    makes.step()
    world.model.close()  # type: ignore[operator] # as above
    return []


CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    "forgotten": forgotten,
    "stepping": stepping,
    "nothing was lost": nothing_was_lost,
}


def alone(self: Communicator, values: Tensor, purpose: str) -> Tensor:
    return values


MUTANTS = {
    "each rank decides": Mutant(
        "A rank that had no gradient goes on where another one stops",
        lambda: mock.patch.object(Communicator, "sum_scalars", alone),
        "forgotten",
        "no_shard",
    )
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_stop_or_none(strategy: str, check: str) -> None:
    holds(__name__, strategy, check)


@pytest.mark.parametrize(
    "name", each("The engine, by how optimizers are used", ((n, m.breaks) for n, m in MUTANTS.items()))
)
def test_a_mutant_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    is_found(__name__, name, killed_in)
