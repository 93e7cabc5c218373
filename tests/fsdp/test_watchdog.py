"""A hang, and mismatched collectives, end in one error on every rank; where all is well, watching changes nothing."""

from __future__ import annotations

import ctypes
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from harness.fsdp import CollectiveError, ShardedModel, fully_shard
from harness.fsdp.comm import events
from harness.fsdp.comm.events import Label
from harness.fsdp.guards.watchdog import Watchdog
from tests.fsdp.hanging import GENEROUS_S, LIMIT_S, Stoppable, Told, agree, build, provoke, step
from tests.fsdp.pairs import STRATEGIES
from tests.fsdp.test_api import Block, sgd
from tests.fsdp.trial import WAYS
from tests.support.spawn import run_ranks

# -- a rank that comes late --------------------------------------------------------------------------------------------


def hold_the_interpreter(seconds: int) -> None:
    """Sleep without letting another thread of this process run."""
    ctypes.PyDLL(None).sleep(seconds)


def late_in_a_forward(rank: int) -> dict[str, Told]:
    found = {}
    for index, strategy in enumerate(STRATEGIES):
        way = WAYS[index % 3]
        with way.taken():
            model, wrapped, optimizer = build(
                dist.new_group([0, 1, 2]), strategy, watchdog_timeout_s=LIMIT_S, eager_limit_bytes=way.eager_limit
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


def other_ways_to_hang(rank: int) -> dict[str, Told]:
    def new(**kwargs: Any) -> tuple[Stoppable, ShardedModel, torch.optim.Optimizer]:
        return build(dist.new_group([0, 1, 2]), "optim_grads_params", watchdog_timeout_s=LIMIT_S, **kwargs)

    found = {}
    model, wrapped, optimizer = new()
    if rank == 1:
        model.stop = lambda: hold_the_interpreter(8)
        provoke(lambda: wrapped(torch.ones(2, 6)))
    found["silent"] = provoke(lambda: step(wrapped, optimizer))
    provoke(wrapped.close)
    dist.barrier()
    model, wrapped, optimizer = new()
    found["another"] = provoke(lambda: wrapped.weight_norm() if rank == 2 else step(wrapped, optimizer))
    again = provoke(lambda: step(wrapped, optimizer))
    found["again"] = Told(again.error, again.message, 0.0)
    dist.barrier()
    return found


def test_a_silent_rank_and_another_collective_are_told() -> None:
    per_rank = run_ranks(other_ways_to_hang, 3)
    silent = agree([per_rank[rank]["silent"] for rank in (0, 2)])
    assert "rank 1 does not answer" in silent
    message = agree([found["another"] for found in per_rank])
    assert (
        "mismatch, collective number 1 is not the same on all ranks: ranks 0, 1 at all_gather blocks.0/float32; rank 2"
        " at all_reduce norm" in message
    )
    assert "rank 2 waits since" in message
    assert {found["again"].message for found in per_rank} == {message}, "the group stays of no use"


# -- all is well -------------------------------------------------------------------------------------------------------


def usual_limits(rank: int, folder: str) -> tuple[float, float, float]:
    """Nothing said; a timeout given; both."""

    def limit(name: str, given: timedelta | None, **options: Any) -> float:
        dist.init_process_group(
            "gloo", store=dist.FileStore(f"{folder}/{name}", 2), rank=rank, world_size=2, timeout=given
        )
        _, wrapped, _ = build(None, "optim", **options)
        (watchdog,) = wrapped._parts.watches.watching
        wrapped.close()
        dist.barrier()
        dist.destroy_process_group()
        assert isinstance(watchdog, Watchdog)
        return watchdog.timeout_s

    dist.barrier()  # who destroys a group that the other has not joined yet keeps it from doing so
    dist.destroy_process_group()
    long = timedelta(hours=2)
    found = limit("a", None), limit("b", long), limit("c", long, watchdog_timeout_s=7.0)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/end", 2), rank=rank, world_size=2)
    dist.barrier()
    return found


def test_a_wait_is_bounded_by_default(tmp_path: Path) -> None:
    assert run_ranks(usual_limits, 2, str(tmp_path)) == [(1770.0, 7170.0, 7.0)] * 2


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
        left = len(events._watchers) + len(events._checkers)
        for _ in range(100):  # threads end at their next look
            alive = sum(thread.name == "fsdp-watchdog" for thread in threading.enumerate())
            if not alive:
                break
            time.sleep(0.05)
        found.append((same, left, alive))
    return found


def test_watching_changes_no_bit_and_ends_with_the_model() -> None:
    for found in run_ranks(trained, 2):
        assert found == [(True, 0, 0)] * len(STRATEGIES)


def test_off_there_is_nothing_and_a_limit_is_positive(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = Stoppable()
        wrapped, _ = fully_shard(model, sgd(model), fsdp_unit_modules=[Block])
        assert wrapped._parts.watches.watching == []
        with pytest.raises(
            ValueError,
            match=r"watchdog_timeout_s=0 is out of range; valid are above 0, .* or None",
        ):
            fully_shard(other := Stoppable(), sgd(other), watchdog_timeout_s=0)
    finally:
        dist.destroy_process_group()


def test_errors_of_the_program_are_left_alone() -> None:
    watchdog = object.__new__(Watchdog)
    for error in (ArithmeticError("gloo"), RuntimeError("a bucket was summed before it was exchanged")):
        assert watchdog.explain(error) is error
    told = CollectiveError("Connection")
    assert watchdog.explain(told) is told


# -- on a device -------------------------------------------------------------------------------------------------------


class FakeEvent:
    def __init__(self) -> None:
        self.is_reached = False


class FakeRuntime:
    has_streams = True

    def __init__(self) -> None:
        self.aborted: list[Any] = []

    def record(self) -> FakeEvent:
        return FakeEvent()

    def abort(self, group: Any) -> None:
        self.aborted.append(group)


def on_a_device(rank: int) -> tuple[bool, Told, int]:
    """Waits that a stream makes: the host goes on, and the event behind a collective is never reached on rank 0."""
    runtime: Any = FakeRuntime()
    group: Any = dist.group.WORLD
    watchdog = Watchdog([group], runtime, LIMIT_S, lambda: "in the backward of blocks.0")
    with events.begin(Label("all_gather", "blocks.0/float32")), events.waiting():
        pass
    early = watchdog._overdue() is None
    if rank == 1:
        watchdog._on_device[0].reached.is_reached = True  # type: ignore[union-attr, misc] # set on a fake event
    assert watchdog._told.wait(GENEROUS_S)

    def next_collective() -> None:
        with events.begin(Label("all_gather", "blocks.1/float32")):
            raise AssertionError("nothing may be issued any more")

    return early, provoke(next_collective), len(runtime.aborted)


def test_a_stream_that_never_passes_a_collective_is_told_at_the_next_one() -> None:
    found = run_ranks(on_a_device, 2)
    assert [(early, aborted) for early, _, aborted in found] == [(True, 1)] * 2
    message = agree([told for _, told, _ in found])
    assert "rank 0 waits since" in message
    assert "all_gather blocks.0/float32 (number 1) in the backward of blocks.0" in message
    assert "rank 1 has not come" in message


def test_a_wait_lasts_since_its_stream_came_to_it_however_far_ahead_the_host_was() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        watchdog = Watchdog([cast(Any, dist.group.WORLD)], cast(Any, FakeRuntime()), LIMIT_S, lambda: "")
    finally:
        dist.destroy_process_group()
    for name in "ab":
        watchdog.leave(watchdog.enter((Label("all_gather", name),)))
    first, second = watchdog._on_device
    for wait in (first, second):
        wait.since -= 2 * LIMIT_S  # when the host asked for it
    assert watchdog._overdue() is first
    first.reached.is_reached = True  # type: ignore[union-attr, misc] # set on a fake event
    assert watchdog._overdue() is None
    second.since -= 2 * LIMIT_S
    assert watchdog._overdue() is second
