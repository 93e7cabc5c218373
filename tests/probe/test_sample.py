"""A sample of elements: what is kept of each is held to its own value, and what a resumed run begins with to a sum."""

from __future__ import annotations

import pytest
import torch

from harness.config.update_rule import Rule
from harness.probe.vouching.pieces import Piece
from harness.probe.vouching.sample import Sample

RULE = Rule("adamw", (0.9, 0.95), 1e-8, 0.0, 0.0)
SMALL = 1e-14
"""Second moments of a tensor whose gradients are a ten-millionth of another's."""


@pytest.fixture
def held() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    sizes = {"large": 1.0, "small": SMALL}
    return {
        f"{name}/{entry}": torch.rand(8, 9, generator=made) * size
        for name, size in sizes.items()
        for entry in ("weight", *RULE.entries)
    }


@pytest.fixture
def sample(held: dict[str, torch.Tensor]) -> Sample:
    pieces = {key: Piece.of(key.partition("/")[0], tensor) for key, tensor in held.items()}
    names = ("large", "small")
    weights = [pieces[f"{name}/weight"] for name in names]
    moments = {name: [pieces[f"{name}/{entry}"] for entry in RULE.entries] for name in names}
    return Sample(RULE, weights, moments, set(names), dict.fromkeys(names, 0.0))


def test_a_small_moment_that_changes_has_moved(sample: Sample, held: dict[str, torch.Tensor]) -> None:
    """Relative to the largest moment there is, it would not have: 1e-17."""
    left = sample.look()
    assert sample.largest(sample.moved(left, sample.look()), 2).tolist() == [0.0, 0.0]
    held["small/exp_avg_sq"] *= 1.001
    large, small = sample.largest(sample.moved(left, sample.look()), 2).tolist()
    assert large == 0.0
    assert small == pytest.approx(1e-3, rel=1e-3)


def test_sums_of_moments_tell_what_a_resumed_run_begins_with(sample: Sample, held: dict[str, torch.Tensor]) -> None:
    left = sample.of_moments(sample.look(), 2)
    assert left.shape == (2, 2)
    held["small/exp_avg_sq"] *= 1.001
    off = (sample.of_moments(sample.look(), 2) - left).abs() / left.abs()
    assert (off > 1e-9).tolist() == [[False, False], [False, True]]
    held["large/exp_avg"].copy_(held["large/exp_avg"].flip(0))
    assert (sample.of_moments(sample.look(), 2) != left).tolist() == [[True, False], [False, True]]
