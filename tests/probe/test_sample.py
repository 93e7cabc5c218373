"""A sample of elements: what is kept of each is held to its own value, and what a resumed run begins with to a sum."""

from __future__ import annotations

import pytest
import torch

from harness.config.update_rule import Rule
from harness.probe.step_checks.pieces import Piece
from harness.probe.step_checks.sample import Made, Sample
from tests.support.mutants import finds

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


def stepped(sample: Sample, held: dict[str, torch.Tensor], wrong: str) -> tuple[float, float]:
    """A step of torch's AdamW that clips by a half where `wrong` does not say otherwise: the largest distance from the
    rule, and the error of the factor that clipped."""
    made, before, lr = torch.Generator().manual_seed(2), sample.look(), 0.01
    gradients = {name: torch.rand(8, 9, generator=made) - 0.5 for name in ("large", "small")}
    factor = {"large": 0.5, "small": 0.7 if wrong == "a tensor's factor" else 0.5}
    rates = {"large": lr, "small": 2 * lr if wrong == "a tensor's rate" else lr}
    for name, gradient in gradients.items():
        param = torch.nn.Parameter(held[f"{name}/weight"].clone())
        moments = {entry: held[f"{name}/{entry}"] for entry in RULE.entries}
        optimizer = torch.optim.AdamW([param], rates[name], RULE.betas, RULE.eps, weight_decay=0.0)
        optimizer.state[param] = {"step": torch.tensor(2.0), **moments}
        param.grad = factor[name] * gradient
        if wrong == "an element":
            param.grad.view(-1)[int(sample.followed[0].indices[0])] *= 1.4
        optimizer.step()
        held[f"{name}/weight"].copy_(param.detach())
    given = sample.gradients(gradients)
    found = sample.held_to_rule(before, sample.look(), given, 0.5, Made(3, lr, 2.0**-24))
    return float(found.ratios.max()), found.clipping


@pytest.mark.parametrize(
    ("wrong", "follows", "clipping"),
    [("", True, 0.0), ("a tensor's factor", True, 0.4), ("a tensor's rate", False, 0.0), ("an element", False, 0.0)],
)
def test_a_tensor_that_is_clipped_otherwise_follows_the_rule(
    sample: Sample, held: dict[str, torch.Tensor], wrong: str, follows: bool, clipping: float
) -> None:
    ratio, found = stepped(sample, held, wrong)
    assert (ratio <= 1) == follows, ratio
    assert found == pytest.approx(clipping, abs=1e-5)


def clipped_as_a_group(large: float = 0.7, small: float = 0.7) -> tuple[float, float]:
    """A step in which a large tensor and eight of two elements each are clipped by these factors, and should by 0.5."""
    made, sizes = (
        torch.Generator().manual_seed(1),
        {"right": 72, "large": 72, **{f"gain {number}": 2 for number in range(8)}},
    )
    held = {
        f"{name}/{entry}": torch.rand(size, generator=made)
        for name, size in sizes.items()
        for entry in ("weight", *RULE.entries)
    }
    pieces = {key: Piece.of(key.partition("/")[0], tensor) for key, tensor in held.items()}
    moments = {name: [pieces[f"{name}/{entry}"] for entry in RULE.entries] for name in sizes}
    sample = Sample(RULE, [pieces[f"{name}/weight"] for name in sizes], moments, set(sizes), dict.fromkeys(sizes, 0.0))
    before, gradients = sample.look(), {}
    for name, size in sizes.items():
        param = torch.nn.Parameter(held[f"{name}/weight"].clone())
        optimizer = torch.optim.AdamW([param], 0.01, RULE.betas, RULE.eps, weight_decay=0.0)
        optimizer.state[param] = {
            "step": torch.tensor(2.0),
            **{entry: held[f"{name}/{entry}"] for entry in RULE.entries},
        }
        gradients[name] = torch.rand(size, generator=made) - 0.5
        param.grad = gradients[name] * {"right": 0.5, "large": large}.get(name, small)
        optimizer.step()
        held[f"{name}/weight"].copy_(param.detach())
    given = sample.gradients(gradients)
    found = sample.held_to_rule(before, sample.look(), given, 0.5, Made(3, 0.01, 2.0**-24))
    return float(found.ratios.max()), found.clipping


def test_small_tensors_that_are_clipped_as_others_are_follow_the_rule() -> None:
    ratio, found = clipped_as_a_group()
    assert ratio <= 1
    assert found == pytest.approx(0.4, abs=1e-5)
    ratio, found = clipped_as_a_group(large=0.5, small=1.0)
    assert ratio <= 1
    assert found == pytest.approx(1.0, abs=1e-5)


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
