"""A hang, and mismatched collectives, end in one error on every rank; where all is well, watching changes nothing."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness.fsdp import Observer
from harness.fsdp.comm import events, mesh
from harness.private_torch import backends_of, timeout_of
from harness.watchdog import watchdog
from tests.fsdp.pairs import STRATEGIES
from tests.fsdp.test_ended_ranks import GENEROUS_S, LIMIT_S, Told, agree, build, provoke, step
from tests.fsdp.trial import TRANSPORTS
from tests.support.covering import once
from tests.support.mutants import Slip, each
from tests.support.spawn import run_ranks
from tests.watchdog.ranks import logged

# -- a rank that comes late --------------------------------------------------------------------------------------------


def late_in_a_forward(rank: int) -> dict[str, Told]:
    found = {}
    for index, strategy in enumerate(STRATEGIES):
        transport = TRANSPORTS[index % 2]
        model, wrapped, optimizer = build(
            dist.new_group([0, 1, 2]), strategy, watchdog_timeout_s=LIMIT_S, transport=transport
        )
        step(wrapped, optimizer)
        if rank == 2:
            model.stop = lambda: time.sleep(4 * LIMIT_S)
        found[strategy] = provoke(lambda w=wrapped, o=optimizer: step(w, o))
        provoke(wrapped.close)
        dist.barrier()
    return found


def test_all_ranks_tell_who_waits_where_and_who_still_computes() -> None:
    per_rank = run_ranks(late_in_a_forward, 3)
    for strategy in STRATEGIES:
        message = agree([found[strategy] for found in per_rank])
        assert "did not come about within 1 s" in message
        kind = {"no_shard": "all_reduce", "optim_grads_params": "all_gather"}.get(strategy, "reduce_scatter")
        # Ranks 0 and 1 may wait for different units: they take from each other what the third one does not hold.
        assert f"in {kind} blocks." in message
        assert "/float32 (number " in message
        assert "rank 2 has not come: it is in the forward of blocks.1; the last collective it began is" in message
        assert "mismatch" not in message


# -- ranks that wait for each other ------------------------------------------------------------------------------------

SUSPECT_S, LONG_S = 0.3, 60.0
SHARDED = STRATEGIES[1:]
"""Strategies under which looking at weights asks for others' rows."""


def impatient() -> Any:
    return mock.patch.object(watchdog, "SUSPECT_S", SUSPECT_S)


def skipping(rank: int, limit_s: float = LONG_S, strategies: tuple[str, ...] = SHARDED) -> list[Told]:
    """The second rank leaves a batch out, and both look at their weights then."""
    found = []
    for index, strategy in enumerate(strategies):
        with impatient():
            _, wrapped, optimizer = build(
                dist.new_group([0, 1]), strategy, watchdog_timeout_s=limit_s, transport=TRANSPORTS[index % 2]
            )

            def steps(wrapped: Any = wrapped, optimizer: Any = optimizer) -> None:
                for _ in range(2 - rank):
                    step(wrapped, optimizer)
                wrapped.weight_norm()  # full_weights() would take what the other rank's step offers

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
    assert GENEROUS_S < LONG_S, "it was not the limit"
    assert message.startswith("ranks wait for each other")
    assert "mismatch, collective number" in message
    assert message.endswith("leaves a batch out, runs one with its loss times 0")


def in_an_exchange_of_its_own(rank: int) -> tuple[Told, list[str]]:
    """The second rank sums something of its own where the first one begins a step."""
    with logged() as lines:
        _, wrapped, optimizer = build(dist.new_group([0, 1]), "optim_grads_params", watchdog_timeout_s=LIMIT_S)
        step(wrapped, optimizer)

        def differ() -> None:
            step(wrapped, optimizer) if rank == 0 else dist.all_reduce(torch.ones(1))

        if rank == 1:
            threading.Timer(LIMIT_S + 3.0, lambda: watchdog.abort_group(dist.group.WORLD)).start()
        told = provoke(differ)
        provoke(wrapped.close)
    return told, lines


def test_a_collective_of_the_programs_own_is_named_on_both_ranks() -> None:
    (first, _), (second, lines) = run_ranks(in_an_exchange_of_its_own, 2)
    assert first.error == "CollectiveError"
    assert "rank 1 has not come: it is in torch's all_reduce, in differ (test_watchdog.py:" in first.message
    assert second.error == "RuntimeError", "of torch, whose collective it is"
    assert lines == [first.message], "and ours was said before"


def blind(rank: int) -> list[Told]:
    with mock.patch.object(watchdog, "all_stuck", return_value=False):
        return skipping(rank, 2.0, SHARDED[-1:])


@pytest.mark.parametrize(
    "name", each("Deadlocks", [("nobody looks", "Ranks that wait for each other do so until the limit")])
)
def test_a_watchdog_that_does_not_look_is_found(name: str) -> None:
    message = agree([told[0] for told in run_ranks(blind, 2)])
    assert message.startswith("a collective did not come about within 2 s")


# -- all is well -------------------------------------------------------------------------------------------------------


def own_group_s() -> list[float]:
    """Timeouts of a group and of one that the engine makes of it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(hours=2))
    world: Any = dist.group.WORLD
    found = [timeout_of(*backends_of(group)).total_seconds() for group in (world, mesh.group_of_members([0], "a part"))]
    dist.destroy_process_group()
    return found


def test_the_engines_own_groups_have_the_timeout_of_the_programs() -> None:
    assert own_group_s() == [7200.0, 7200.0]


OWN_TIMEOUT = "The engine's own groups have torch's timeout whatever init_process_group was given"


@pytest.mark.parametrize("name", each("Deadlocks", [("torch's timeout", OWN_TIMEOUT)]))
def test_another_timeout_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Slip(mesh, "group_of_members", "list(ranks), timeout, ", "list(ranks), ").put(monkeypatch)
    assert own_group_s() != [7200.0, 7200.0]


def trained(rank: int) -> list[tuple[bool, int, int]]:
    found = []
    for strategy in STRATEGIES:
        outcomes = []
        for kwargs in ({}, {"watchdog_timeout_s": 30.0, "check_collectives": True}):
            _, wrapped, optimizer = build(dist.new_group([0, 1]), strategy, **kwargs)
            for _ in range(3):
                step(wrapped, optimizer)
            outcomes.append([weight for _, weight in wrapped.full_weights()])
            wrapped.close()
        same = all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
        for _ in range(100):  # threads end at their next look
            alive = sum(thread.name.startswith("watchdog") for thread in threading.enumerate())
            if not alive:
                break
            time.sleep(0.05)
        found.append((same, len(events._observers), alive))
    return found


def test_watching_changes_no_bit_and_ends_with_the_model() -> None:
    for found in run_ranks(trained, 2):
        assert found == [(True, 0, 0)] * len(STRATEGIES)


@pytest.mark.usefixtures("group_of_one")
def test_off_there_is_nothing() -> None:
    assert build(None, "optim")[1].engine.watchdog is None


# -- collectives that are compared before their data moves -------------------------------------------------------------


class Begun(Observer):
    """Collectives of this process."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def begin(self, label: Any, data: object) -> None:
        self.kinds.append(label.kind)


def mismatched(rank: int) -> list[Told]:
    found = []
    for strategy in STRATEGIES:
        _, wrapped, optimizer = build(dist.new_group([0, 1, 2]), strategy, check_collectives=True)
        step(wrapped, optimizer)
        begun = Begun()
        begun.attach()
        told = provoke(lambda w=wrapped: w.weight_norm() if rank == 1 else list(w.full_weights()))
        begun.detach()
        assert not begun.kinds, "no data may move"
        found.append(told)
        provoke(wrapped.close)
        dist.barrier()
    _, wrapped, optimizer = build(dist.new_group([0, 1, 2]), "optim", check_collectives=True)
    values = torch.zeros(2 if rank == 2 else 3, dtype=torch.float64)
    found.append(provoke(lambda: wrapped.engine.meshes.everyone.sum_scalars(values, "lengths")))
    return found


def test_checked_collectives_are_refused_before_data_moves() -> None:
    *per_strategy, lengths = zip(*run_ranks(mismatched, 3), strict=True)
    for strategy, told in zip(STRATEGIES, per_strategy, strict=True):
        if strategy == "no_shard":  # whole on every rank: neither asks for data
            assert {each.error for each in told} == {""}
            continue
        message = agree(list(told))
        assert "all_gather blocks.0/float32 weights of " in message
        assert "elements float32 on ranks 0, 2; all_reduce norm of 1 elements float64 on rank 1" in message
    assert (
        "all_reduce lengths of 3 elements float64 on ranks 0, 1; all_reduce lengths of 2 elements float64 on rank 2"
        in agree(list(lengths))
    )
