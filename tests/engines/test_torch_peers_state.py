"""Torch's own engines go on bit for bit from what they saved, and refuse a state that does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness.engines.protocol import Engine
from tests.engines.peers import PEERS, SHARDED, Case, accumulate, outers
from tests.support.spawn import run_ranks


def _resume(rank: int, cases: list[Case]) -> list[tuple[bool, bool, bool]]:
    """Whether a fresh engine, and one that has trained on, continue bit for bit; whether bad state changes nothing."""
    return [_resume_one(rank, case) for case in cases]


def _resume_one(rank: int, case: Case) -> tuple[bool, bool, bool]:
    straight, fresh, used = case.build(rank), case.build(rank, seed=5), case.build(rank, seed=6)
    lr = case.config().optimizer.lr
    for engine in (straight, used):
        for step in (1, 2):
            accumulate(engine, case, rank, step + (7 if engine is used else 0))
            engine.step(lr)
    saved = {key: tensor.clone() for key, tensor in straight.state_dict().items()}
    refused = _refuses(used, saved)
    ends: list[Any] = []
    for engine in (straight, fresh, used):
        if engine is not straight:
            engine.load_state_dict(saved)
        losses = accumulate(engine, case, rank, 3)
        norm = engine.step(lr)
        ends.append((losses, norm, {key: tensor.clone() for key, tensor in engine.state_dict().items()}))
    for engine in (straight, fresh, used):
        engine.close()
    return _same(ends[0], ends[1]), _same(ends[0], ends[2]), refused


def _refuses(engine: Engine, saved: dict[str, Tensor]) -> bool:
    before = {key: tensor.clone() for key, tensor in engine.state_dict().items()}
    first = next(iter(saved))
    try:
        engine.load_state_dict({key: tensor + 1 for key, tensor in saved.items() if key != first})
    except ValueError as error:
        return f"missing {first}" in str(error) and all(
            torch.equal(before[k], t) for k, t in engine.state_dict().items()
        )
    return False


def _same(a: Any, b: Any) -> bool:
    return a[:2] == b[:2] and list(a[2]) == list(b[2]) and all(torch.equal(a[2][key], b[2][key]) for key in a[2])


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_state_continues_bit_for_bit(world_size: int) -> None:
    """Into an engine that has not run yet, and into one whose weights and moments were others."""
    # fp32 gradients, whose sums over three ranks and more depend on where in a buffer they lie
    cases = [Case(*peer, world_size, 2, "adamw", 0.5, "fp32", numerics="deterministic") for peer in PEERS]
    cases += [Case(*peer, world_size, 2, "adamw", 0.5, "bf16", numerics="deterministic") for peer in PEERS]
    cases += [Case(*peer, world_size, 1, "sgd", None, awkward=True) for peer in PEERS]
    cases += [Case(*peer, world_size, 2, outer=outer) for peer in SHARDED for outer in outers(world_size)]
    for outcomes in run_ranks(_resume, world_size, cases):
        assert dict(zip(cases, outcomes, strict=True)) == dict.fromkeys(cases, (True, True, True))
