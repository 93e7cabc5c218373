"""Counts and bytes of every collective, and bytes kept in memory, against the formulas; to the byte, padding included.

P is a bucket's elements as they travel (parameters and named padding); b_w and b_g bytes of a weight and of a gradient
on the wire, b_m of a main gradient; I inner and O outer ranks, k microbatches, f(N) = (N - 1) / N. A rank sends in a
step (docs/engine.md has the same table):

    inner                inside                                      outside, HSDP             outside, HFSDP
    no_shard             P (b_g + b_m) f(I)  (HFSDP: * below)        (P/I) (b_g + b_m) f(O)    (P/I) (b_g + b_w) f(O)
    optim                P (b_g + b_w) f(I)                          the same                  the same
    optim_grads          P (k b_g + b_w) f(I)                        the same                  the same
    optim_grads_params   k P (2 b_w + b_g) f(I), less one gather     the same                  the same
                         a microbatch of the unit a forward ends with

    * P (b_g + b_m/O + b_w) f(I): only 1/O of the reduced gradient goes back, and weights are gathered.

Without an outer axis O = 1, and nothing goes outside.
"""

from __future__ import annotations

import itertools
from contextlib import closing
from dataclasses import dataclass

import pytest
import torch

from harness.engines.protocol import Ranks, engine_class
from harness.fsdp.comm.events import OUTER
from harness.fsdp.options import Transport
from harness.fsdp.storage.param_group import ParamGroup
from harness.models.workload import LlamaWorkload
from harness.probe.collectives import CollectiveMeter, Row
from tests.fsdp.trial import Case, batches, transport_of
from tests.support.covering import Cover, once
from tests.support.spawn import run_ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
ALONE = [
    Case("native", strategy, world_size, k, dtype=dtype, steps=2)
    for strategy, world_size, k, dtype in itertools.product(STRATEGIES, (2, 3, 4), (1, 3), ("fp32", "bf16_comm"))
]
HYBRID = [
    Case("native", strategy, 4, k, dtype=dtype, steps=2, outer=outer, outer_strategy=split)
    for strategy, outer, split, k, dtype in itertools.product(
        STRATEGIES, (2, 4), ("no_shard", "optim"), (1, 3), ("fp32", "bf16_comm")
    )
]
CASES = Cover(
    [*ALONE, *HYBRID],
    values=lambda case: ((case.world_size, case.outer, case.outer_strategy), case.strategy, case.k, case.dtype),
    key=lambda case: case.world_size,
)
B_W = {"fp32": 4, "bf16_comm": 2}
B_G = {"fp32": 4, "bf16_comm": 2}
B_MAIN_GRAD = 4
UNITS = ("embedding", "blocks.0", "blocks.1", "head")
WIDTHS = {"fp32": "float32", "bf16_comm": "bfloat16"}


@dataclass
class Traffic:
    """rows: of the second step. buckets: name -> elements (on the wire, whole bucket, parameters, parameters of this
    rank, parameters of its inner shard)."""

    rows: list[Row]
    buckets: dict[str, tuple[int, int, int, int, int]]
    memory: dict[str, int]
    transient: int
    largest: int
    rests: set[int]
    """Bytes of buckets alive before and after each step."""


def measure(rank: int, cases: list[Case]) -> list[Traffic]:
    return [measure_case(rank, case) for case in cases]


def measure_case(rank: int, case: Case) -> Traffic:
    config = case.config()
    ranks = Ranks(rank, case.world_size, rank, torch.device("cpu"))
    engine = engine_class(config.engine.name)(LlamaWorkload(config), config, ranks)
    model = engine.model
    rests = set()
    with closing(CollectiveMeter()) as meter:
        for step in range(case.steps):
            meter.take()
            todo = batches(case, rank, step)
            for index, batch in enumerate(todo):
                engine.forward_backward(batch, last=index == len(todo) - 1)
            rests.add(model.engine.memory.live_bytes)
            engine.step(1e-3)
            rests.add(model.engine.memory.live_bytes)
        rows = meter.take()
    buckets = {
        b.name: (
            sum(s.numel for s in x.segments),
            x.bucket_numel,
            x.param_numel,
            x.param_numel_on(b.cuts.layout_rank),
            inside(b),
        )
        for b, x in ((each, each.layout) for each in model.engine.buckets)
    }
    largest = max(b.layout.bucket_numel for b in model.engine.buckets)
    peak = model.engine.counters()["transient_peak_bytes"]
    traffic = Traffic(rows, buckets, engine.accounted_bytes(), peak, largest, rests)
    engine.close()
    return traffic


@once
def traffic(cases: tuple[Case, ...]) -> dict[Case, list[Traffic]]:
    """Case -> traffic of each rank."""
    per_rank = run_ranks(measure, cases[0].world_size, list(cases))
    return {case: [found[i] for found in per_rank] for i, case in enumerate(cases)}


def table(rows: list[Row]) -> dict[tuple[str, str], Row]:
    return {(row.bucket, row.kind): row for row in rows}


def inside(bucket: ParamGroup) -> int:
    return sum(bucket.cuts.inner_slice(slot).numel for slot in bucket.layout.slots)


def name_of(case: Case) -> str:
    mesh = f"{case.world_size // case.outer}x{case.outer}-{case.outer_strategy}" if case.outer > 1 else case.world_size
    return f"{case.strategy}-{mesh}-k{case.k}-{case.dtype}"


def expected(case: Case, bucket: str, moved: int, whole: int, last: str) -> dict[tuple[str, str], tuple[int, int]]:
    """(bucket, kind) -> collectives a rank, and bytes sent by all ranks together."""
    inner, outer, stage = case.world_size // case.outer, case.outer, STRATEGIES.index(case.strategy)
    splits_outside = outer > 1 and case.outer_strategy == "optim"
    b_w, b_g, b_m = B_W[case.dtype], B_G[case.dtype], B_MAIN_GRAD
    if stage == 0 and not splits_outside:
        moved = whole  # cut evenly, wherever parameters begin
    found: dict[tuple[str, str], tuple[int, int]] = {}
    within = (inner - 1) * outer * moved
    if stage == 0:
        # gloo gathers pieces of one length
        pieces = -(-moved // inner) * inner if transport_of(case) is Transport.backend else moved
        back = (inner - 1) * pieces * (1 if splits_outside else outer)
        found[bucket, "all_reduce"] = (1, within * b_g + back * b_m)
        gathers = 1 if splits_outside else 0
    else:
        reductions = case.k if stage >= 2 else 1
        found[bucket, "reduce_scatter"] = (reductions, reductions * within * b_g)
        gathers = case.k * (1 if bucket == last else 2) if stage == 3 else 1
    if gathers:
        found[bucket, "all_gather"] = (gathers, gathers * within * b_w)
    if splits_outside:
        found[bucket + OUTER, "reduce_scatter"] = (1, (outer - 1) * moved * b_g)
        found[bucket + OUTER, "all_gather"] = (1, (outer - 1) * moved * b_w)
    elif outer > 1:
        found[bucket + OUTER, "all_reduce"] = (1, (outer - 1) * moved * (b_g + b_m))
    return {key: value for key, value in found.items() if value[1]}


def check_counts_and_bytes(case: Case, ranks: list[Traffic]) -> None:
    assert list(ranks[0].buckets) == [f"{unit}/{WIDTHS[case.dtype]}" for unit in UNITS], "buckets of other units"
    last = list(ranks[0].buckets)[-1]
    wanted = {}
    for name, (moved, whole, *_) in ranks[0].buckets.items():
        wanted |= expected(case, name, moved, whole, last)
    splits = case.strategy != "no_shard" or (case.outer > 1 and case.outer_strategy == "optim")
    besides = {("used parameters", "all_reduce")} | ({("norm", "all_reduce")} if splits else set())
    for rank in ranks:
        assert set(table(rank.rows)) == wanted.keys() | besides, "what travels is not what the formulas have"
        assert table(rank.rows)["used parameters", "all_reduce"].count == 1
    for (name, kind), (count, sent) in wanted.items():
        rows = [table(rank.rows)[name, kind] for rank in ranks]
        print(f"{name_of(case)} {name}: {count} {kind}, {sent} bytes over all ranks")
        assert {row.count for row in rows} == {count}, f"collectives of {name}"
        assert sum(row.bytes for row in rows) == sent, f"bytes of {name}"
        if kind != "all_reduce" and case.strategy != "no_shard":
            assert len({row.bytes for row in rows}) == 1, "every rank sends the same"


def check_persistent_memory(case: Case, ranks: list[Traffic]) -> None:
    """P(w + m + g + o), each term divided by what splits it: o and m by all axes that split, g and w by the inner one.

    m = 0 where the compute weights that are kept have its dtype.
    """
    parameters = sum(bucket[2] for bucket in ranks[0].buckets.values())
    stage = STRATEGIES.index(case.strategy)
    splits_outside = case.outer > 1 and case.outer_strategy == "optim"
    keeps_shards = stage == 3 and splits_outside
    copies = (1 if stage else case.world_size // case.outer) * (1 if splits_outside else case.outer)
    held = sum(sum(bucket[3] for bucket in rank.buckets.values()) for rank in ranks)
    assert held == parameters * copies, "elements are not on so many ranks"
    for rank in ranks:
        here = sum(bucket[3] for bucket in rank.buckets.values())
        shard = sum(bucket[4] for bucket in rank.buckets.values())
        kept = {0: parameters, 1: parameters, 2: parameters, 3: shard if keeps_shards else 0}[stage]
        apart = case.dtype != "fp32" or (stage == 3 and not keeps_shards)
        assert rank.memory["compute_weights"] == kept * B_W[case.dtype]
        assert rank.memory["main_weights"] == (here * 4 if apart else 0)
        assert rank.memory["main_grads"] == (parameters if stage <= 1 else shard) * 4, "bytes of main gradients"
        assert rank.memory["optimizer"] == here * 8


def check_transient_memory(case: Case, ranks: list[Traffic]) -> None:
    """At most two units of weights and two of gradients, and nothing between steps."""
    stage = STRATEGIES.index(case.strategy)
    for rank in ranks:
        assert rank.rests == {0}, "buckets are alive at rest"
        weights = 2 * rank.largest * B_W[case.dtype] if stage == 3 else 0
        copied = case.dtype != "fp32"  # what is sent is a copy of the sums
        gradients = 2 * rank.largest * B_G[case.dtype] if stage >= 2 or copied else 0
        gradients += 2 * rank.largest * B_G[case.dtype] if case.outer > 1 and copied else 0
        assert rank.transient <= weights + gradients, "at most two units' weights and gradients"
        if stage >= 2 or copied:
            assert rank.transient > 0


def check(case: Case, ranks: list[Traffic]) -> None:
    check_counts_and_bytes(case, ranks)
    check_persistent_memory(case, ranks)
    check_transient_memory(case, ranks)


@pytest.mark.parametrize("case", CASES.params(name_of))
def test_traffic_and_memory_equal_the_formulas(case: Case) -> None:
    check(case, traffic(CASES.batch(case))[case])
