"""Data-parallel by tensor-parallel ranks against one process in fp64, against FSDP2, and each other to the bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.fsdp import MixedPrecisionPolicy
from harness.fsdp.comm.events import OUTER
from harness.probe.collectives import FUNCTIONAL, CollectiveMeter, Row
from tests.fsdp.pairs import STRATEGIES
from tests.fsdp.tensor_parallel.training import (
    SEQUENCES,
    Case,
    Record,
    Shape,
    alone,
    built,
    in_fsdp2,
    loss_of,
    mesh_of,
    rows_of,
    sharded,
    train_all,
)
from tests.support.covering import Cover, once
from tests.support.spawn import run_ranks

MESHES = {"2x2": (1, 2, 2), "1x4": (1, 1, 4), "4x1": (1, 4, 1), "2x1x2": (2, 1, 2)}
"""Outer, inner and tensor-parallel ranks."""
TRAINED = {"sgd, clipped": ("sgd", 0.05), "adamw": ("adamw", None)}
MODELS = {
    "untied": Shape(),
    "tied": Shape(tied=True),
    "sequence": Shape(sequence_parallel=True),
    "tied sequence": Shape(tied=True, sequence_parallel=True),
}
CLOSE = {"sgd": 1e-13, "adamw": 3e-10}
"""How far a few steps in fp64 may part: gradients of sums in another order differ by 1e-16, and of one that is as small
as Adam's eps = 1e-8 Adam makes lr / eps = 1e6 times as much in each step."""


def case(mesh: str, strategy: str, outer: str, k: int, trained: str, model: str, **more: Any) -> Case:
    sizes = MESHES[mesh]
    optimizer, clip = TRAINED[trained]
    given: dict[str, Any] = {"outer": sizes[0], "outer_strategy": outer, "k": k, "shape": MODELS[model], "steps": 2}
    return Case(sizes[1], sizes[2], strategy=strategy, optimizer=optimizer, clip=clip, **given | more)


Point = tuple[str, str, str, int, str, str]
POINTS = Cover(
    (
        point
        for point in itertools.product(MESHES, STRATEGIES, ("no_shard", "optim"), (1, 2), TRAINED, MODELS)
        if point[0] == "2x1x2" or point[2] == "no_shard"
    ),
    values=tuple,
    key=lambda _: "four ranks",
)


@once
def records(points: tuple[Point, ...]) -> dict[Point, list[Record]]:
    """Point -> its record on each rank."""
    ran = run_ranks(train_all, 4, [case(*point) for point in points])
    return {point: [of_rank[place] for of_rank in ran] for place, point in enumerate(points)}


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, str]:
    assert list(found) == [name for name in wanted if name in found], "other names, or in another order"
    apart = [(float((value - wanted[name]).abs().max()), name) for name, value in found.items()]
    return max(apart)


@pytest.mark.parametrize("point", POINTS.params(lambda point: "-".join(map(str, point))))
def test_training_equals_one_process_in_fp64(point: Point) -> None:
    ran, wanted = records(POINTS.batch(point))[point], alone(case(*point))
    asked = case(*point)
    close = CLOSE[asked.optimizer]
    told = [ran[place * asked.tp].losses for place in range(asked.data_parallel)]
    assert [sum(each) / len(each) for each in zip(*told, strict=True)] == pytest.approx(wanted.losses, abs=close)
    for record in ran:
        assert furthest(record.gradients, wanted.gradients)[0] < 1e-14
        assert set(record.gradients) == set(wanted.gradients), "the frozen one has none"
        assert set(record.weights) == set(wanted.weights)
        assert furthest(record.weights, wanted.weights)[0] < close
        assert record.norms == pytest.approx(wanted.norms, rel=1e-13)
    assert len({tuple(record.norms) for record in ran}) == 1, "every rank knows the same norm"


# -- to the bit --------------------------------------------------------------------------------------------------------


def exact(sizes: tuple[int, int, int], strategy: str, outer: str, k: int) -> Case:
    """Eight sequences a step, whatever the mesh; fp32."""
    options = (("numerics", "exact"), ("exact_terms", 4), ("grad_divisor", 4))
    return Case(
        sizes[1], sizes[2], sizes[0], strategy, outer, k, Shape(layers=1, sequence_parallel=True), "adamw", 0.05, 2,
        torch.float32, options,
    )  # fmt: skip


EXACT = {
    2: [exact((1, 2, 2), strategy, "no_shard", 2) for strategy in STRATEGIES]
    + [exact((2, 1, 2), "optim_grads_params", "optim", 2)],
    4: [exact((1, 1, 4), strategy, "no_shard", 4) for strategy in ("no_shard", "optim_grads_params")],
    1: [exact((1, 4, 1), strategy, "no_shard", 1) for strategy in ("optim", "optim_grads_params")]
    + [exact((2, 2, 1), "optim_grads", "optim", 1)],
}
"""Meshes by their tensor-parallel ranks: within one, all have the same bits; between them sums of a row differ."""


@once
def exact_runs() -> dict[int, list[Record]]:
    flat = [each for cases in EXACT.values() for each in cases]
    found = iter(run_ranks(train_all, 4, flat)[0])
    return {tp: [next(found) for _ in cases] for tp, cases in EXACT.items()}


@pytest.mark.parametrize("tp", EXACT)
def test_exact_has_the_same_bits_on_every_mesh_with_the_same_tensor_parallelism(tp: int) -> None:
    first, *others = exact_runs()[tp]
    for other in others:
        assert [name for name, value in first.weights.items() if not torch.equal(value, other.weights[name])] == []
        assert other.norms == first.norms


# -- beside FSDP2 ------------------------------------------------------------------------------------------------------


def beside_fsdp2(rank: int) -> list[float]:
    """How far gradients and updated weights are from those of FSDP2 over the same plan."""
    found = []
    for shape in (Shape(), Shape(sequence_parallel=True)):
        asked = Case(2, 2, shape=shape, optimizer="sgd")
        mesh = mesh_of(asked)
        ours, optimizer = sharded(asked, mesh)
        peer = in_fsdp2(built(shape), shape, mesh)
        theirs = torch.optim.SGD((p for p in peer.parameters() if p.requires_grad), lr=0.05, momentum=0.9)
        for step in range(2):
            for model, stepped in ((ours, optimizer), (peer, theirs)):
                loss_of(model, rows_of(asked, step, 0, mesh.get_local_rank("inner"))).backward()
                if model is ours and step == 0:
                    gradients = dict(ours.full_gradients())
                if model is peer and step == 0:
                    whole = {n: p.grad.full_tensor() for n, p in peer.named_parameters() if isinstance(p.grad, DTensor)}
                    found.append(max(float((whole[n].reshape(g.shape) - g).abs().max()) for n, g in gradients.items()))
                stepped.step()
                stepped.zero_grad()
        whole = {n: p.full_tensor() for n, p in peer.named_parameters() if isinstance(p, DTensor)}
        found.append(max(float((whole[n].reshape(w.shape) - w).abs().max()) for n, w in ours.full_weights()))
        ours.close()
    return found


def test_fsdp2_over_the_same_plan_gives_the_same() -> None:
    for of_rank in run_ranks(beside_fsdp2, 4):
        assert max(of_rank) < 1e-13


# -- what is sent ------------------------------------------------------------------------------------------------------


def traffic(rank: int, strategies: tuple[str, ...]) -> dict[str, tuple[list[Row], dict[str, int]]]:
    """Rows of a second step, and what every bucket moves: elements on the wire, or whole where nothing is split."""
    found = {}
    for strategy in strategies:
        asked = Case(2, 2, strategy=strategy, k=2, dtype=torch.float32)
        mesh = mesh_of(asked)
        model, optimizer = sharded(asked, mesh)
        meter = CollectiveMeter()
        for step in range(2):
            meter.take()
            for microbatch in range(asked.k):
                model.set_model_auto_sync(microbatch == asked.k - 1)
                loss_of(model, rows_of(asked, step, microbatch, mesh.get_local_rank("inner"))).backward()
            optimizer.step()
            optimizer.zero_grad()
        rows = meter.take()
        meter.close()
        layouts = {bucket.name: bucket.layout for bucket in model.buckets if bucket.trainable}
        moved = {n: each.bucket_numel if strategy == "no_shard" else each.comm_numel for n, each in layouts.items()}
        found[strategy] = rows, moved
        model.close()
    return found


def test_the_data_parallel_axis_sends_what_the_formulas_say_of_the_tp_shards() -> None:
    """Two data-parallel ranks, k = 2, fp32: a bucket of P elements of TP shards sends 4 P bytes over both ranks in each
    reduction and in each gather; an all-reduce is one of both."""
    ranks = run_ranks(traffic, 4, STRATEGIES)
    wanted = {  # reductions, gathers of a unit, an all-reduce
        "no_shard": ("all_reduce", 1, 8, 0),
        "optim": ("reduce_scatter", 1, 4, 1),
        "optim_grads": ("reduce_scatter", 2, 4, 1),
        "optim_grads_params": ("reduce_scatter", 2, 4, 4),
    }
    for strategy, (kind, times, width, gathers) in wanted.items():
        for tp in range(2):
            rows = [{(row.bucket, row.kind): row for row in of_rank[strategy][0]} for of_rank in ranks[tp::2]]
            moved = ranks[tp][strategy][1]
            for name, numel in moved.items():
                assert [row[name, kind].count for row in rows] == [times, times]
                assert sum(row[name, kind].bytes for row in rows) == times * numel * width
                if gathers and "(root)" not in name and "blocks.1" not in name:
                    assert [row[name, "all_gather"].count for row in rows] == [gathers, gathers]
                    assert sum(row[name, "all_gather"].bytes for row in rows) == gathers * numel * 4
            assert not any(OUTER in name for row in rows for name, _ in row)


def tensor_traffic(rank: int) -> list[dict[str, tuple[int, int]]]:
    """Counts and bytes by kind of what a plan moves in a second step, without and with sequence parallelism."""
    found = []
    for shape in (Shape(), Shape(sequence_parallel=True)):
        policy = (("mixed_precision_policy", MixedPrecisionPolicy()),)
        asked = Case(1, 2, shape=shape, dtype=torch.float32, options=policy)
        model, optimizer = sharded(asked, mesh_of(asked))
        meter = CollectiveMeter()
        for step in range(2):
            meter.take()
            loss_of(model, rows_of(asked, step, 0, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        rows = [row for row in meter.take() if row.bucket == FUNCTIONAL]
        meter.close()
        model.close()
        found.append({row.kind: (row.count, row.bytes) for row in rows})
    return found


def test_the_tensor_parallel_axis_sends_what_the_plan_says() -> None:
    """Of L layers each matrix pair sums activations [B, S, D] once in the forward and once in the backward, embedding
    and head once; the head gathers its logits. With sequence parallelism each such sum is a reduce-scatter or an
    all-gather of half the bytes, and every trained vector of a norm is summed by itself."""
    shape, size = Shape(), 2
    activations = SEQUENCES * 8 * shape.dim * 4
    logits = SEQUENCES * 8 * -(-shape.vocab // size) * 4
    sums = 2 * (2 * shape.layers + 1)
    vectors = 2 * (2 * shape.layers + 1) - 1  # one is frozen
    for plain, sequence in run_ranks(tensor_traffic, size):
        assert plain == {"all_reduce": (sums, sums * activations), "all_gather": (1, logits)}
        assert sequence == {
            "reduce_scatter": (sums, sums * activations // 2),
            "all_gather": (sums + 1, sums * activations // 2 + logits),
            "all_reduce": (vectors, vectors * shape.dim * 4),
        }
