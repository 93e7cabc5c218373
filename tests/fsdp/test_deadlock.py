"""Ranks that wait for each other are told so at once; slow ones, and slow exchanges, are not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness.fsdp.comm.device import DeviceRuntime
from harness.fsdp.guards import deadlock, watchdog
from harness.fsdp.guards.deadlock import Stand, Stands, all_stuck
from harness.fsdp.guards.watchdog import Watchdog
from tests.fsdp.hanging import GENEROUS_S, Told, agree, build, provoke, step
from tests.fsdp.pairs import STRATEGIES
from tests.support.covering import once
from tests.support.mutants import Slip, each
from tests.support.spawn import run_ranks

SUSPECT_S, LIMIT_S = 0.3, 60.0
SHARDED = STRATEGIES[1:]
"""Strategies under which ranks that skip a backward do not go on with other ranks' next one."""


def at(*waits: str, **begun: int) -> Stand:
    """Waits by the names they are for, "a+b" for one of two."""
    return Stand([name.split("+") if name else [] for name in waits], begun)


STANDS: dict[str, tuple[bool, list[Stand]]] = {
    "each lacks the other's": (True, [at("a", a=2), at("b", a=1, b=1)]),
    "around three ranks": (True, [at("a", a=1, c=1), at("b", a=1, b=1), at("c", b=1, c=1)]),
    "one of two is enough": (True, [at("a+b", a=1, b=1, c=1), at("d", a=1, c=1, d=1)]),
    "all have begun it": (False, [at("a", a=2), at("a", a=2)]),
    "the second is on its way": (False, [at("a", a=2, b=3), at("b", a=1, b=3), at("b", a=1, b=3)]),
    "one of a rank's two waits is on its way": (False, [at("a", "c", a=2, c=1), at("b", a=1, b=1, c=1)]),
    "nobody knows what for": (False, [at("a", a=2), at("", a=1, b=1)]),
    "one waits for nothing": (False, [at("a", a=2), at(a=1, b=1)]),
}


@pytest.mark.parametrize("name", STANDS)
def test_ranks_are_stuck_where_each_wait_is_for_what_another_has_not_begun(name: str) -> None:
    stuck, stands = STANDS[name]
    assert all_stuck(dict(enumerate(stands))) is stuck


SLIPS = {
    "one wait is enough": (
        "A rank is taken for stuck though one of its waits is for what all have begun",
        Slip(deadlock, "all_stuck", "all(_is_vain", "any(_is_vain"),
    ),
    "slow is stuck": (
        "Ranks whose exchange is slow are taken for stuck",
        Slip(deadlock, "_is_vain", "count > each", "count >= each"),
    ),
    "two ranks alone": (
        "Ranks that wait for each other in a circle are not seen",
        Slip(deadlock, "_is_vain", "for each in others)", "for each in others[:1])"),
    ),
}


@pytest.mark.parametrize("name", each("Deadlocks", [(name, breaks) for name, (breaks, _) in SLIPS.items()]))
def test_a_wrong_judgement_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SLIPS[name][1].put(monkeypatch)
    wrong = [name for name, (stuck, s) in STANDS.items() if deadlock.all_stuck(dict(enumerate(s))) is not stuck]
    assert wrong


# -- ranks that train --------------------------------------------------------------------------------------------------


@contextmanager
def impatient() -> Iterator[None]:
    with mock.patch.object(deadlock, "SUSPECT_S", SUSPECT_S):
        yield


def skipping(rank: int, limit_s: float = LIMIT_S, strategies: tuple[str, ...] = SHARDED) -> list[Told]:
    """The second rank leaves out a backward."""
    found = []
    for strategy in strategies:
        with impatient():
            _, wrapped, optimizer = build(dist.new_group([0, 1]), strategy, watchdog_timeout_s=limit_s)

            def steps(wrapped: Any = wrapped, optimizer: Any = optimizer) -> None:
                step(wrapped, optimizer)
                if rank == 1:
                    wrapped(torch.ones(2, 6))
                    optimizer.step()
                for _ in range(3):
                    step(wrapped, optimizer)

            found.append(provoke(steps))
            provoke(wrapped.close)
        dist.barrier()
    return found


@once
def skipped() -> list[list[Told]]:
    return run_ranks(skipping, 2)


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_rank_that_leaves_out_a_backward_is_told_at_once(strategy: str) -> None:
    message = agree([told[SHARDED.index(strategy)] for told in skipped()])
    assert GENEROUS_S < LIMIT_S, "it was not the limit"
    assert message.startswith("ranks wait for each other")
    assert "mismatch, collective number" in message
    assert message.endswith("leaves a batch out, runs one with its loss times 0")


def late(rank: int, mutant: bool) -> Told:
    """The second rank comes late, longer than others wait before they tell what for."""
    slip = mock.patch.object(deadlock, "all_stuck", return_value=True)
    tells = mock.patch.object(watchdog.Watchdog, "_stand", return_value=Stand([], {}))
    with impatient():
        if mutant:
            slip.start(), tells.start()
        model, wrapped, optimizer = build(dist.new_group([0, 1]), "optim_grads_params", watchdog_timeout_s=LIMIT_S)
        step(wrapped, optimizer)
        if rank == 1:  # whoever is to tell of it has time to, on a loaded machine
            model.stop = lambda: time.sleep(2 * watchdog.TICK_S + SUSPECT_S + (4 if mutant else 0.5))
        found = provoke(lambda: step(wrapped, optimizer))
        provoke(wrapped.close)
        mock.patch.stopall()
    return found


def well(rank: int) -> tuple[str, list[bool], list[bool]]:
    """What a late rank is told; who looks for such ranks; and whether one that has found them says so, where others
    look beside it, and alone."""
    parts = [dist.new_group([each_rank]) for each_rank in range(2)]
    world, runtime = dist.group.WORLD, DeviceRuntime(torch.device("cpu"))
    groups: list[Any] = [[world], [world, parts[rank]], [world]]
    limits = (LIMIT_S, LIMIT_S, 2 * deadlock.SUSPECT_S)
    with mock.patch.object(Watchdog, "_listen"):  # it is asked here alone
        made = [Watchdog(of, runtime, limit, lambda: "") for of, limit in zip(groups, limits, strict=True)]
    looks, found = [each_one._stands is not None for each_one in made], []
    with mock.patch.object(Stands, "is_deadlock", return_value=True):
        found.append(made[0]._finds_deadlock())
        for other in made[1:]:
            other.close()
        found.append(made[0]._finds_deadlock())
    made[0].close()
    return late(rank, False).error, looks, found


def test_a_late_rank_is_none_and_parts_of_ranks_or_several_models_are_not_judged() -> None:
    assert run_ranks(well, 2) == [("", [True, False, False], [False, True])] * 2


@pytest.mark.parametrize(
    "name", each("Deadlocks", [("who computes is asked, too", "A rank that is late is taken for one that waits")])
)
def test_a_watchdog_that_takes_late_ranks_for_stuck_is_found(name: str) -> None:
    assert {told.error for told in run_ranks(late, 2, True)} == {"CollectiveError"}


def blind(rank: int) -> list[Told]:
    with mock.patch.object(watchdog.Watchdog, "_finds_deadlock", return_value=False):
        return skipping(rank, 2.0, SHARDED[-1:])


@pytest.mark.parametrize(
    "name", each("Deadlocks", [("nobody looks", "Ranks that wait for each other do so until the limit")])
)
def test_a_watchdog_that_does_not_look_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    message = agree([told[0] for told in run_ranks(blind, 2)])
    assert message.startswith("a collective did not come about within 2 s")
