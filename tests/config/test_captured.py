"""What a run captures where nobody says which steps: first, last, some between, as much as fits."""

from __future__ import annotations

import pytest

from harness.config.captured import MIB, captured, spread
from harness.config.derived import parameter_count
from harness.config.schema import Config, OptimizerName


def config_of(steps: int = 20, dim: int = 64, limit_mib: int = 1024) -> Config:
    config = Config()
    config.train.steps, config.model.dim, config.measure.capture_limit_mib = steps, dim, limit_mib
    return config


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(1, [1]), (2, [1, 2]), (20, [1, 20]), (100, [1, 100]), (101, [1, 100, 101]), (2000, [1, 100, 1000, 2000])],
)
def test_the_chosen_steps_are_the_first_the_last_and_some_between(steps: int, expected: list[int]) -> None:
    assert sorted(spread(steps)) == expected
    found = captured(config_of(steps))
    assert (found.gradients, found.updates, found.left_out) == (tuple(expected), tuple(expected), "")


def test_a_step_costs_what_its_files_hold() -> None:
    count = parameter_count(config_of())
    first, last = 4 + 4 + 4 + 4, 4 + 4 + 4 + 4 + 2 * 4
    assert captured(config_of(1)).num_bytes == first * count
    assert captured(config_of(200)).num_bytes == (first + 2 * last) * count
    follows = (8 + 4) * count  # an update that follows another begins with what that left
    assert captured(config_of(2)).num_bytes == first * count + follows
    sgd = config_of(200)
    sgd.optimizer.name = OptimizerName.sgd
    assert captured(sgd).num_bytes == first * 3 * count


def test_what_does_not_fit_is_left_out_last_things_first() -> None:
    """Every limit holds, more room never captures less, and what is left out is said."""
    seen = set()
    for limit in range(1, 40):
        found = captured(config_of(1001, dim=64 * 3, limit_mib=limit))
        assert found.num_bytes <= limit * MIB or found.gradients == (1,)
        assert bool(found.left_out) == (found.gradients != (1, 100, 1000, 1001))
        assert f"measure.capture_limit_mib={limit}" in found.left_out or not found.left_out
        seen.add((len(found.gradients), len(found.updates)))
    stages = [(0, 0), (1, 0), (1, 1), (2, 2), (3, 3), (4, 4)]
    assert sorted(seen) == [each for each in stages if each in seen]
    assert len(seen) > 3
    assert captured(config_of(20, dim=8192)).gradients == ()
    assert "one step of gradients" in captured(config_of(20, dim=8192)).left_out


def test_what_is_listed_is_captured_as_it_is() -> None:
    config = config_of()
    config.measure.capture_steps = [5, 2]
    assert captured(config)[:2] == ((2, 5), ())
    config.measure.update_steps = [5]
    assert captured(config)[:2] == ((2, 5), (5,))
    config.measure.capture_steps = None
    assert captured(config)[:2] == ((1, 20), (5,))
