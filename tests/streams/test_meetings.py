"""Where ranks use different units and work is queued, they ask every communicator for the same, and nobody waits for
ever."""

from __future__ import annotations

import random
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from tests.fsdp import pairs
from tests.streams import meetings
from tests.streams.cases import POLICIES, Case
from tests.streams.log import Kernel, Mark, Stop, Wait
from tests.streams.meetings import Rank
from tests.streams.programs import STEPS, groups_of, restart_streams, shard
from tests.streams.recorder import Recorder, believing_in, recording
from tests.support.covering import once
from tests.support.mutants import each, slips
from tests.support.spawn import run_ranks

BLOCKS = 6


class Choosing(pairs.Model):
    """Each microbatch uses some of the blocks, under gates of the root, whose gradients come between those of units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(pairs.Block(hidden) for hidden in range(3, 3 + BLOCKS))
        self.gates = nn.ParameterList(torch.ones(pairs.WIDTH) for _ in range(BLOCKS))

    def forward(self, x: Tensor, chosen: tuple[int, ...] = ()) -> Tensor:
        x = self.entry(x)
        for place in chosen:
            x = x + self.gates[place] * self.blocks[place](x)
        y: Tensor = self.exit(x)
        return y


def chosen_by(rank: int, step: int, index: int) -> tuple[int, ...]:
    source = random.Random(100 * rank + 10 * step + index)
    return tuple(place for place in range(BLOCKS) if source.random() < 0.5)


def _used(rank: Rank) -> tuple[int, ...]:
    """Numbers of kernels between two waits or marks, which tell the units of each step."""
    places = [place for place, entry in enumerate(rank.log) if not isinstance(entry, Kernel)]
    return tuple(end - begin for begin, end in pairwise(places))


def record(rank: int, case: Case) -> Rank:
    with believing_in(Recorder().cuda):
        model, optimizer = shard(rank, case, Choosing())
        _, groups = groups_of(rank, case.hosts, case.inner)
        with recording() as recorder, meetings.apart():
            restart_streams(model, recorder)
            for step in range(STEPS):
                for index in range(case.k):
                    x = pairs.data(step, rank * case.k + index).to(POLICIES[case.policy][0])
                    with nullcontext() if index == case.k - 1 else model.no_sync():
                        model(x, chosen_by(rank, step, index)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            log = [entry for entry in recorder.log.entries if isinstance(entry, Kernel | Mark | Wait | Stop)]
        model.close()
    return Rank(log, {group.stream_name: group.ranks for group in groups})


CASES = (
    *(Case("optim_grads_params", k=2, prefetch=prefetch) for prefetch in (0, 1, 2)),
    Case("optim_grads_params", buffers="double"),
    Case("optim_grads_params", buffers="user", policy="bf16_comm"),
    Case("optim_grads_params", recompute="kept", policy="bf16"),
    Case("optim_grads_params", prefetch=3),
    Case("optim_grads", k=2),
    Case("optim_grads", offload=True),
    Case("optim", k=2),
    Case("no_shard"),
    Case("optim_grads_params", "optim", k=2),
)
ALIKE = Case("optim_grads_params", more="one communicator")


def record_all(rank: int, cases: list[Case], wrong: str = "") -> list[Rank]:
    with MISTAKES[wrong][0].patched() if wrong else nullcontext():
        return [record(rank, case) for case in cases]


@once
def recorded() -> dict[Case, list[Rank]]:
    found: dict[Case, list[Rank]] = {}
    for world in sorted({case.world for case in CASES}):
        cases = [case for case in (*CASES, ALIKE) if case.world == world]
        per_rank = run_ranks(record_all, world, cases)
        found |= {case: [of_rank[place] for of_rank in per_rank] for place, case in enumerate(cases)}
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_that_use_different_units_meet(case: Case) -> None:
    assert len({_used(rank) for rank in recorded()[case]}) > 1
    assert not meetings.found(recorded()[case])


def test_with_one_communicator_they_do_not() -> None:
    """A limit (docs/engine.md): what a rank does not use it reduces at once, before what others gather first."""
    assert any("all_gather" in each and "reduce_scatter" in each for each in meetings.found(recorded()[ALIKE]))


MISTAKES = slips(
    r"""
    gathers left out: A unit that a rank does not use is not gathered there
        fsdp.runtime.gather.GatherPipeline._take_turns: self._start_unshard(unit) => ...
        all_gather
    reductions out of turn: A unit is reduced when this rank is done with it, whatever is to be reduced before it
        fsdp.runtime.reduce.ReducePipeline.mark_ready: self._ready.add(unit.name)
            => self.order.insert(self._issued, self.order.pop(self.order.index(unit)))\n    self._ready.add(unit.name)
        reduce_scatter
    """
)


@pytest.mark.parametrize("name", each("The engine where ranks meet", MISTAKES))
def test_a_mistake_is_found(name: str) -> None:
    ranks = [of_rank[0] for of_rank in run_ranks(record_all, CASES[0].world, [CASES[0]], name)]
    assert any(MISTAKES[name][1] in told for told in meetings.found(ranks))
