"""What the recorded ranks of many trainings find: races, and what races without each edge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.streams.cases import Case
from tests.streams.cost import counts_of, step_of
from tests.streams.edges import Without, without_each
from tests.streams.programs import STEPS, Run, run
from tests.streams.races import Race, races_of
from tests.support.spawn import run_ranks


@dataclass
class Verdict:
    """Of a case on one rank. races, edges and num_operations: where it was recorded; edges: where asked for."""

    run: Run
    races: list[Race]
    edges: list[Without]
    num_operations: int = 0
    stops: dict[str, int] = field(default_factory=dict)
    """Of the host between the first forward and the end of `step()`, in the last step, by place."""


def run_all(rank: int, cases: Sequence[Case], edges: bool) -> list[Verdict]:
    """Cases of one world size in one process group; the first rank alone records.

    Args:
        edges: whether to look for the races without each edge, too: an analysis of the whole log for every edge.
    """
    found = []
    for case in cases:
        ran = run(rank, case, records=rank == 0)
        verdict = Verdict(replace(ran, log=None), [], [])
        if ran.log is not None:
            verdict.races, verdict.edges = races_of(ran.log), without_each(ran.log) if edges else []
            verdict.num_operations = len(ran.log.kernels)
            verdict.stops = counts_of(step_of(ran.log, STEPS - 1)).stops
        found.append(verdict)
    return found


def trained(cases: Sequence[Case], *, edges: bool = True) -> dict[Case, list[Verdict]]:
    """What every rank has of each case, by rank: one visit for each number of ranks."""
    found: dict[Case, list[Verdict]] = {}
    for world in sorted({case.world for case in cases}):
        alike = [case for case in cases if case.world == world]
        per_rank = run_ranks(run_all, world, alike, edges)
        found |= {case: [of_rank[place] for of_rank in per_rank] for place, case in enumerate(alike)}
    return found
