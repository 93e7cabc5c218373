"""Counts and bytes of every collective, and bytes kept in memory, against the formulas; to the byte, padding included.

P is a bucket's elements as they travel (parameters and named padding), b_w and b_g bytes of a weight and of a gradient
on the wire, N ranks, k microbatches, f = (N - 1) / N. What a rank sends in a step:

    no_shard             2 P b_g f                     one all-reduce
    optim                P (b_g + b_w) f               one reduce-scatter, one all-gather
    optim_grads          P (k b_g + b_w) f             k reduce-scatters, one all-gather
    optim_grads_params   k P (2 b_w + b_g) f           per microbatch: two all-gathers, one reduce-scatter,
                                                       less the gather skipped for the unit the forward ends with
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from harness.engines.protocol import Ranks
from harness.engines.registry import engine_class
from harness.models.workload import LlamaWorkload
from harness.probe.collectives import CollectiveMeter, Row
from tests.fsdp.trial import Case, batches, way_of
from tests.spawn import run_ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
CASES = [
    Case("native", strategy, world_size, k, dtype=dtype, steps=2)
    for strategy, world_size, k, dtype in itertools.product(STRATEGIES, (2, 3, 4), (1, 3), ("fp32", "bf16_comm"))
]
B_W = {"fp32": 4, "bf16_comm": 2}
B_G = {"fp32": 4, "bf16_comm": 2}
B_MAIN_GRAD = 4


@dataclass
class Traffic:
    """rows: of the second step. buckets: name -> (elements on the wire, whole bucket, parameters, parameters here)."""

    rows: list[Row]
    buckets: dict[str, tuple[int, int, int, int]]
    memory: dict[str, int]
    transient: int
    largest: int


def measure(rank: int, cases: list[Case]) -> list[Traffic]:
    found = []
    for case in cases:
        with way_of(case).taken():
            found.append(_measure(rank, case))
    return found


def _measure(rank: int, case: Case) -> Traffic:
    config = case.config()
    ranks = Ranks(rank, case.world_size, rank, torch.device("cpu"))
    engine = engine_class(config.engine.name)(LlamaWorkload(config), config, ranks)
    meter = CollectiveMeter()
    for step in range(case.steps):
        meter.take()
        todo = batches(case, rank, step)
        for index, batch in enumerate(todo):
            engine.forward_backward(batch, last=index == len(todo) - 1)
        engine.step(1e-3)
    rows = meter.take()
    meter.close()
    model = engine.model  # type: ignore[attr-defined]
    buckets = {
        b.name: (x.comm_numel, x.bucket_numel, x.param_numel, x.param_numel_on(b.cuts.position))
        for b, x in ((each, each.layout) for each in model.buckets)
    }
    largest = max(b.layout.bucket_numel for b in model.buckets)
    traffic = Traffic(rows, buckets, engine.accounted_bytes(), model.transient_peak_bytes, largest)
    engine.close()
    return traffic


@cache
def traffic(world_size: int) -> dict[Case, list[Traffic]]:
    """Case -> traffic of each rank."""
    cases = [case for case in CASES if case.world_size == world_size]
    per_rank = run_ranks(measure, world_size, cases)
    return {case: [found[i] for found in per_rank] for i, case in enumerate(cases)}


def table(rows: list[Row]) -> dict[tuple[str, str], Row]:
    return {(row.bucket, row.kind): row for row in rows}


def expected_counts(case: Case, bucket: str, last: str) -> dict[str, int]:
    if case.strategy == "no_shard":
        return {"all_reduce": 1}
    if case.strategy == "optim":
        return {"reduce_scatter": 1, "all_gather": 1}
    if case.strategy == "optim_grads":
        return {"reduce_scatter": case.k, "all_gather": 1}
    return {"reduce_scatter": case.k, "all_gather": case.k * (1 if bucket == last else 2)}


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.strategy}-{c.world_size}ranks-k{c.k}-{c.dtype}")
def test_counts_and_bytes_equal_the_formulas(case: Case) -> None:
    ranks = traffic(case.world_size)[case]
    last = list(ranks[0].buckets)[-1]
    for name, (moved, whole, _, _) in ranks[0].buckets.items():
        for kind, count in expected_counts(case, name, last).items():
            rows = [table(rank.rows)[name, kind] for rank in ranks]
            sent = sum(row.bytes for row in rows)
            print(f"{case.strategy} N={case.world_size} k={case.k} {name}: {count} {kind}, {sent} bytes over all ranks")
            assert {row.count for row in rows} == {count}
            others = case.world_size - 1
            if kind == "all_reduce":  # first leg on the wire's dtype, second in the main gradients'
                assert sent == others * whole * (B_G[case.dtype] + B_MAIN_GRAD)
            else:
                width = B_W[case.dtype] if kind == "all_gather" else B_G[case.dtype]
                assert sent == count * others * moved * width
                assert len({row.bytes for row in rows}) == 1, "every rank sends the same"


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.strategy}-{c.world_size}ranks-k{c.k}-{c.dtype}")
def test_nothing_else_travels_but_the_norm(case: Case) -> None:
    last = list(traffic(case.world_size)[case][0].buckets)[-1]
    for rank in traffic(case.world_size)[case]:
        wanted = {(name, kind) for name in rank.buckets for kind in expected_counts(case, name, last)} | (
            {("norm", "all_reduce")} if case.strategy != "no_shard" else set()
        )
        assert set(table(rank.rows)) == wanted


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.strategy}-{c.world_size}ranks-k{c.k}-{c.dtype}")
def test_persistent_memory_equals_the_formula(case: Case) -> None:
    """anchors: P(w + m + g + o) with m, g, o (and w) divided by N as the strategy shards them; m = 0 where it is w."""
    ranks = traffic(case.world_size)[case]
    parameters = sum(bucket[2] for bucket in ranks[0].buckets.values())
    mixed = case.dtype != "fp32"
    stage = STRATEGIES.index(case.strategy)
    sharded = sum(sum(bucket[3] for bucket in rank.buckets.values()) for rank in ranks)
    assert sharded == (parameters if stage else parameters * case.world_size), "every element on one rank (or on all)"
    for rank in ranks:
        here = sum(bucket[3] for bucket in rank.buckets.values())
        assert rank.memory["compute_weights"] == (0 if stage == 3 else parameters * B_W[case.dtype])
        assert rank.memory["main_weights"] == (here * 4 if mixed or stage == 3 else 0)
        assert rank.memory["main_grads"] == (parameters if stage <= 1 else here) * 4
        assert rank.memory["optimizer"] == here * 8


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.strategy}-{c.world_size}ranks-k{c.k}-{c.dtype}")
def test_transient_memory_is_at_most_two_units_of_weights_and_two_of_gradients(case: Case) -> None:
    stage = STRATEGIES.index(case.strategy)
    for rank in traffic(case.world_size)[case]:
        weights = 2 * rank.largest * B_W[case.dtype] if stage == 3 else 0
        gradients = 2 * rank.largest * B_G[case.dtype] if stage >= 2 else 0
        assert rank.transient <= weights + gradients
        if stage >= 2:
            assert rank.transient > 0
