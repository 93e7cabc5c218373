"""Ranks are forks: quick to start, alike at every call, and nothing they do to themselves outlives them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from tests.support import forking, spawn
from tests.support.forking import fork_ranks
from tests.support.spawn import RankFailed, run_ranks

WAIT_S = 60.0


def summed(rank: int, summand: int) -> tuple[int, int, int]:
    total = torch.tensor([rank + summand])
    dist.all_reduce(total)
    return rank, dist.get_world_size(), int(total)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_results_come_in_rank_order_from_one_group(world_size: int) -> None:
    total = sum(range(world_size)) + 7 * world_size
    assert run_ranks(summed, world_size, 7) == [(rank, world_size, total) for rank in range(world_size)]
    assert not dist.is_initialized()


# -- nothing stays -----------------------------------------------------------------------------------------------------


@cache
def visits() -> list[int]:
    return []


def state() -> dict[str, Any]:
    """What a test could leave behind in its process."""
    return {
        "environment": dict(os.environ),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "seed": torch.initial_seed(),
        "draw": torch.rand(1).item(),
        "patched": functional.silu.__name__,
        "cached": len(visits()),
        "python threads": sorted(thread.name for thread in threading.enumerate()),
        "folder": os.getcwd(),
        "mask": os.umask(0o22),
    }


def look_and_litter(rank: int) -> dict[str, Any]:
    found = state()
    os.environ["LEFT_BEHIND"] = "1"
    os.umask(0)
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(rank)
    functional.silu = lambda _: True
    visits().append(rank)
    threading.Thread(target=time.sleep, args=(WAIT_S,), name="left behind", daemon=True).start()
    assert state() != found
    return found


def test_a_call_finds_nothing_of_the_one_before() -> None:
    first, second = (run_ranks(look_and_litter, 2) for _ in range(2))
    assert first == second
    assert first[0]["threads"] == 1
    assert "LEFT_BEHIND" not in os.environ


def own_process(rank: int) -> int:
    return os.getpid()


def test_one_rank_runs_here_unless_it_is_to_be_apart() -> None:
    assert run_ranks(own_process, 1) == [os.getpid()]
    assert run_ranks(own_process, 1, apart=True) != [os.getpid()]


def environment(rank: int) -> str:
    return os.environ.get("SET_BY_A_TEST", "not set")


def test_ranks_see_the_environment_of_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BY_A_TEST", "set")
    forking._close_servers()  # so that one starts while the variable is set
    assert run_ranks(environment, 2) == ["not set"] * 2


# -- ranks that fail ---------------------------------------------------------------------------------------------------


def fails(rank: int, how: str) -> None:
    if rank == 0:
        time.sleep(WAIT_S)
    if how == "raises":
        raise ValueError("told by the rank")
    if how == "exits":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raises", r"rank 1:\n(.|\n)*in fails(.|\n)*ValueError: told by the rank"),
        ("exits", "rank 1: ended with 3 and without a result"),
        ("is killed", "rank 1: ended by SIGKILL"),
    ],
)
def test_a_rank_that_fails_ends_the_call_and_says_why(how: str, says: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match=says):
        run_ranks(fails, 2, how)
    assert time.monotonic() - began < WAIT_S / 2, "the other rank was not waited for"
    assert run_ranks(summed, 2, 0) == [(0, 2, 1), (1, 2, 1)], "the next call is none the worse"


def tell_and_wait(rank: int, folder: Path) -> None:
    (folder / f"{rank}.part").write_text(str(os.getpid()))
    (folder / f"{rank}.part").rename(folder / f"{rank}.pid")
    time.sleep(WAIT_S)


class Interrupted(Exception):
    """What pytest-timeout does in the midst of a call."""


@contextmanager
def interrupt_when_there_are(paths: list[Path]) -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise Interrupted

    def send() -> None:
        until(lambda: all(path.exists() for path in paths))
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def until(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_an_interrupted_call_leaves_no_rank(tmp_path: Path) -> None:
    paths = [tmp_path / f"{rank}.pid" for rank in range(2)]
    with pytest.raises(Interrupted), interrupt_when_there_are(paths):
        run_ranks(tell_and_wait, 2, tmp_path)
    for path in paths:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


# -- side by side ------------------------------------------------------------------------------------------------------


def meet(rank: int, own: Path, other: Path) -> bool:
    own.touch()
    until(other.exists)
    return True


def test_calls_of_several_threads_run_side_by_side(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(run_ranks, meet, 2, *paths) for paths in ((one, other), (other, one))]
        assert [call.result() for call in calls] == [[True, True]] * 2


@pytest.mark.parametrize(("met", "meant"), [(False, "again"), (True, "told")])
def test_ranks_that_gloo_could_not_connect_begin_again_and_no_others(
    monkeypatch: pytest.MonkeyPatch, met: bool, meant: str
) -> None:
    calls = []

    def refused_once(function: Any, world_size: int, *args: Any, **options: Any) -> list[int]:
        calls.append(args[1])
        if len(calls) > 1:
            return fork_ranks(function, world_size, *args, **options)
        (args[1] / "1.txt").write_text("RuntimeError: Gloo connectFullMesh failed with [pair.cc] Connection closed")
        if met:
            (args[1] / "met").touch()
        return [-9, 1]

    monkeypatch.setattr(spawn, "fork_ranks", refused_once)
    if meant == "again":
        assert run_ranks(summed, 2, 0) == [(0, 2, 1), (1, 2, 1)]
    else:
        with pytest.raises(RankFailed, match="connectFullMesh"):
            run_ranks(summed, 2, 0)
    assert len(calls) == (2 if meant == "again" else 1)
