"""Run a function on several ranks over gloo on loopback, once, and hand back what each returned."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=90)
PRELOADED = [
    "torch",
    "torch.distributed.device_mesh",
    "torch.testing",
    "harness.fsdp.api",
    "harness.engines.adapters.native",
    "harness.checkpoint.policy",
]
"""Imported once, by a server of which every rank is a fork: importing torch takes longer than most of what ranks do."""


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call `function(rank, *args)` on every rank with an initialised default group; results in rank order.

    The function must be importable by name. An exception on a rank ends all of them and is raised here with its
    traceback. One rank runs in this process, so that a debugger works.
    """
    with tempfile.TemporaryDirectory() as folder:
        if world_size == 1:
            _rank(0, 1, folder, function, args)
        else:
            multiprocessing.set_forkserver_preload(PRELOADED)
            mp.start_processes(
                _rank, args=(world_size, folder, function, args), nprocs=world_size, start_method="forkserver"
            )
        results = [pickle.loads((Path(folder) / f"{rank}.pkl").read_bytes()) for rank in range(world_size)]
    return results


def _rank(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    try:
        result = function(rank, *args)
        (Path(folder) / f"{rank}.pkl").write_bytes(pickle.dumps(result))
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        if world_size == 1 or (Path(folder) / f"{rank}.pkl").exists():
            dist.destroy_process_group()
