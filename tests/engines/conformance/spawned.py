"""All cases of one engine and one number of ranks in processes of their own; a failure costs its case, not the rest."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from harness.config.schema import Config
from tests.engines.conformance.cases import Case
from tests.engines.conformance.trial import Evidence

TIMEOUT = timedelta(seconds=120)
"""How long a rank waits for another."""
RESTARTS = 4
"""Groups of ranks that are started again after a failure, before the remaining cases are given up."""


def run_all(cases: Sequence[Case]) -> dict[Case, list[Evidence] | str]:
    """Evidence of every rank by case, or what went wrong. Also one rank is a process of its own: some engines patch
    torch, or keep state that outlives them."""
    found: dict[Case, list[Evidence] | str] = {}
    todo = list(cases)
    for _ in range(RESTARTS + 1):
        if not todo:
            return found
        with tempfile.TemporaryDirectory() as folder:
            _spawn(todo, Path(folder))
            done = [case for case in todo if _is_complete(Path(folder), todo.index(case), case.world_size)]
            for case in done:
                found[case] = _collect(Path(folder), todo.index(case), case.world_size)
            if failed := todo[len(done) : len(done) + 1]:
                found[failed[0]] = _errors(Path(folder), failed[0].world_size)
            todo = todo[len(done) + 1 :]
    return found | dict.fromkeys(todo, f"not run: {RESTARTS + 1} cases before it ended their processes")


def _spawn(cases: Sequence[Case], folder: Path) -> None:
    world_size = cases[0].world_size
    work = [(case, case.config()) for case in cases]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, world_size, str(folder), work)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + TIMEOUT.total_seconds() + 60 * len(cases)
    for process in ranks:
        process.join(max(deadline - time.monotonic(), 0))
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()


def _rank(rank: int, world_size: int, folder: str, work: list[tuple[Case, Config]]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    errors = Path(folder) / f"{rank}.error"
    with open(errors.with_suffix(".fault"), "w") as fault:
        faulthandler.enable(fault)
        try:
            _run(rank, world_size, Path(folder), work)
        except BaseException:
            errors.write_text(traceback.format_exc())
            os._exit(1)  # at once: whoever waits for this rank is told by its closed connection


def _run(rank: int, world_size: int, folder: Path, work: list[tuple[Case, Config]]) -> None:
    import torch
    import torch.distributed as dist

    from tests.engines.conformance.trial import run_case

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    for number, (case, config) in enumerate(work):
        evidence = run_case(case, config, rank)
        part = folder / f"{number}-{rank}.part"
        part.write_bytes(pickle.dumps(evidence))
        part.rename(part.with_suffix(".pkl"))
        dist.barrier()
    dist.destroy_process_group()


def _is_complete(folder: Path, number: int, world_size: int) -> bool:
    return all((folder / f"{number}-{rank}.pkl").exists() for rank in range(world_size))


def _collect(folder: Path, number: int, world_size: int) -> Any:
    return [pickle.loads((folder / f"{number}-{rank}.pkl").read_bytes()) for rank in range(world_size)]


def _errors(folder: Path, world_size: int) -> str:
    texts = []
    for rank in range(world_size):
        told = [folder / f"{rank}.error", folder / f"{rank}.fault"]
        texts += [f"rank {rank}: {path.read_text()}" for path in told if path.exists() and path.stat().st_size]
    return "\n".join(texts) or "a rank ended, or was still running at the limit, without a word"
