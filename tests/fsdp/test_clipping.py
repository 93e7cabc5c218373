"""Norms, and clipping by them, against torch's own on one process."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.fsdp import ShardedModel
from tests.fsdp.checked import each_is_found, of_slips
from tests.fsdp.pairs import PAIRS, Pair, data, loss_of, plain_gradients, shard
from tests.support.covering import once
from tests.support.spawn import run_ranks

WORLD, MAX_NORM = 4, 0.1
ORDERS = (2.0, math.inf)
Found = tuple[float, dict[str, Tensor]]


def built(rank: int, pair: Pair, **more: Any) -> ShardedModel:
    """With the gradients of a step."""
    model, _ = shard(pair, **more)
    loss_of(model, data(0, rank)).backward()
    return model


def clip(rank: int, todo: tuple[tuple[Pair, float], ...]) -> list[Found]:
    found = []
    for pair, order in todo:
        model = built(rank, pair)
        found.append((float(model.clip_grad_norm_(MAX_NORM, order)), dict(model.full_gradients())))
        model.close()
    return found


TODO = tuple(itertools.product(PAIRS, ORDERS))


@once
def clipped() -> list[dict[tuple[Pair, float], Found]]:
    return [dict(zip(TODO, ran, strict=True)) for ran in run_ranks(clip, WORLD, TODO)]


@once
def right(order: float) -> Found:
    gradients = plain_gradients([data(0, rank) for rank in range(WORLD)], 1 / WORLD)
    params = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients.values()]
    for param, gradient in zip(params, gradients.values(), strict=True):
        param.grad = gradient.clone()
    norm = nn.utils.clip_grad_norm_(params, MAX_NORM, order).item()
    return norm, {name: param.grad for name, param in zip(gradients, params, strict=True) if param.grad is not None}


def difference(found: Found, order: float) -> str:
    norm, gradients = right(order)
    if found[0] != pytest.approx(norm, rel=1e-5):
        return f"norm {found[0]}, not {norm}"
    off = [name for name, each in gradients.items() if not torch.allclose(found[1][name].double(), each, atol=1e-7)]
    return f"gradients of {off}" if off else ""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_clipping_is_torchs(pair: Pair, order: float) -> None:
    on_ranks = [ran[pair, order] for ran in clipped()]
    assert difference(on_ranks[0], order) == ""
    assert len({norm for norm, _ in on_ranks}) == 1


def say(rank: int) -> list[str]:
    told = []
    for arguments in (
        (1.0, 3.0),
        (1.0, 2.0, True),
        (1.0, math.inf, True),
    ):
        model = built(rank, Pair("optim_grads", ""))
        model.finish_grad_sync()
        if len(arguments) == 3 and rank == 0:
            model.engine.buckets[0].grad_shards[0][0] = math.nan
        before = [shard.clone() for bucket in model.engine.buckets for shard in bucket.grad_shards]
        try:
            told.append(f"nothing: {model.clip_grad_norm_(*arguments)}")
        except (ValueError, RuntimeError) as error:
            told.append(str(error))
        after = [shard for bucket in model.engine.buckets for shard in bucket.grad_shards]
        assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(before, after, strict=True))
        model.close()
    return told


def test_what_cannot_be_clipped_is_refused_on_all_ranks() -> None:
    for other, nan, largest in run_ranks(say, 2):
        assert "norm_type=3.0 is not built" in other
        assert "norm is nan: nothing was clipped" in nan
        assert "norm of order inf for gradients" in largest


def after_nan(rank: int, pairs: tuple[Pair, ...]) -> list[tuple[float, Found]]:
    """The norm of a step whose loss is no number, which was clipped; then the next step, clipped."""
    found = []
    for pair in pairs:
        model, _ = shard(pair)
        (loss_of(model, data(0, rank)) * math.nan).backward()
        spoilt = float(model.clip_grad_norm_(MAX_NORM))
        model.zero_grad()
        loss_of(model, data(0, rank)).backward()
        found.append((spoilt, (float(model.clip_grad_norm_(MAX_NORM)), dict(model.full_gradients()))))
        model.close()
    return found


after_nans = once(lambda: [dict(zip(PAIRS, ran, strict=True)) for ran in run_ranks(after_nan, WORLD, PAIRS)])


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_norm_that_is_no_number_is_forgotten_with_its_step(pair: Pair) -> None:
    """It multiplies all that lies in a flat buffer, also between parameters, where nothing writes afterwards."""
    for ran in after_nans():
        spoilt, found = ran[pair]
        assert math.isnan(spoilt)
        assert difference(found, 2.0) == ""


# -- mutants -----------------------------------------------------------------------------------------------------------


def _clips_rightly(rank: int, words: str) -> str:
    *pair, order = words.split(", ")
    return difference(clip(rank, ((Pair(*pair), float(order)),))[0], float(order))


def _forgets_nan(rank: int, strategy: str) -> str:
    return difference(after_nan(rank, (Pair(strategy, ""),))[0][1], 2.0)


CHECKS = {"clips": _clips_rightly, "forgets": _forgets_nan}
MUTANTS = of_slips(
    """
    replicas count: What several ranks hold counts once for each in norms
        fsdp.update.norms._euclidean: bucket.counted(shards) => shards
        clips / optim, no_shard, 2
    a rank's own norm: Each rank clips by the norm of what it holds
        fsdp.update.norms._euclidean: everyone.sum_scalars(total, "norm") => pass
        clips / optim_grads, , 2
    NaN stays between parameters: Once a norm was no number, no later one is
        fsdp.storage.gradients.Gradients.open_gaps: lambda *_, **__: None
        forgets / no_shard
    """
)
test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "The engine, by its norms")
