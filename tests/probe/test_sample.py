"""A sample of elements: what is kept of each is held to its own value, and what a resumed run begins with to a sum."""

from __future__ import annotations

import pytest
import torch

from harness.config.update_rule import Rule
from harness.probe.step_checks.pieces import Piece
from harness.probe.step_checks.sample import Made, Sample
from tests.support.mutants import finds

RULE = Rule("adamw", (0.9, 0.95), 1e-8, 0.0, 0.0)
LR = 0.01
SMALL = 1e-14
"""Second moments of a tensor whose gradients are a ten-millionth of another's."""


def held_of(sizes: dict[str, tuple[float, ...]]) -> dict[str, torch.Tensor]:
    """Weights and moments of tensors, by name: each one's shape and, behind it, how large its numbers are."""
    made = torch.Generator().manual_seed(1)
    return {
        f"{name}/{entry}": torch.rand(shape, generator=made) * size
        for name, (*shape, size) in sizes.items()
        for entry in ("weight", *RULE.entries)
    }


def sample_of(held: dict[str, torch.Tensor]) -> Sample:
    """Of all tensors."""
    pieces = {key: Piece.of(key.partition("/")[0], tensor) for key, tensor in held.items()}
    names = [*dict.fromkeys(piece.name for piece in pieces.values())]
    weights = [pieces[f"{name}/weight"] for name in names]
    moments = {name: [pieces[f"{name}/{entry}"] for entry in RULE.entries] for name in names}
    return Sample(RULE, weights, moments, set(names), dict.fromkeys(names, 0.0))


@pytest.fixture
def held() -> dict[str, torch.Tensor]:
    return held_of({"large": (8, 9, 1.0), "small": (8, 9, SMALL)})


@pytest.fixture
def sample(held: dict[str, torch.Tensor]) -> Sample:
    return sample_of(held)


def test_a_small_moment_that_changes_has_moved(sample: Sample, held: dict[str, torch.Tensor]) -> None:
    """Relative to the largest moment there is, it would not have: 1e-17."""
    left = sample.look()
    assert sample.largest(sample.moved(left, sample.look()), 2).tolist() == [0.0, 0.0]
    held["small/exp_avg_sq"] *= 1.001
    large, small = sample.largest(sample.moved(left, sample.look()), 2).tolist()
    assert large == 0.0
    assert small == pytest.approx(1e-3, rel=1e-3)


def stepped(
    held: dict[str, torch.Tensor], factors: dict[str, float], rates: dict[str, float], element: float = 1.0
) -> tuple[float, float]:
    """The largest distance from the rule, and the error of the factor that clipped, of a step of torch's AdamW that
    should clip by a half.

    Args: factors, rates: by which a tensor's gradients are clipped, and with which it steps. element: factor of the
    first element that is followed.
    """
    made, sample, gradients = torch.Generator().manual_seed(2), sample_of(held), {}
    before, followed = sample.look(), int(sample.followed[0].indices[0])
    for name, factor in factors.items():
        param = torch.nn.Parameter(held[f"{name}/weight"].clone())
        optimizer = torch.optim.AdamW([param], rates.get(name, LR), RULE.betas, RULE.eps, weight_decay=0.0)
        moments = {entry: held[f"{name}/{entry}"] for entry in RULE.entries}
        optimizer.state[param] = {"step": torch.tensor(2.0), **moments}
        gradients[name] = torch.rand(param.shape, generator=made) - 0.5
        param.grad = factor * gradients[name]
        if element != 1.0:
            param.grad.view(-1)[followed] *= element
        optimizer.step()
        held[f"{name}/weight"].copy_(param.detach())
    found = sample.held_to_rule(before, sample.look(), sample.gradients(gradients), 0.5, Made(3, LR, 2.0**-24))
    return float(found[0].max()), found[1]


@pytest.mark.parametrize(
    ("wrong", "follows", "clipping"),
    [("", True, 0.0), ("a tensor's factor", True, 0.4), ("a tensor's rate", False, 0.0), ("an element", False, 0.0)],
)
def test_a_tensor_that_is_clipped_otherwise_follows_the_rule(
    held: dict[str, torch.Tensor], wrong: str, follows: bool, clipping: float
) -> None:
    factors = {"large": 0.5, "small": 0.7 if wrong == "a tensor's factor" else 0.5}
    rates = {"small": 2 * LR} if wrong == "a tensor's rate" else {}
    ratio, found = stepped(held, factors, rates, 1.4 if wrong == "an element" else 1.0)
    assert (ratio <= 1) == follows, ratio
    assert found == pytest.approx(clipping, abs=1e-5)


def test_small_tensors_that_are_clipped_as_others_are_follow_the_rule() -> None:
    """A large tensor and eight of two elements each, beside one that is clipped as it should be."""
    gains = [f"gain {number}" for number in range(8)]
    for large, small, clipping in ((0.7, 0.7, 0.4), (0.5, 1.0, 1.0)):
        held = held_of({"right": (72, 1.0), "large": (72, 1.0), **dict.fromkeys(gains, (2, 1.0))})
        ratio, found = stepped(held, {"right": 0.5, "large": large, **dict.fromkeys(gains, small)}, {})
        assert ratio <= 1
        assert found == pytest.approx(clipping, abs=1e-5)


def test_sums_of_moments_tell_what_a_resumed_run_begins_with(sample: Sample, held: dict[str, torch.Tensor]) -> None:
    left = sample.of_moments(sample.look(), 2)
    assert left.shape == (2, 2)
    held["small/exp_avg_sq"] *= 1.001
    off = (sample.of_moments(sample.look(), 2) - left).abs() / left.abs()
    assert (off > 1e-9).tolist() == [[False, False], [False, True]]
    held["large/exp_avg"].copy_(held["large/exp_avg"].flip(0))
    assert (sample.of_moments(sample.look(), 2) != left).tolist() == [[True, False], [False, True]]


test_a_mutant_is_found = finds(
    "The comparator: a sample",
    test_a_tensor_that_is_clipped_otherwise_follows_the_rule="""
        one factor for all: A bucket clipped by another factor is the optimizer's fault
            probe.step_checks.sample.Sample.held_to_rule: ([everywhere], of_tensors) => ([everywhere],)
            (wrong="a tensor's factor", follows=True, clipping=0.4)
    """,
    test_small_tensors_that_are_clipped_as_others_are_follow_the_rule="""
        clipped at all: Small tensors that nobody clips are the optimizer's fault
            probe.step_checks.sample.Sample._factors_taken: [clipping, 1.0] => [clipping]
        small ones by themselves: Small tensors are the optimizer's fault
            probe.step_checks.sample.Sample._factors_taken: factors[part] = min( => _ = min(
    """,
)
