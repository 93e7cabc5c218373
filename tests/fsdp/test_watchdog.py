"""A hang, a dead rank and mismatched collectives end in one error on every rank that lives."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.control import Control
from harness.engines.protocol import Ranks
from harness.fsdp import ShardedModel, Strategy, fully_shard, watched
from harness.fsdp.comm import events
from harness.fsdp.comm.events import Label
from harness.fsdp.guards.hang_report import CollectiveError, Position, tell
from harness.fsdp.guards.watchdog import Watchdog
from harness.probe.collectives import CollectiveMeter
from tests.fsdp.test_api import Block, sgd
from tests.fsdp.trial import WAYS
from tests.support.forking import fork_ranks
from tests.support.spawn import run_ranks

STRATEGIES = [strategy.name for strategy in Strategy]
LIMIT_S = 1.0
GENEROUS_S = 20.0
"""On a loaded machine; alone it takes 2 to 5 seconds."""


class Stoppable(nn.Module):
    """Three units; `stop` is called in the forward of the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.stop: Callable[[], None] = lambda: None
        self.blocks[1].register_forward_pre_hook(lambda *_: self.stop())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build(
    group: dist.ProcessGroup | None, strategy: str, **kwargs: Any
) -> tuple[Stoppable, ShardedModel, torch.optim.Optimizer]:
    model = Stoppable()
    optimizer = sgd(model)
    wrapped = ShardedModel(model, group=group, unit_modules=[Block], strategy=strategy, **kwargs)
    from harness.fsdp import fully_shard_optimizer

    return model, wrapped, fully_shard_optimizer(wrapped, optimizer)


def step(wrapped: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    wrapped(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@dataclass(frozen=True)
class Told:
    error: str
    message: str
    seconds: float


def provoke(action: Callable[[], None]) -> Told:
    began = time.monotonic()
    try:
        action()
    except Exception as error:
        return Told(type(error).__name__, str(error), time.monotonic() - began)
    return Told("", "", time.monotonic() - began)


def agree(told: list[Told]) -> str:
    """One error on all ranks, in time."""
    assert {each.error for each in told} == {"CollectiveError"}, told
    assert len({each.message for each in told}) == 1, told
    assert max(each.seconds for each in told) < GENEROUS_S
    print(told[0].seconds, told[0].message)
    return told[0].message


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


# -- a rank that ends --------------------------------------------------------------------------------------------------


def ends_in_a_forward(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 3), rank=rank, world_size=3)
    model, wrapped, optimizer = build(None, "optim_grads", watchdog_timeout_s=30.0, eager_limit_bytes=None)
    step(wrapped, optimizer)
    if rank == 2:
        model.stop = lambda: os._exit(0)
    told = provoke(lambda: step(wrapped, optimizer))
    Path(folder, f"{rank}.txt").write_text(f"{told.error}\n{told.seconds}\n{told.message}")
    os._exit(0)


def test_a_rank_that_ends_is_named_at_once(tmp_path: Path) -> None:
    assert fork_ranks(ends_in_a_forward, 3, str(tmp_path)) == [0, 0, 0]
    told = []
    for rank in (0, 1):
        error, seconds, message = (tmp_path / f"{rank}.txt").read_text().split("\n", 2)
        told.append(Told(error, message, float(seconds)))
    message = agree(told)
    assert "a collective failed" in message
    assert "rank 2 does not answer: ended" in message
    assert "the backend of rank 0 said: " in message


# -- a rank that stops, and an exchange of the program's own ----------------------------------------------------------


def join(rank: int, folder: Path, keeper: int) -> None:
    """Join a group of two whose store lives in rank `keeper`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    port = folder / "port"
    if rank == keeper:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "writing").write_text(str(store.port))
        (folder / "writing").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


def stops(rank: int, path: str, keeper: int, where: str) -> None:
    """Rank 1 stops, as by SIGSTOP, in a forward or before an exchange; rank 0 writes what it is told, and ends it."""
    folder = Path(path)
    join(rank, folder, keeper)
    model, wrapped, optimizer = build(None, "optim_grads_params", watchdog_timeout_s=LIMIT_S)
    own = dist.new_group(backend="gloo")
    step(wrapped, optimizer)
    if rank == 1:
        (folder / "pid").write_text(str(os.getpid()))
        dist.barrier()
        if where == "forward":
            model.stop = lambda: os.kill(os.getpid(), signal.SIGSTOP)
            step(wrapped, optimizer)
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()

    def exchange() -> None:
        with watched("how far each rank is", own):
            dist.barrier(own)

    def loop() -> None:
        with closing(CollectiveMeter()) as meter:
            Control(Ranks(rank, 2, rank, torch.device("cpu")), own, meter).report([0.5], 7, False)

    told = provoke({"forward": lambda: step(wrapped, optimizer), "exchange": exchange, "loop": loop}[where])
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    (folder / "told").write_text(f"{told.error}\n{told.seconds}\n{told.message}")
    os._exit(0)


WAITS = {
    "forward": "in all_gather blocks.",
    "exchange": "in exchange of how far each rank is",
    "loop": "in exchange of the loop's own numbers",
}


@pytest.mark.parametrize("where", WAITS)
@pytest.mark.parametrize("keeper", [0, 1], ids=["store_lives", "store_stops_too"])
def test_a_rank_that_stops_is_told_also_where_it_keeps_the_store(keeper: int, where: str, tmp_path: Path) -> None:
    fork_ranks(stops, 2, str(tmp_path), keeper, where, seconds=60)
    error, seconds, message = (tmp_path / "told").read_text().split("\n", 2)
    assert (error, float(seconds) < GENEROUS_S) == ("CollectiveError", True), message
    assert "did not come about within 1 s" in message
    assert "rank 0 waits since" in message
    assert WAITS[where] in message
    if keeper == 0:
        assert "rank 1 does not answer: ended, stopped" in message
    else:
        assert "other ranks could not be asked: the store of the process group does not answer" in message


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
    assert run_ranks(usual_limits, 2, str(tmp_path)) == [(300.0, 0.9 * 7200, 7.0)] * 2


def ends_unclosed(folder: str) -> None:
    """Two ranks, one forked from the other, that come to the interpreter's own end with models that are watched."""
    rank = 0 if os.fork() else 1
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    for _ in range(4):
        model, wrapped, optimizer = build(None, "optim_grads_params")
        step(wrapped, optimizer)
        atexit.register(len, [model, wrapped, optimizer])  # alive until the end
    watching = sum(thread.name == "fsdp-watchdog" for thread in threading.enumerate())
    Path(folder, f"{rank}.txt").write_text(str(watching))
    if rank == 0:
        assert os.wait()[1] == 0


def test_a_program_that_never_closes_its_models_ends_well(tmp_path: Path) -> None:
    script = "import sys; from tests.fsdp.test_watchdog import ends_unclosed; ends_unclosed(sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=120, check=True)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["4", "4"]


# -- collectives compared beforehand -----------------------------------------------------------------------------------


def mismatched(rank: int) -> list[Told]:
    found = []
    for strategy in STRATEGIES:
        _, wrapped, optimizer = build(dist.new_group([0, 1, 2]), strategy, check_collectives=True)
        step(wrapped, optimizer)
        moved: list[Label] = []
        end = events.on_begin(moved.append)
        told = provoke(lambda w=wrapped: w.weight_norm() if rank == 1 else list(w.full_weights()))
        end()
        assert not moved, "no data may move"
        found.append(told)
        provoke(wrapped.close)
        dist.barrier()
    _, wrapped, optimizer = build(dist.new_group([0, 1, 2]), "optim", check_collectives=True)
    values = torch.zeros(2 if rank == 2 else 3, dtype=torch.float64)
    found.append(provoke(lambda: wrapped._parts.everyone.sum_scalars(values, "lengths")))
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


# -- all is well -------------------------------------------------------------------------------------------------------


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


# -- the sentence ------------------------------------------------------------------------------------------------------


def at(waits: str | None, number: int, *names: str, failure: str | None = None) -> Position:
    history = list(enumerate(names, start=number - len(names) + 1))
    return Position("in the forward of u", waits, number if waits else None, 2.0, history, failure)


def test_the_first_collective_in_which_ranks_differ_is_found_behind_where_they_stand() -> None:
    positions = {0: at("c", 9, "a", "b", "c"), 1: at("c", 9, "a", "b", "c"), 2: at("d", 10, "x", "c", "d")}
    message = tell(positions, [0, 1, 2, 3], 60)
    assert "mismatch, collective number 8 is not the same on all ranks: ranks 0, 1 at b; rank 2 at x" in message
    assert "ranks 0, 1 wait since 2.0 s in c (number 9) in the forward of u" in message
    assert "rank 3 does not answer" in message


def test_ranks_in_step_have_no_mismatch() -> None:
    positions = {0: at("b", 2, "a", "b"), 1: at(None, 1, "a")}
    message = tell(positions, [0, 1], 60)
    assert "mismatch" not in message
    assert "rank 1 has not come: it is in the forward of u; the last collective it began is a (number 1)" in message


def test_errors_of_the_program_are_left_alone() -> None:
    watchdog = object.__new__(Watchdog)
    for error in (ArithmeticError("gloo"), RuntimeError("a bucket was summed before it was exchanged")):
        assert watchdog.explain(error) is error
    told = CollectiveError("Connection")
    assert watchdog.explain(told) is told
