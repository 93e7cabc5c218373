"""Arms of `benchmarks/costs/peers_step.py` train the same model: the times that are compared are of one computation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.costs.peers_step import ARMS, DDP, decoder, prepare
from tests.support.spawn import run_ranks


def losses(rank: int) -> dict[str, list[float]]:
    """Three steps of every arm, on data of this rank's own."""
    tokens = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(rank))
    found: dict[str, list[float]] = {}
    for arm in ARMS:
        model, optimizer = prepare(arm, decoder(64, 64, 8))
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.setdefault(arm, []).append(loss.item())
    return found


def test_every_arm_trains_alike() -> None:
    for each in run_ranks(losses, 2):
        assert [*each] == [*ARMS]
        for arm in ARMS:
            assert each[arm] == pytest.approx(each[DDP], rel=1e-5), arm
        assert each[DDP][-1] != pytest.approx(each[DDP][0], rel=1e-5)
