"""The traffic meter on known collectives: what three ranks have to send, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.fsdp import Observer
from harness.probe.collectives import CollectiveMeter, Row, by_kind
from harness.probe.traffic import Traffic
from tests.support.spawn import run_ranks

RANKS = 3
SHARD = 1000
"""Elements of one rank's part; fp32 unless said."""


def all_gather_base(rank: int) -> None:
    dist.all_gather_into_tensor(torch.empty(RANKS * SHARD), torch.ones(SHARD))


def all_gather_list(rank: int) -> None:
    dist.all_gather([torch.empty(SHARD) for _ in range(RANKS)], torch.ones(SHARD))


def reduce_scatter_base(rank: int) -> None:
    dist.reduce_scatter_tensor(torch.empty(SHARD), torch.ones(RANKS * SHARD))


def reduce_scatter_bf16(rank: int) -> None:
    dist.reduce_scatter_tensor(torch.empty(SHARD).bfloat16(), torch.ones(RANKS * SHARD).bfloat16())


def reduce_scatter_list(rank: int) -> None:
    dist.reduce_scatter(torch.empty(SHARD), [torch.ones(SHARD) for _ in range(RANKS)])


def all_reduce(rank: int) -> None:
    dist.all_reduce(torch.ones(RANKS * SHARD))


def all_reduce_of_one_double(rank: int) -> None:
    dist.all_reduce(torch.ones(1, dtype=torch.float64))


def all_to_all_even(rank: int) -> None:
    dist.all_to_all_single(torch.empty(RANKS * SHARD), torch.ones(RANKS * SHARD))


def all_to_all_uneven(rank: int) -> None:
    """Rank r sends (i + 1) rows of 5 to rank i, and so gets r + 1 rows from everyone."""
    sizes = [i + 1 for i in range(RANKS)]
    received = torch.empty(RANKS * (rank + 1), 5)
    dist.all_to_all_single(received, torch.ones(sum(sizes), 5), [rank + 1] * RANKS, sizes)


def broadcast(rank: int) -> None:
    dist.broadcast(torch.ones(SHARD), src=1)


def scatter(rank: int) -> None:
    parts = [torch.ones(SHARD) for _ in range(RANKS)] if rank == 1 else None
    dist.scatter(torch.empty(SHARD), parts, src=1)


def gather(rank: int) -> None:
    parts = [torch.empty(SHARD) for _ in range(RANKS)] if rank == 1 else None
    dist.gather(torch.ones(SHARD), parts, dst=1)


def reduce(rank: int) -> None:
    dist.reduce(torch.ones(SHARD), dst=1)


def ring(rank: int) -> None:
    sent = dist.isend(torch.ones(SHARD), (rank + 1) % RANKS)
    dist.recv(torch.empty(SHARD), (rank - 1) % RANKS)
    assert sent is not None
    sent.wait()


def in_backward(rank: int) -> None:
    """DDP's C++ reducer, called from autograd: one bucket of all gradients."""
    model = DistributedDataParallel(nn.Linear(30, 20, bias=False), init_sync=False)
    model(torch.ones(2, 30)).sum().backward()


def by_keyword(rank: int) -> None:
    """A call no fast path knows is still counted once."""
    group = dist.group.WORLD
    assert group is not None
    group.allreduce(tensors=[torch.ones(SHARD)], opts=dist.AllreduceOptions()).wait()


def subgroup(rank: int) -> None:
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(torch.ones(SHARD), group=group)


def labelled(rank: int) -> None:
    """A reduce-scatter built of sends counts once, in its bucket."""
    with Observer.announce("reduce_scatter", "blocks.0/fp32"):
        ring(rank)
        ring(rank)
    with Observer.announce("all_gather", "blocks.0/fp32"):
        all_gather_base(rank)


S, F = SHARD * 4, RANKS - 1
CASES: list[tuple[Callable[[int], None], str, list[int]]] = [
    (all_gather_base, "all_gather", [S * F] * RANKS),
    (all_gather_list, "all_gather", [S * F] * RANKS),
    (reduce_scatter_base, "reduce_scatter", [S * F] * RANKS),
    (reduce_scatter_bf16, "reduce_scatter", [S * F // 2] * RANKS),
    (reduce_scatter_list, "reduce_scatter", [S * F] * RANKS),
    (all_reduce, "all_reduce", [2 * S * F] * RANKS),
    (all_reduce_of_one_double, "all_reduce", [11] * RANKS),  # 2 * 8 * 2 / 3, rounded up
    (all_to_all_even, "all_to_all", [S * F] * RANKS),
    (all_to_all_uneven, "all_to_all", [20 * 5, 20 * 4, 20 * 3]),
    (broadcast, "broadcast", [0, S * F, 0]),
    (scatter, "scatter", [0, S * F, 0]),
    (gather, "gather", [S, 0, S]),
    (reduce, "reduce", [S, 0, S]),
    (ring, "send", [S] * RANKS),
    (in_backward, "all_reduce", [30 * 20 * 4 * 2 * F // RANKS] * RANKS),
    (by_keyword, "all_reduce", [-(-2 * S * F // RANKS)] * RANKS),
    (subgroup, "all_reduce", [S, S, -1]),
]


def measure(rank: int) -> dict[str, Any]:
    meter = CollectiveMeter()
    rows: dict[str, Any] = {}
    for function, _, _ in CASES:
        dist.barrier()
        meter.take()
        function(rank)
        rows[function.__name__] = meter.take()
    labelled(rank)
    rows["labelled"] = meter.take()
    with meter.paused():
        all_reduce(rank)
    rows["paused"] = meter.take()
    meter.close()
    all_reduce(rank)
    with closing(Traffic()) as watched, closing(CollectiveMeter()) as other:
        all_reduce(rank)
        rows["gave way"] = len(watched.take()), len(other.take())
        rows["closed"] = meter.take()
        rows["twice"] = _refusal()
    return rows


def _refusal() -> str:
    try:
        CollectiveMeter()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    return run_ranks(measure, RANKS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_bytes_each_rank_must_send(
    measured: list[dict[str, Any]], case: tuple[Callable[[int], None], str, list[int]]
) -> None:
    function, kind, expected = case
    for rank, num_bytes in enumerate(expected):
        rows = measured[rank][function.__name__]
        assert rows == ([] if num_bytes < 0 else [Row(kind, "", 1, num_bytes)])


def test_labels_take_the_bytes_of_what_they_are_built_of(measured: list[dict[str, Any]]) -> None:
    for rows in measured:
        assert rows["labelled"] == [
            Row("reduce_scatter", "blocks.0/fp32", 1, 2 * S),
            Row("all_gather", "blocks.0/fp32", 1, S * F),
        ]


def test_paused_and_closed_meters_count_nothing(measured: list[dict[str, Any]]) -> None:
    for rows in measured:
        assert rows["paused"] == []
        assert rows["closed"] == []
        assert "close it first" in rows["twice"]
        assert rows["gave way"] == (0, 1)


def test_kinds_are_sums_over_buckets_in_order_of_use() -> None:
    rows = [Row("all_gather", "a", 1, 10), Row("all_reduce", "", 2, 5), Row("all_gather", "b", 3, 7)]
    totals = by_kind(rows)
    assert totals == {"all_gather": {"count": 4, "bytes": 17}, "all_reduce": {"count": 2, "bytes": 5}}
    assert list(totals) == ["all_gather", "all_reduce"]
