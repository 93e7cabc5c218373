"""Which device a rank takes, and what it refuses before it meets others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.config.schema import Config, MeasureMode, Numerics
from harness.store.rank_place import RankPlace
from harness.train.record import weights_digest
from harness.train.session import timed_workload
from harness.worker import connect
from harness.worker.connect import device_index


@pytest.mark.parametrize(
    ("local_rank", "shared", "visible", "index"),
    [(0, 1, 8, 0), (7, 1, 8, 7), (5, 1, 1, 0), (3, 4, 1, 0), (3, 2, 2, 1), (2, 2, 2, 1), (1, 2, 2, 0)],
)
def test_neighbours_share_and_one_visible_device_is_number_zero(
    local_rank: int, shared: int, visible: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert device_index(local_rank, shared) == index


@pytest.mark.parametrize(("mode", "fills"), [(MeasureMode.record, True), (MeasureMode.bench, False)])
def test_a_timed_step_fills_no_memory_that_it_only_takes(
    mode: MeasureMode, fills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    config = Config()
    config.measure.mode, config.numerics.mode = mode, Numerics.deterministic
    try:
        connect.set_up_torch(config, RankPlace(0, 1, 0, "", "inline"))
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.empty(64).isnan().all().item() is fills
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def test_every_weight_that_is_digested_or_filled_is_a_sign_of_life() -> None:
    """Long work that is no step says that it moves."""
    beats: list[str] = []
    weights = [(f"w{number}", torch.ones(2)) for number in range(3)]
    assert weights_digest(iter(weights), alive=lambda: beats.append("digest")) == weights_digest(iter(weights))
    assert beats == ["digest"] * 3
    filled: Any = lambda name, shape: torch.zeros(shape)  # noqa: E731
    inner: Any = SimpleNamespace(unit_classes=(), may_leave_unused=False, initial_weight=filled)
    timers: Any = None
    timed_workload(inner, timers, lambda: beats.append("fill")).initial_weight("w", torch.Size([2]))
    assert beats[-1] == "fill"
