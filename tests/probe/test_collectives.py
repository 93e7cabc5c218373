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


def ones(numel: int = SHARD) -> torch.Tensor:
    return torch.ones(numel)


def uneven(rank: int) -> None:
    """Rank r sends (i + 1) rows of 5 to rank i, and so gets r + 1 rows from everyone."""
    sizes = [i + 1 for i in range(RANKS)]
    received = torch.empty(RANKS * (rank + 1), 5)
    dist.all_to_all_single(received, torch.ones(sum(sizes), 5), [rank + 1] * RANKS, sizes)


def ring(rank: int) -> None:
    sent = dist.isend(ones(), (rank + 1) % RANKS)
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
    group.allreduce(tensors=[ones()], opts=dist.AllreduceOptions()).wait()


def subgroup(rank: int) -> None:
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(ones(), group=group)


def labelled(rank: int) -> None:
    """A reduce-scatter built of sends counts once, in its bucket."""
    with Observer.announce("reduce_scatter", "blocks.0/fp32"):
        ring(rank)
        ring(rank)
    with Observer.announce("all_gather", "blocks.0/fp32"):
        dist.all_gather_into_tensor(ones(RANKS * SHARD), ones())


ALL = RANKS * SHARD
S, F = SHARD * 4, RANKS - 1
CASES: dict[str, tuple[Callable[[int], object], str, list[int]]] = {
    "all_gather base": (lambda rank: dist.all_gather_into_tensor(ones(ALL), ones()), "all_gather", [S * F] * RANKS),
    "all_gather list": (lambda rank: dist.all_gather([*ones(ALL).chunk(RANKS)], ones()), "all_gather", [S * F] * RANKS),
    "reduce_scatter base": (
        lambda rank: dist.reduce_scatter_tensor(ones(), ones(ALL)), "reduce_scatter", [S * F] * RANKS
    ),
    "reduce_scatter bf16": (
        lambda rank: dist.reduce_scatter_tensor(ones().bfloat16(), ones(ALL).bfloat16()),
        "reduce_scatter", [S * F // 2] * RANKS,
    ),
    "reduce_scatter list": (
        lambda rank: dist.reduce_scatter(ones(), [*ones(ALL).chunk(RANKS)]), "reduce_scatter", [S * F] * RANKS
    ),
    "all_reduce": (lambda rank: dist.all_reduce(ones(ALL)), "all_reduce", [2 * S * F] * RANKS),
    "all_reduce of one double": (  # 2 * 8 * 2 / 3, rounded up
        lambda rank: dist.all_reduce(ones(1).double()), "all_reduce", [11] * RANKS
    ),
    "all_to_all even": (lambda rank: dist.all_to_all_single(ones(ALL), ones(ALL)), "all_to_all", [S * F] * RANKS),
    "all_to_all uneven": (uneven, "all_to_all", [20 * 5, 20 * 4, 20 * 3]),
    "broadcast": (lambda rank: dist.broadcast(ones(), src=1), "broadcast", [0, S * F, 0]),
    "scatter": (
        lambda rank: dist.scatter(ones(), [*ones(ALL).chunk(RANKS)] if rank == 1 else None, src=1),
        "scatter", [0, S * F, 0],
    ),
    "gather": (
        lambda rank: dist.gather(ones(), [*ones(ALL).chunk(RANKS)] if rank == 1 else None, dst=1),
        "gather", [S, 0, S],
    ),
    "reduce": (lambda rank: dist.reduce(ones(), dst=1), "reduce", [S, 0, S]),
    "ring": (ring, "send", [S] * RANKS),
    "in backward": (in_backward, "all_reduce", [30 * 20 * 4 * 2 * F // RANKS] * RANKS),
    "by keyword": (by_keyword, "all_reduce", [-(-2 * S * F // RANKS)] * RANKS),
    "subgroup": (subgroup, "all_reduce", [S, S, -1]),
}  # fmt: skip
"""A collective, its kind, and the bytes that each rank sends; -1: it takes no part."""


def measure(rank: int) -> dict[str, Any]:
    meter = CollectiveMeter()
    rows: dict[str, Any] = {}
    for name, (collective, *_) in CASES.items():
        dist.barrier()
        meter.take()
        collective(rank)
        rows[name] = meter.take()
    labelled(rank)
    rows["labelled"] = meter.take()
    with meter.paused():
        dist.all_reduce(ones(ALL))
    rows["paused"] = meter.take()
    meter.close()
    dist.all_reduce(ones(ALL))
    with closing(Traffic()) as watched, closing(CollectiveMeter()) as other:
        dist.all_reduce(ones(ALL))
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


@pytest.mark.parametrize("name", CASES)
def test_bytes_each_rank_must_send(measured: list[dict[str, Any]], name: str) -> None:
    _, kind, expected = CASES[name]
    for of_rank, num_bytes in zip(measured, expected, strict=True):
        assert of_rank[name] == ([] if num_bytes < 0 else [Row(kind, "", 1, num_bytes)])


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
