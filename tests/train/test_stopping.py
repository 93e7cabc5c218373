"""A run that is stopped, killed or finished goes on from its checkpoint, bit for bit, or starts over without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.config.schema import CkptPolicy
from harness.store.metrics import read_metrics
from harness.train import Outcome, Progress
from tests.support.factory import small_config, stopping, train
from tests.train.runs import assert_same_run, summary


def test_stop_saves_and_resume_is_bitwise(tmp_path: Path) -> None:
    config = small_config(train__steps=5, train__param_norm_every=1)
    train(config, tmp_path / "a")
    assert train(config, tmp_path / "b", should_stop=stopping(2)) == Outcome("preempted", 2, saved=True)
    assert summary(tmp_path / "b")["status"] == "preempted"
    assert train(config, tmp_path / "b", should_stop=stopping(1)) == Outcome("preempted", 3, saved=True)
    assert train(config, tmp_path / "b") == Outcome("done", 5, saved=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_record_is_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    """Killed after step 3 with a checkpoint of step 2: step 3 is run again and recorded once."""
    config = small_config(train__steps=4, ckpt__every=2)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "b", progress=_killer(3))
    assert len(read_metrics(tmp_path / "b/metrics.jsonl")) == 3
    assert train(config, tmp_path / "b") == Outcome("done", 4, saved=True)
    train(config, tmp_path / "a")
    assert_same_run(tmp_path / "a", tmp_path / "b")


def _killer(step: int) -> Any:
    def progress(seen: Progress) -> None:
        if seen.step == step:
            raise KeyboardInterrupt

    return progress


def test_without_checkpoints_a_run_starts_over(tmp_path: Path) -> None:
    config = small_config(train__steps=3, ckpt__policy=CkptPolicy.none)
    assert train(config, tmp_path, should_stop=stopping(2)) == Outcome("preempted", 2, saved=False)
    assert not (tmp_path / "ckpt").exists()
    assert train(config, tmp_path) == Outcome("done", 3, saved=False)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_stop_in_the_last_step_is_too_late_to_matter(tmp_path: Path) -> None:
    assert train(small_config(), tmp_path, should_stop=stopping(3)) == Outcome("done", 3, saved=True)


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    config = small_config()
    train(config, tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    assert train(config, tmp_path) == Outcome("done", 3, saved=True)
    assert (tmp_path / "metrics.jsonl").read_text() == before
