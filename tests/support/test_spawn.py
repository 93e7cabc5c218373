"""Ranks are forks: quick to start, alike at every call, and nothing they do to themselves outlives them."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from tests.support import spawn
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


@pytest.mark.parametrize("met", [False, True])
def test_ranks_that_gloo_could_not_connect_begin_again_and_no_others(
    monkeypatch: pytest.MonkeyPatch, met: bool
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
    with pytest.raises(RankFailed, match="connectFullMesh") if met else nullcontext():
        assert run_ranks(summed, 2, 0) == [(0, 2, 1), (1, 2, 1)]
    assert len(calls) == (1 if met else 2)
