"""No race in any training of the matrix, and the numbers are right: see tests/streams for what is recorded and how."""

from __future__ import annotations

import itertools
import math
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.checks import streams as page
from benchmarks.checks.streams import key_of
from benchmarks.pages.tables import read
from tests.fsdp import pairs
from tests.fsdp.pairs import STRATEGIES
from tests.streams.cases import EIGHT_BITS, FACTORS, OTHERS, SIZES, Case, cover, pairs_of, product
from tests.streams.edges import REASONS, needed
from tests.streams.programs import MAX_NORM, STEPS, data, program_of, shard
from tests.streams.recorder import Recorder, believing_in
from tests.streams.visits import Verdict, run_all, trained
from tests.support.covering import once
from tests.support.mutants import each, slips
from tests.support.spawn import run_ranks

SLICES, OF = 32, 256
"""Parts of the product that `make test-all` runs; an eighth of it. `benchmarks/checks/streams.py` runs more."""
REMAKE = "python benchmarks/checks/streams.py"

Found = list[Verdict]


@once
def covered() -> dict[Case, Found]:
    """The cover, in one visit for each world size."""
    return trained((*cover(), *OTHERS))


@once
def alone(world: int, k: int, clip: bool, more: str) -> dict[str, Tensor]:
    """Weights of the same training on one process, in fp64."""
    case = Case("no_shard", k=k, more=more)
    module = program_of(case).double()
    optimizer = pairs.adamw(module)
    for step in range(STEPS):
        for rank in range(world):
            for index in range(k):
                loss = module(data(case, rank, step, index).double()).square().mean() / (world * k)
                loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in module.named_parameters()}


def check(case: Case, found: Found) -> None:
    races = [str(race) for race in found[0].races]
    assert not races, "\n".join(races)
    for of_rank in (verdict.run.orders for verdict in found):
        for group, order in of_rank.items():
            first = found[group[1][0]].run.orders[group]
            assert order == first, f"ranks ask {group} for other things, or in another order"
    if case.policy in ("fp32", "exact") and case.more not in EIGHT_BITS:
        right = alone(case.world, case.k, case.clip, case.more)
        for name, weight in found[0].run.weights.items():
            torch.testing.assert_close(
                weight.double(), right[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("case", [*cover(), *OTHERS], ids=str)
def test_no_race(case: Case) -> None:
    check(case, covered()[case])


@pytest.mark.full
@pytest.mark.parametrize("sizes", SIZES)
def test_no_race_where_axes_are_of_other_sizes(sizes: str) -> None:
    outer = ("no_shard", "optim") if SIZES[sizes][1] == 1 else ("", "no_shard", "optim")
    some = itertools.product(STRATEGIES, outer, ("fp32", "bf16_comm", "bf16"), (1, 2))
    cases = [Case(strategy, o, k=k, clip=k > 1, policy=p, more=sizes) for strategy, o, p, k in some]
    for case, found in trained(cases, edges=False).items():
        check(case, found)


def test_the_cover_has_every_pair() -> None:
    assert pairs_of(cover()) == pairs_of(product())
    assert all(len(values) > 1 for values in FACTORS.values())


def test_every_edge_is_needed() -> None:
    table = needed(found[0].edges for found in covered().values())
    assert len(table) > 10
    spare = [edge for edge, logs in table.items() if not any(log.race for log in logs)]
    assert {edge.function for edge in spare} == set(REASONS), "\n".join(map(str, spare))


def test_the_host_waits_for_nothing_in_a_step() -> None:
    """Clipping included. What asks for a number or gives the host the optimizer's work is left out."""
    looks = ("looked at", "compared", "ordered")
    asked = [case for case in covered() if not case.offload and case.policy != "exact" and case.more not in looks]
    assert any(case.clip for case in asked)
    assert {str(case): covered()[case][0].stops for case in asked} == {str(case): {} for case in asked}


def test_under_offload_the_host_waits_for_gradients_and_for_no_weights() -> None:
    offloaded = [case for case in covered() if case.offload and case.policy != "exact" and case.more == ""]
    assert {case.strategy for case in offloaded} >= {"optim", "optim_grads", "optim_grads_params"}
    for case in offloaded:
        stops = covered()[case][0].stops
        assert stops["harness/fsdp/runtime/reduce.py:finish (synchronize)"] == 1
        assert not any("copy" in place for place in stops), (case, stops)


def test_the_guard_stops_the_host_once_a_step() -> None:
    (case,) = (case for case in covered() if case.more == "looked at")
    assert case.k > 1
    assert covered()[case][0].stops == {"harness/fsdp/guards.py:report (_local_scalar_dense)": 1}


def provoked(rank: int) -> str:
    """What a rank is told where the second microbatch of rank 1 is not finite; and whether the next step is right."""
    case = Case("optim_grads_params", k=2, more="looked at", policy="bf16_comm")
    with believing_in(Recorder().cuda):
        model, optimizer = shard(rank, case, program_of(case))
        told: Any = None
        for step in range(2):
            for index in range(case.k):
                x = data(case, rank, step, index).bfloat16()
                x[0, 0] = math.inf if (step, rank, index) == (0, 1, 1) else x[0, 0]
                loss, ends = model(x).float().square().mean(), step == 0 and index == 1
                expected: Any = pytest.raises(FloatingPointError) if ends else nullcontext(told)
                with model.sync() if index else model.no_sync(), expected as told:
                    loss.backward()
            if step == 0:
                optimizer.zero_grad()
        optimizer.step()
        model.close()
    return str(told.value)


def test_the_guard_names_parameter_rank_and_microbatch_when_it_looks_later() -> None:
    said = run_ranks(provoked, 2)
    assert said[0] == said[1]
    assert re.search(r": \S+ on rank 1 in microbatch 2: (NaN|Inf) among \d+ elements", said[0]), said[0]


def test_the_page_shows_the_edges_that_are_found() -> None:
    told = read("streams.json")
    recorded = needed(found[0].edges for found in covered().values())
    assert set(told["edges"]) == {key_of(edge) for edge in recorded}, f"run: {REMAKE}"
    assert not told["races"]
    assert {row["function"] for row in told["edges"].values() if row["example"] is None} == set(REASONS)
    assert page.PAGE.read_text(encoding="utf-8") == page.page(told), f"run: {REMAKE}"


@pytest.mark.full
@pytest.mark.parametrize("part", range(SLICES))
def test_no_race_in_the_product(part: int) -> None:
    for case, found in trained(product()[part::OF], edges=False).items():
        check(case, found)


UNEVEN = Case("no_shard", "no_shard", more="inner axis of three ranks", k=2)
"""NCCL moves equal chunks. Three ranks reduce-scatter and gather whole buckets, which they do not divide."""
SLIPS = slips(
    """
    not copied in: What is gathered into a longer buffer is not put there
        fsdp.comm.communicator.Evened.copy: if not self.is_copy: => if not (self.is_copy and back):
    not copied back: What came into a longer buffer stays there
        fsdp.comm.communicator.Evened.copy: if not self.is_copy: => if back or not self.is_copy:
    """
)


def _with_mistake(rank: int, name: str) -> Any:
    with SLIPS[name].patched():
        return run_all(rank, [UNEVEN], False)


@pytest.mark.parametrize("name", each("The engine where chunks differ", SLIPS))
def test_a_mistake_is_found(name: str) -> None:
    found = [of_rank[0] for of_rank in run_ranks(_with_mistake, UNEVEN.world, name)]
    with pytest.raises(AssertionError, match=r"weight|sums|gradients"):
        check(UNEVEN, found)
