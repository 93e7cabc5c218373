"""The learning rate, step by step."""

import pytest

from harness.config.derived import lr_at
from harness.config.schema import Schedule
from tests.support.factory import small_config


def rates(schedule: Schedule, steps: int = 6, warmup: int = 2) -> list[float]:
    config = small_config(
        optimizer__lr=1.0,
        train__schedule=schedule,
        train__steps=steps,
        train__warmup_steps=warmup,
        train__min_lr_ratio=0.1,
    )
    return [lr_at(config, step) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("schedule", "after"),
    [
        (Schedule.constant, [1, 1, 1, 1]),
        (Schedule.linear, [0.775, 0.55, 0.325, 0.1]),
        (Schedule.cosine, [0.8681980515339464, 0.55, 0.23180194846605365, 0.1]),
    ],
)
def test_warm_up_then_schedule(schedule: Schedule, after: list[float]) -> None:
    assert rates(schedule) == pytest.approx([0.5, 1.0, *after], rel=1e-12)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_edges(schedule: Schedule) -> None:
    assert rates(schedule, steps=1, warmup=0) == pytest.approx([1.0 if schedule is Schedule.constant else 0.1])
    assert rates(schedule, steps=2, warmup=4) == pytest.approx([0.25, 0.5])
    assert rates(schedule, steps=2, warmup=2) == pytest.approx([0.5, 1.0])
