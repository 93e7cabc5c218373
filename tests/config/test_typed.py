"""The typed declaration: ranges and kinds as they stand at the fields."""

from __future__ import annotations

import math
from typing import Any

import pytest

from harness.config.doc import Setting, settings
from harness.config.errors import BadRequest, Violation
from harness.config.typed import load_config
from harness.fsdp.options import Range

NUMBERS = [setting for setting in settings().values() if setting.type in (int, float)]


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda setting: setting.path)
def test_both_ends_of_every_range_are_values_and_what_lies_beyond_is_not(setting: Setting) -> None:
    path, allowed = setting.path, setting.range
    assert allowed is not None
    low, high = allowed.low, allowed.high
    group, _, name = path.partition(".")
    inside = [end for end, left_out in ((low, allowed.above), (high, allowed.below)) if not left_out]
    middle = (low + high) // 2 if setting.type is int else (low + high) / 2
    for value in (*inside, middle):
        assert getattr(getattr(load_config(alone(group, name, value)), group), name) == value
    ends = {low, high} - set(inside)
    beyond = high + 1 if setting.type is int else high * 1.01
    for value in (*ends, low - 1, beyond, float("nan"), float("inf"), -float("inf")):
        (refused,) = map(str, refusals(alone(group, name, value)))
        if setting.type is int and not math.isfinite(value):
            assert "takes a whole number" in refused
        assert str(allowed) in refused
        if allowed.unit:
            assert f"{high:,} {allowed.unit}" in refused
        if value in (low - 1, beyond) and not ends:
            assert f"    fix:   {path}={low if value < low else high}" in refused.splitlines()


def alone(group: str, name: str, value: float) -> dict[str, Any]:
    """A configuration that sets one setting; a model has to say its family, too."""
    return {group: {name: value} | ({"family": "llama"} if group == "model" else {})}


def refusals(values: dict[str, Any]) -> tuple[Violation, ...]:
    with pytest.raises(BadRequest) as caught:
        load_config(values)
    return caught.value.violations


def test_a_range_says_what_it_leaves_out() -> None:
    assert str(Range(1, 64, "ranks")) == "1 to 64 ranks"
    assert str(Range(0, 1, above=True)) == "above 0, up to 1"
    assert str(Range(0, 1, below=True)) == "at least 0, below 1"
    assert str(Range(0, 9_000, "bytes", above=True, below=True)) == "above 0, below 9,000 bytes"


def test_every_number_has_a_range_and_says_it() -> None:
    assert all(setting.range for setting in NUMBERS)
    assert settings()["engine.prefetch"].expects == "a whole number, 0 to 1,024 units"
    assert settings()["cluster.mem_gb"].expects == "a number, 0 to 1,000,000 GB, or null"
    assert settings()["optimizer.betas"].expects == "a list of numbers, like [0.9,0.95], each at least 0, below 1"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"train": {"steps": "5"}}, "train.steps=5: takes a whole number"),
        ({"train": {"steps": 5.0}}, "train.steps=5.0: takes a whole number"),
        ({"train": 5}, "train=5: is a group"),
        ({"launch": {"dry_run": 1}}, "launch.dry_run=1: takes true or false"),
        ({"model": {"family": "???", "name": "mine"}}, "model=mine does not say it"),
        ({"measure": {"capture_steps": [1, 0]}}, "measure.capture_steps=[1,0]: is out of range"),
        ({"study": {"margins": {"loss": "small"}}}, "study.margins={loss:small}: takes pairs"),
        ({"shardng": {}}, "shardng: no such group or setting"),
    ],
)
def test_a_value_of_another_kind_is_refused(values: dict[str, Any], told: str) -> None:
    (refused,) = refusals(values)
    assert told in str(refused)


def test_everything_is_refused_at_once() -> None:
    wrong = {"train": {"steps": 0, "stps": 1, "seed": True}, "dtype": {"compute": "fp31"}, "notes": ["a"]}
    named = sorted(each.subject.partition("=")[0] for each in refusals(wrong))
    assert named == ["dtype.compute", "notes", "train.seed", "train.steps", "train.stps"]


def test_numbers_are_taken_for_texts() -> None:
    config = load_config({"notes": 5, "cluster": {"additional": {"exclusive": 1}}, "optimizer": {"lr": 1}})
    assert (config.notes, config.cluster.additional, config.optimizer.lr) == ("5", {"exclusive": "1"}, 1.0)
