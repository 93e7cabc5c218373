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
from harness.fsdp.comm.events import Label
from harness.fsdp.guards import deadlock, watchdog
from harness.fsdp.guards.deadlock import Stand, all_stuck
from harness.fsdp.guards.watchdog import Watchdog
from tests.fsdp.hanging import GENEROUS_S, Told, agree, build, provoke, step
from tests.fsdp.pairs import STRATEGIES
from tests.support.covering import once
from tests.support.mutants import Slip, each
from tests.support.spawn import run_ranks

SUSPECT_S, LIMIT_S = 0.3, 60.0
LABEL = Label("all_gather", "a")
SHARDED = STRATEGIES[1:]
"""Strategies under which looking at weights asks for others' rows."""


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
    """The second rank leaves a batch out, and both look at their weights then."""
    found = []
    for strategy in strategies:
        with impatient():
            _, wrapped, optimizer = build(dist.new_group([0, 1]), strategy, watchdog_timeout_s=limit_s)

            def steps(wrapped: Any = wrapped, optimizer: Any = optimizer) -> None:
                for _ in range(2 - rank):
                    step(wrapped, optimizer)
                list(wrapped.full_weights())

            found.append(provoke(steps))
            provoke(wrapped.close)
        dist.barrier()
    return found


@once
def skipped() -> list[list[Told]]:
    return run_ranks(skipping, 2)


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_rank_that_leaves_out_a_batch_is_told_at_once(strategy: str) -> None:
    message = agree([told[SHARDED.index(strategy)] for told in skipped()])
    assert GENEROUS_S < LIMIT_S, "it was not the limit"
    assert message.startswith("ranks wait for each other")
    assert "mismatch, collective number" in message
    assert message.endswith("leaves a batch out, runs one with its loss times 0")


def _pause(wrapped: Any, seconds: float) -> None:
    """Come late, but for an alarm: on a loaded machine it takes longer."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not wrapped._parts.watches.is_over:
        time.sleep(0.02)


def late(rank: int, mutant: bool) -> Told:
    """The second rank comes late, longer than others wait before they tell what for."""
    slip = mock.patch.object(deadlock, "all_stuck", return_value=True)
    tells = mock.patch.object(watchdog.Watchdog, "_stand", return_value=Stand([], {}))
    with impatient():
        if mutant:
            slip.start(), tells.start()
        model, wrapped, optimizer = build(dist.new_group([0, 1]), "optim_grads_params", watchdog_timeout_s=LIMIT_S)
        step(wrapped, optimizer)
        if rank == 1:
            model.stop = lambda: _pause(wrapped, GENEROUS_S if mutant else 2 * watchdog.TICK_S + SUSPECT_S + 0.5)
        found = provoke(lambda: step(wrapped, optimizer))
        provoke(wrapped.close)
        mock.patch.stopall()
    return found


def watching(*parts: Any, limit: float = LIMIT_S) -> Watchdog:
    """A watchdog of all ranks, and of parts of them, that looks when it is asked."""
    groups: list[Any] = [dist.group.WORLD, *parts]
    with mock.patch.object(Watchdog, "_listen"):
        return Watchdog(groups, DeviceRuntime(torch.device("cpu")), limit, lambda: "")


def stands(made: Watchdog, while_asked: Callable[[], None] = lambda: None) -> bool:
    """Whether a rank tells where it stands that has begun something and waits for it; `while_asked` runs meanwhile."""

    class Counts(dict[Label, int]):
        def items(self) -> Any:
            while_asked()
            return super().items()

    made._log.counts = Counts()
    made._begun(LABEL)
    token = made.enter((LABEL,))
    try:
        with mock.patch.object(deadlock, "SUSPECT_S", -1.0):
            return made._stand() is not None
    finally:
        if token in made._waits:
            made.leave(token)


def well(rank: int) -> tuple[str, list[bool], list[bool]]:
    """What a late rank is told; who looks for such ranks; and who tells where it waits: a rank of one model, one that
    goes on meanwhile, one of two models, and one that had two."""
    parts = [dist.new_group([each_rank]) for each_rank in range(2)]
    made = watching()
    looks = [made._stands is not None]
    for other in (watching(parts[rank]), watching(limit=2 * deadlock.SUSPECT_S)):
        looks.append(other._stands is not None)
        other.close()
    made.close()
    return late(rank, False).error, looks, who_tells()


def who_tells() -> list[bool]:
    made = watching()
    tells = [stands(made), stands(made, lambda: made.leave(next(iter(made._waits))))]
    other = watching()
    tells.append(stands(made))
    other.close()
    tells.append(stands(made))
    made.close()
    return tells


TELLS = [True, False, False, False]


def test_a_late_rank_is_none_and_parts_of_ranks_or_several_models_are_not_judged() -> None:
    assert run_ranks(well, 2) == [("", [True, False, False], TELLS)] * 2


TELLING = {
    "several models": (
        "A rank tells counts in which those of another model are, which other ranks do not have",
        Slip(watchdog._Log, "add", "== 1", ">= 1"),
    ),
    "another moment": (
        "A rank that goes on while it is asked tells a wait that is over, and what it has begun since",
        Slip(Watchdog, "_stand", "dict(self._waits).keys() != waits.keys()", "False"),
    ),
}


def slipped(_: int) -> dict[str, list[bool]]:
    found = {}
    for name, (_, slip) in TELLING.items():
        with pytest.MonkeyPatch.context() as patch:
            slip.put(patch)
            found[name] = who_tells()
    return found


@once
def what_they_tell() -> list[dict[str, list[bool]]]:
    return run_ranks(slipped, 2)


@pytest.mark.parametrize("name", each("Deadlocks", [(name, breaks) for name, (breaks, _) in TELLING.items()]))
def test_a_rank_that_tells_too_much_is_found(name: str) -> None:
    assert all(told[name] != TELLS for told in what_they_tell())


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
