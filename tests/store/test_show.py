"""What a run cost, as `harness show` prints it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.store.rundir import RunDir
from harness.store.show import _attempts, _progress
from tests.support.factory import freeze, small_config

SUMMARY: dict[str, Any] = {
    "accounted_bytes": {"main_weights": 1024, "padding": 0},
    "tensor_bytes": {"persistent": [1, 1, 1], "peak": [1040, 1060, 1200], "growth": [0, 0, 0]},
    "planned": {"kept": 1024, "peak": 1010, "sent": 64},
}


def told(path: Path, **planned: int) -> list[str]:
    """Lines on what a run with this summary kept and sent."""
    freeze(small_config(train__steps=9), path)
    path.joinpath("metrics.jsonl").write_text('{"step": 9, "comm": {"all_reduce": {"count": 1, "bytes": 64}}}\n')
    path.joinpath("summary.json").write_text(json.dumps(SUMMARY | {"planned": SUMMARY["planned"] | planned}))
    return [f"{name} {text}" for name, text in _progress(RunDir(path)).items()]


def test_the_plan_of_a_timed_run_stands_beside_what_was_measured(tmp_path: Path) -> None:
    assert told(tmp_path / "s" / "on its plan") == [
        "step 9 of 9",
        "kept 1,024 bytes, 1,024 planned, of it main_weights 1,024, padding 0",
        "peak 1,200 bytes, 1,010 planned",  # 1,060, in the middle, is within 5 %
        "sent 64 bytes by rank 0 in the last step, 64 planned",
    ]
    off = told(tmp_path / "s" / "off its plan", peak=1009)
    assert "plan the measured peak leaves the plan by +5.1%: 1,060 bytes, 1,009 planned" in off


def test_attempts_are_counted() -> None:
    """A run that was preempted in its first had "attempts 0"."""
    told = [_attempts([*range(number)]) for number in (0, 1, 3)]
    assert told == ["none", "1 (attempts/0)", "3 (attempts/0 to attempts/2)"]
