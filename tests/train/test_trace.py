"""Chosen steps in torch's profiler: which files there are, and what is in them."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.config.schema import EngineName, Strategy
from harness.train.trace import Trace
from tests.support.factory import small_config, train
from tests.support.mutants import kills
from tests.support.spawn import made_by
from tests.train.runs import assert_same_run, summary

UNITS = [f"blocks.{number}" for number in range(2)]


def names(path: Path) -> Counter[str]:
    """Spans of a trace, by name, as Perfetto reads them."""
    told: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return Counter(str(each["name"]) for each in told if each.get("ph") == "X")


def traced_runs(rank: int, folder: Path) -> None:
    zero3 = {"mesh__world_size": 2, "sharding__strategy": Strategy.optim_grads_params, "train__steps": 5}
    for engine in (EngineName.native, EngineName.fsdp2):
        config = small_config(engine__name=engine, measure__trace_steps=[2, 3, 5], **zero3)
        train(config, folder / engine.name, rank)


runs = made_by(traced_runs, 2)


def test_each_row_of_steps_is_a_file_of_the_first_rank(runs: Path) -> None:
    for engine in ("native", "fsdp2"):
        found = {path.name: names(path) for path in (runs / engine / "trace").iterdir()}
        assert found.keys() == {"step-000002.rank-0.json.gz", "step-000005.rank-0.json.gz"}
        steps = [spans["harness::optimizer"] for _, spans in sorted(found.items())]
        assert steps[0] == 2 * steps[1] > 0, "steps 2 and 3, and step 5"
        assert (runs / engine / "trace").stat().st_mode & 0o077 == 0


def test_units_and_collectives_are_in_it(runs: Path) -> None:
    spans = names(runs / "native/trace/step-000005.rank-0.json.gz")
    collectives = ("all_gather ({}/float32)", "reduce_scatter ({}/float32)")
    wanted = {f"FSDP::{each.format(unit)}" for unit in UNITS for each in collectives}
    assert wanted <= spans.keys()
    peer = names(runs / "fsdp2/trace/step-000005.rank-0.json.gz")
    assert {f"FSDP::all_gather ({unit})" for unit in UNITS} <= peer.keys()


def test_a_resumed_run_traces_what_is_left(tmp_path: Path) -> None:
    config = small_config(measure__trace_steps=[1, 4], train__steps=4)
    asked = iter([False, True])
    train(config, tmp_path, should_stop=lambda: next(asked))
    assert [path.name for path in (tmp_path / "trace").iterdir()] == ["step-000001.rank-0.json.gz"]
    train(config, tmp_path)
    assert names(tmp_path / "trace/step-000004.rank-0.json.gz")["harness::optimizer"] == 1
    train(small_config(train__steps=4), tmp_path / "plain")
    assert_same_run(tmp_path, tmp_path / "plain")


def test_traced_steps_count_for_no_median(tmp_path: Path) -> None:
    train(small_config(measure__trace_steps=[3], train__steps=5), tmp_path)
    times = [json.loads(line)["step_time_s"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert summary(tmp_path)["step_time_s"]["median"] == times[4]


@kills("Profiles", "late by a step", "The profiler records the steps after those that were asked for")
def test_a_trace_of_other_steps_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Trace._action
    monkeypatch.setattr(Trace, "_action", lambda self, step: right(self, step - 1))
    with pytest.raises((AssertionError, FileNotFoundError)):
        test_a_resumed_run_traces_what_is_left(tmp_path)
