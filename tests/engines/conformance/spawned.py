"""The cases of one engine in processes of their own; a failure costs its case, not the rest.

A number of ranks has its own processes, forked for it: some engines patch torch, or keep state that outlives a case.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Sequence
from functools import cache
from importlib import import_module

import torch

from harness.config.schema import Config
from harness.engines.protocol import Ranks
from tests.engines.conformance.cases import Case
from tests.engines.conformance.trial import Evidence, run_case
from tests.support.visits import Lost, Visit


def run_all(cases: Sequence[Case]) -> dict[Case, list[Evidence] | str]:
    """Evidence of every rank by case, or what went wrong; all cases are of one engine."""
    found: dict[Case, list[Evidence] | str] = {}
    for world_size in sorted({case.world_size for case in cases}):
        todo = [(case, case.config()) for case in cases if case.world_size == world_size]
        visit = Visit(_attempt, world_size, _has_failed, patience=120, limit=240, one_group=True)
        for (case, _), ranks in zip(todo, visit.run(todo), strict=True):
            told = [f"rank {rank}: {_told(each)}" for rank, each in enumerate(ranks) if not isinstance(each, Evidence)]
            found[case] = "\n".join(told) or ranks
    return found


def _attempt(rank: int, work: tuple[Case, Config]) -> Evidence | str:
    """The evidence, or the traceback."""
    case, config = work
    try:
        _import_peer(case.engine)
        began = time.perf_counter()
        evidence = run_case(case, config, rank)
    except BaseException:
        return traceback.format_exc()
    evidence.seconds = time.perf_counter() - began
    return evidence


def _has_failed(answer: Evidence | str) -> bool:
    return isinstance(answer, str)


def _told(answer: Lost | str) -> str:
    return answer.why if isinstance(answer, Lost) else answer


@cache
def _import_peer(engine: str) -> None:
    if engine == "deepspeed":
        from harness.engines.adapters import deepspeed

        with deepspeed._surroundings(Ranks(0, 1, 0, torch.device("cpu"))):
            deepspeed._quiet_deepspeed()  # it compiles a program to see which of its kernels could be
    elif engine == "megatron_fsdp":
        import_module(engine)
    gc.collect()
    gc.freeze()  # DeepSpeed collects garbage a hundred times a case, and need not look through modules
