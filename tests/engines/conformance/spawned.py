"""The cases of one engine in processes of their own; a failure costs its case, not the rest.

A number of ranks has its own processes, forked for it: some engines patch torch, or keep state that outlives them.
What the engine's package imports is imported once, by the process they are forks of.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.config.schema import Config
from harness.engines.protocol import Ranks
from tests.engines.conformance.cases import Case
from tests.engines.conformance.trial import Evidence, run_case
from tests.support.forking import fork_ranks

TIMEOUT = timedelta(seconds=120)
"""How long a rank waits for another."""
SECONDS_A_CASE = 60
"""Of all its ranks, before they are killed."""
RESTARTS = 4
"""Groups of ranks that are started again after a failure, before the remaining cases are given up."""

Work = list[tuple[int, Case, Config]]
"""Cases with their numbers, by which their files are named."""


def run_all(cases: Sequence[Case]) -> dict[Case, list[Evidence] | str]:
    """Evidence of every rank by case, or what went wrong; all cases are of one engine."""
    work = [(number, case, case.config()) for number, case in enumerate(cases)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fork_ranks(_nursery, 1, folder, work)
        return {case: _evidence(folder, number, case.world_size) for number, case, _ in work}


def _nursery(_: int, folder: Path, work: Work) -> None:
    """The process whose forks the ranks are."""
    _import_peer(work[0][1].engine)
    gc.collect()
    gc.freeze()  # DeepSpeed collects garbage a hundred times a case, and need not look through modules
    for world_size in sorted({case.world_size for _, case, _ in work}):
        todo = [each for each in work if each[1].world_size == world_size]
        for attempt in range(RESTARTS + 1):
            if todo:
                _fork(todo, world_size, folder / f"store-{world_size}-{attempt}")
                todo = _left(todo, world_size, folder)


def _import_peer(engine: str) -> None:
    if engine == "deepspeed":
        from harness.engines.adapters import deepspeed

        with deepspeed._surroundings(Ranks(0, 1, 0, torch.device("cpu"))):
            deepspeed._quiet_deepspeed()  # it compiles a program to see which of its kernels could be
    elif engine == "megatron_fsdp":
        import_module(engine)


def _fork(todo: Work, world_size: int, store: Path) -> None:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(rank, world_size, store, todo)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + TIMEOUT.total_seconds() + SECONDS_A_CASE * len(todo)
    for process in ranks:
        process.join(max(deadline - time.monotonic(), 0))
    for process in ranks:
        process.kill()
        process.join()


def _left(todo: Work, world_size: int, folder: Path) -> Work:
    """What comes after the first case without an answer of every rank; why it has none is kept under its number."""
    for place, (number, _, _) in enumerate(todo):
        if not all(path.exists() for path in _answers(folder, number, world_size)):
            (folder / f"{number}.failed").write_text(_errors(folder, world_size))
            return todo[place + 1 :]
    return []


def _rank(rank: int, world_size: int, store: Path, todo: Work) -> None:
    errors = store.parent / f"{rank}.error"
    errors.unlink(missing_ok=True)
    with open(errors.with_suffix(".fault"), "w") as fault:
        faulthandler.enable(fault)
        try:
            _run(rank, world_size, store, todo)
        except BaseException:
            errors.write_text(traceback.format_exc())
            os._exit(1)  # at once: whoever waits for this rank is told by its closed connection


def _run(rank: int, world_size: int, store: Path, todo: Work) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    met = dist.FileStore(str(store), world_size)
    dist.init_process_group("gloo", store=met, rank=rank, world_size=world_size, timeout=TIMEOUT)
    for number, case, config in todo:
        began = time.perf_counter()
        evidence = run_case(case, config, rank)
        evidence.seconds = time.perf_counter() - began
        answer = _answers(store.parent, number, world_size)[rank]
        answer.with_suffix(".part").write_bytes(pickle.dumps(evidence))
        answer.with_suffix(".part").rename(answer)
        dist.barrier()
    dist.destroy_process_group()


def _answers(folder: Path, number: int, world_size: int) -> list[Path]:
    return [folder / f"{number}-{rank}.pkl" for rank in range(world_size)]


def _evidence(folder: Path, number: int, world_size: int) -> Any:
    answers = _answers(folder, number, world_size)
    if all(path.exists() for path in answers):
        return [pickle.loads(path.read_bytes()) for path in answers]
    failed = folder / f"{number}.failed"
    return failed.read_text() if failed.exists() else f"not run: {RESTARTS + 1} cases before it ended their processes"


def _errors(folder: Path, world_size: int) -> str:
    texts = []
    for rank in range(world_size):
        told = [folder / f"{rank}.error", folder / f"{rank}.fault"]
        texts += [f"rank {rank}: {path.read_text()}" for path in told if path.exists() and path.stat().st_size]
    return "\n".join(texts) or "a rank ended, or was still running at the limit, without a word"
