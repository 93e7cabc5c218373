"""Timed runs: phases, what the record and the summary say, and tensor storage against what engines account for."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from harness.config.schema import CkptPolicy, Config, EngineName, MeasureMode, Strategy
from harness.store.metrics import read_metrics
from harness.train import Outcome
from tests.support.factory import small_config, train
from tests.support.spawn import run_ranks
from tests.train.runs import summary

WARM_UP, STEPS = 3, 7


def timed_config(**changes: Any) -> Config:
    """A timed run of the small model."""
    return small_config(
        train__steps=STEPS,
        measure__mode=MeasureMode.bench,
        measure__warmup_steps=WARM_UP,
        measure__capture_steps=[],
        ckpt__policy=CkptPolicy.none,
        **changes,
    )


def test_a_timed_run_warms_up_and_then_does_nothing_beside(tmp_path: Path) -> None:
    assert train(timed_config(), tmp_path) == Outcome("done", STEPS, saved=False)
    records, facts = read_metrics(tmp_path / "metrics.jsonl"), summary(tmp_path)
    assert [record["step"] for record in records if record["memory"]["peak_tensor_bytes"] is not None] == [WARM_UP]
    assert all(record["param_norm"] is None for record in records)
    assert not (tmp_path / "ckpt").exists()
    times = sorted(record["step_time_s"] for record in records[WARM_UP:])
    assert facts["step_time_s"]["median"] == pytest.approx((times[1] + times[2]) / 2), "timed steps alone"
    load = facts["load"]
    assert load["others_cores"] >= 0
    assert load["timed_s"] >= sum(times)
    assert min(load["at_start"], load["at_end"]) >= 0


def test_a_timed_run_trains_as_any_other(tmp_path: Path) -> None:
    train(timed_config(), tmp_path / "timed")
    train(small_config(train__steps=STEPS), tmp_path / "plain")
    pairs = zip(*(read_metrics(tmp_path / name / "metrics.jsonl") for name in ("timed", "plain")), strict=True)
    assert all(
        one[key] == other[key] for one, other in pairs for key in ("loss", "grad_norm", "lr", "data_digest", "comm")
    )


def test_tensors_between_steps_are_what_a_plain_engine_accounts_for(tmp_path: Path) -> None:
    """One process with fp32 weights: weights, gradients, moments, step counts and tables, and nothing else."""
    gc.collect()  # what another test of this process left is not to go while this one counts
    train(timed_config(), tmp_path)
    facts = summary(tmp_path)
    accounted, tensors = sum(facts["accounted_bytes"].values()), facts["tensor_bytes"]
    assert tensors["step"] == WARM_UP
    assert tensors["growth"] == [0]
    # zero_grad drops gradients between steps here or keeps them: either way the difference is theirs alone.
    missing = accounted - tensors["persistent"][0]
    assert 0 <= missing <= facts["accounted_bytes"]["main_grads"]
    assert tensors["peak"][0] >= accounted


def two_ranks(rank: int, folder: str, engine: str, strategy: str) -> None:
    config = timed_config(
        engine__name=EngineName[engine], sharding__strategy=Strategy[strategy], mesh__world_size=2, data__seq_len=32
    )
    train(config, Path(folder), rank)


@pytest.mark.parametrize(
    ("engine", "strategy"), [("ddp", "no_shard"), ("native", "no_shard"), ("native", "optim_grads_params")]
)
def test_tensors_of_two_ranks_are_what_engines_account_for(engine: str, strategy: str, tmp_path: Path) -> None:
    """C++ buckets of DDP and the folding thread of the native engine included."""
    run_ranks(two_ranks, 2, str(tmp_path), engine, strategy)
    facts = summary(tmp_path)
    tensors, accounted = facts["tensor_bytes"], sum(facts["accounted_bytes"].values())
    assert len(tensors["persistent"]) == len(tensors["peak"]) == 2
    assert all(abs(growth) < 256 for growth in tensors["growth"])
    if strategy == "optim_grads_params":  # shards of gradients are given back between steps
        accounted -= facts["accounted_bytes"]["main_grads"]
    assert tensors["persistent"][0] == pytest.approx(accounted, abs=4096 + 0.01 * accounted)
    assert all(peak > kept for peak, kept in zip(tensors["peak"], tensors["persistent"], strict=True))


def test_a_timed_run_that_is_stopped_starts_over(tmp_path: Path) -> None:
    steps = iter([False, True, *[False] * 20])
    assert train(timed_config(), tmp_path, should_stop=lambda: next(steps)).status == "preempted"
    assert "load" not in summary(tmp_path)
    assert train(timed_config(), tmp_path) == Outcome("done", STEPS, saved=False)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, STEPS + 1))
