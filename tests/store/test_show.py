"""What a run cost, as `harness show` prints it."""

from __future__ import annotations

from typing import Any

import pytest

from harness.store import show
from harness.store.show import _attempts, _cost, _short
from tests.support.mutants import Slip, kills


def test_memory_by_role_and_traffic_by_bucket() -> None:
    summary = {
        "accounted_bytes": {"main_weights": 1024, "padding": 0},
        "collectives": [
            {"kind": "all_gather", "bucket": "blocks.0/float32", "count": 4, "bytes": 369664},
            {"kind": "all_reduce", "bucket": "", "count": 1, "bytes": 8},
        ],
    }
    memory, traffic, first, second = _cost(summary)
    assert memory.endswith("main_weights 1,024, padding 0 bytes")
    assert traffic.endswith("369,672 bytes sent in the last step:")
    assert first.split() == ["blocks.0/float32", "4", "all_gather", "369,664", "bytes"]
    assert second.split() == ["(no", "bucket)", "1", "all_reduce", "8", "bytes"]


def test_the_plan_of_a_timed_run_stands_beside_what_was_measured() -> None:
    summary: dict[str, Any] = {
        "accounted_bytes": {"main_weights": 1024},
        "tensor_bytes": {"persistent": [1, 1, 1], "peak": [1040, 1060, 1200], "growth": [0, 0, 0]},
        "planned": {"kept": 1024, "peak": 1010, "sent": 64},
        "collectives": [{"kind": "all_reduce", "bucket": "", "count": 1, "bytes": 64}],
    }
    _, peak, kept, traffic, _ = _cost(summary)
    assert peak.endswith("1,200 bytes (1,010 planned)"), "1,060, in the middle, is within 5 %"
    assert kept.endswith("1,024 bytes (1,024 planned)")
    assert traffic.endswith("64 bytes (64 planned) sent in the last step:")
    summary["planned"]["peak"] = 1009
    told = " ".join(_cost(summary)[3].split())
    assert told.endswith("the measured peak leaves the plan by +5.1%: 1,060 bytes, 1,009 planned")


@pytest.mark.parametrize(
    ("numbers", "said"),
    [([], "none"), ([0], "1 (attempts/0)"), ([0, 1, 2], "3 (attempts/0 to attempts/2)")],
)
def test_attempts_are_counted(numbers: list[int], said: str) -> None:
    """A run that was preempted in its first had "attempts 0"."""
    assert _attempts(numbers) == said


@pytest.mark.parametrize("columns", [80, 60])
def test_traffic_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    kinds = {"all_gather": "blocks.12.attention.projection/float32", "reduce_scatter": "head/bfloat16"}
    rows = [{"kind": kind, "bucket": name, "count": 16, "bytes": 123_456_789_012} for kind, name in kinds.items()]
    _, *lines = _cost({"accounted_bytes": {}, "collectives": rows})
    assert [line for line in lines if len(line) > columns] == []
    assert all("123,456,789,012 bytes" in line for line in lines)


@pytest.mark.parametrize("room", [60, 80, 10_000])
def test_long_values_that_differ_are_not_shown_alike(room: int) -> None:
    """A setting of 200 characters was cut after 77, wherever the other differed, and at 60 columns it was too wide."""
    left, right = ("x" * 150 + end + "y" * 60 for end in "ab")
    shown = _short(left, right, room)
    assert shown[0] != shown[1]
    assert all(len(each) <= min(80, room - 8) for each in shown)
    assert _short([1], "b", room) == ("[1]", "b")
    assert _short("x" * 200, "x" * 201, room)[0] != _short("x" * 200, "x" * 201, room)[1]


@kills("The terminal", "the first letters", "diff shows the first 77 letters of two long values that part later")
def test_values_that_are_shown_alike_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "_short", Slip(show, "_short", "if parts > size // 2", "if False").made())
    with pytest.raises(AssertionError):
        test_long_values_that_differ_are_not_shown_alike(80)
