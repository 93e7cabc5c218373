"""Runs checks in processes of their own: many checks in one set of ranks, each in a process group of its own."""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore

from harness.probe import collectives
from tests.fsdp.behaviours.catalog import BEHAVIOURS, SUBJECTS
from tests.fsdp.behaviours.lab import Broken, Lab, first_line
from tests.fsdp.behaviours.subject import NotOffered
from tests.support.forking import fork_ranks

HOLDS, FAILS, NOT_OFFERED, SILENT = "holds", "fails", "not offered", "no answer"


@dataclass(frozen=True)
class Trial:
    """One check on one subject.

    mutant: which of the behaviour's, or none; the check of a mutant ends with the first value that shows it.
    whole: of several layouts of a state, all are tried, and not only as many as it takes to meet each strategy.
    """

    subject: str
    key: str
    mutant: int | None = None
    whole: bool = False


@dataclass(frozen=True)
class Answer:
    """fact: what was measured, or why it was not. trace: where an exception that is no claim came from."""

    outcome: str
    fact: str
    trace: str = ""
    seconds: float = 0.0


def run(trials: Sequence[Trial], ranks: int, timeout: float = 60.0) -> dict[Trial, Answer]:
    """Answers of all trials, which have one number of ranks.

    A trial that ends its processes costs itself alone: the others are run by new ones, and it itself is tried twice.

    Args:
        timeout: seconds that a rank waits for another in a collective.
    """
    found: dict[Trial, Answer] = {}
    todo, tried = list(trials), set[Trial]()
    while todo:
        with tempfile.TemporaryDirectory() as folder:
            # a rank that has ended is not waited for: gloo at times closes a connection before a trial has begun
            limit = 120 + 15 * len(todo)
            fork_ranks(_rank, ranks, ranks, folder, list(todo), timeout, seconds=limit, first_failure_ends_all=True)
            done = 0
            while done < len(todo) and (answers := _collect(Path(folder), done, ranks)):
                found[todo[done]] = combined(answers)
                done += 1
        todo = todo[done:]
        if todo and todo[0] in tried:
            found[todo[0]] = Answer(SILENT, "ended its processes, or never came to an end")
            del todo[0]
        tried.update(todo[:1])
    return found


def combined(answers: Sequence[Answer]) -> Answer:
    """The ranks' answers as one: a rank whose claim failed speaks for all, before one that merely broke off."""
    seconds = max(each.seconds for each in answers)
    for group in (
        [a for a in answers if a.outcome == FAILS and not a.trace],
        [a for a in answers if a.outcome == FAILS],
        [a for a in answers if a.outcome == NOT_OFFERED],
        answers,
    ):
        if group:
            return Answer(group[0].outcome, group[0].fact, group[0].trace, seconds)
    raise ValueError("no rank answered")


def _rank(rank: int, ranks: int, folder: str, trials: list[Trial], timeout: float) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    store = FileStore(f"{folder}/store", ranks)
    code = 1
    try:
        _meet(PrefixStore("begun", store), rank, ranks)
        for number, trial in enumerate(trials):
            answer = _answer(rank, ranks, trial, PrefixStore(str(number), store), timeout)
            part = Path(folder) / f"{number}-{rank}.part"
            part.write_bytes(pickle.dumps(answer))
            part.rename(part.with_suffix(".pkl"))
            _meet(PrefixStore(f"after {number}", store), rank, ranks)
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)  # at once: threads of an engine that broke off may wait for ever


def _answer(rank: int, ranks: int, trial: Trial, store: Any, timeout: float) -> Answer:
    """Put one check to one subject in a process group of its own; a rank that fails leaves it at once."""
    began = time.perf_counter()
    behaviour = BEHAVIOURS[trial.key]
    broken = nullcontext() if trial.mutant is None else behaviour.mutants[trial.mutant].patch()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
    try:
        with broken:
            lab = Lab(SUBJECTS[trial.subject], whole=trial.whole, hasty=trial.mutant is not None)
            fact = behaviour.check(lab)
            lab.close()
        answer = Answer(HOLDS, fact)
        _meet(PrefixStore("held", store), rank, ranks, patience=timeout)
    except NotOffered as reason:
        answer = Answer(NOT_OFFERED, str(reason))
    except Broken as measured:
        answer = Answer(FAILS, str(measured))
        _meet(PrefixStore("held", store), rank, ranks, patience=timeout)
    except Exception as error:
        answer = Answer(FAILS, f"{type(error).__name__}: {first_line(error)}", traceback.format_exc())
    finally:
        _close_meters()
        dist.destroy_process_group()
    return Answer(answer.outcome, answer.fact, answer.trace, time.perf_counter() - began)


def _meet(store: Any, rank: int, ranks: int, patience: float = 180.0) -> None:
    """Wait for the other ranks without the process group; those that do not come are left."""
    store.set(f"{rank}", "here")
    try:
        store.wait([f"{each}" for each in range(ranks)], timedelta(seconds=patience))
    except Exception:
        if patience > 60:
            raise


def _close_meters() -> None:
    if collectives._active is not None:
        collectives._active.close()


def _collect(folder: Path, number: int, ranks: int) -> list[Answer]:
    parts = [folder / f"{number}-{rank}.pkl" for rank in range(ranks)]
    return [pickle.loads(part.read_bytes()) for part in parts] if all(part.exists() for part in parts) else []
