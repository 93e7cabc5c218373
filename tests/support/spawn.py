"""Run a function on several ranks over gloo on loopback, once, and hand back what each returned."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.forking import fork_ranks

TIMEOUT = timedelta(seconds=90)
"""How long a rank waits for another."""

CONNECTIONS = 3
"""How often ranks may begin to connect: once in tens of thousands of times gloo finds a connection closed by nobody."""


class RankFailed(RuntimeError):
    """A rank raised, ended or was killed; the message has its traceback."""


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, apart: bool = False) -> list[Any]:
    """Call `function(rank, *args)` on every rank with an initialised default group; results in rank order.

    Several ranks are forked for this call (`tests.support.forking`), and whatever they change ends with them. One rank
    runs in this process, so that a debugger works.

    Args:
        function: importable by name.
        apart: one rank, too, has a process of its own.

    Raises:
        RankFailed: a rank raised or ended; the others are killed then. One that runs here raises what it raises.
    """
    for attempt in range(1, CONNECTIONS + 1):
        with tempfile.TemporaryDirectory() as folder:
            if world_size == 1 and not apart:
                return [pickle.loads(_run(0, 1, Path(folder), function, args))]
            codes = fork_ranks(_rank, world_size, world_size, Path(folder), function, args, first_failure_ends_all=True)
            if attempt < CONNECTIONS and _never_met(Path(folder), world_size):
                continue
            _raise_failure(Path(folder), codes)
            return [pickle.loads(_result(Path(folder), rank).read_bytes()) for rank in range(world_size)]
    raise AssertionError("the last attempt returns or raises")


def made_by(function: Callable[..., Any], world_size: int, *args: Any) -> Any:
    """A fixture of the module: the folder that is given to `function(rank, folder, *args)` on every rank, once."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        made = tmp_path_factory.mktemp("made")
        run_ranks(function, world_size, made, *args)
        return made

    return folder


def _run(rank: int, world_size: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The pickled result, in a default group of this call's own."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else a pool of compiling processes per rank
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    store.set(f"{rank} is connected", "")
    (folder / "met").touch()
    try:
        result = pickle.dumps(function(rank, *args))
        # a rank that leaves before all are connected would keep them from it
        store.wait([f"{each} is connected" for each in range(world_size)])
    finally:
        if world_size == 1 or sys.exc_info()[0] is None:
            dist.destroy_process_group()
    return result


def _rank(rank: int, world_size: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        _result(folder, rank).write_bytes(_run(rank, world_size, folder, function, args))
    except BaseException:
        _traceback(folder, rank).write_text(traceback.format_exc(), encoding="utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # at once: threads of what broke off may wait for ever


def _result(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.pkl"


def _traceback(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.txt"


def _never_met(folder: Path, world_size: int) -> bool:
    """Whether gloo could not connect the ranks, so that none of them has begun."""
    told = [_traceback(folder, rank) for rank in range(world_size)]
    refused = any(path.exists() and "connectFullMesh failed" in path.read_text("utf-8") for path in told)
    return refused and not (folder / "met").exists()


def _raise_failure(folder: Path, codes: list[int]) -> None:
    """The tracebacks of ranks that have one, else how those ended that gave no result."""
    ranks = range(len(codes))
    told = [f"rank {r}:\n{_traceback(folder, r).read_text('utf-8')}" for r in ranks if _traceback(folder, r).exists()]
    silent = [f"rank {r}: {_ended(codes[r])}" for r in ranks if codes[r] or not _result(folder, r).exists()]
    if told or silent:
        raise RankFailed("\n" + "\n".join(told or silent))


def _ended(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code} and without a result"
