"""The published rules do what they say they do, weaknesses included."""

from __future__ import annotations

import pytest

from benchmarks.power.published import judge

FALLING = [6.0 - 0.01 * step for step in range(100)]
"""From 6.00 to 5.01."""


def scaled(factor: float, last: float | None = None) -> list[float]:
    return [loss * factor for loss in FALLING[:-1]] + [FALLING[-1] * (factor if last is None else last)]


def test_equal_series_pass_everything() -> None:
    assert all(judge(FALLING, FALLING).values())


def test_the_duplicated_gradient_passes_both_of_nvidias_rules() -> None:
    """Megatron-LM PR 3067: loss 5.56 for 5.48, 1.46 % off."""
    found = judge(scaled(1.0146), FALLING)
    assert found["Megatron-Bridge"]
    assert found["Megatron-LM, approximate"]
    assert found["DeepSpeed, bf16"]
    assert not found["torchtitan, close"]
    assert not found["Megatron-LM, deterministic; torchtitan, equal"]


@pytest.mark.parametrize(("factor", "passes"), [(1.029, True), (1.031, False)])
def test_bridge_holds_the_last_step_to_three_per_cent(factor: float, passes: bool) -> None:
    assert judge(scaled(1.0, last=factor), FALLING)["Megatron-Bridge"] is passes


def test_bridge_allows_a_tenth_of_the_steps_beyond_ten_per_cent() -> None:
    steep = [10.0 - 0.07 * step for step in range(100)]
    for wrong, passes in ((9, True), (11, False)):
        arm = [loss * (1.12 if step < wrong else 1.0) for step, loss in enumerate(steep)]
        assert judge(arm, steep)["Megatron-Bridge"] is passes


def test_bridge_wants_the_curves_to_fall_together() -> None:
    assert not judge(list(reversed(FALLING)), FALLING)["Megatron-Bridge"]


@pytest.mark.parametrize(("wrong", "passes"), [(1, True), (2, False)])
def test_golden_allows_one_step_of_a_hundred(wrong: int, passes: bool) -> None:
    arm = [loss * (1.06 if step < wrong else 1.0) for step, loss in enumerate(FALLING)]
    assert judge(arm, FALLING)["Megatron-LM, approximate"] is passes


def test_equality_is_that_of_fp32() -> None:
    name = "Megatron-LM, deterministic; torchtitan, equal"
    assert judge([loss * (1 + 1e-12) for loss in FALLING], FALLING)[name]
    assert not judge([loss * (1 + 1e-6) for loss in FALLING], FALLING)[name]


def test_nothing_passes_what_is_no_number() -> None:
    found = judge([float("nan")] * 100, FALLING)
    assert not any(found.values())


def test_series_must_be_of_one_length() -> None:
    with pytest.raises(ValueError, match="cannot be held"):
        judge(FALLING[:-1], FALLING)
