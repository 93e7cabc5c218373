"""A run that is stopped, killed or finished goes on from its checkpoint, bit for bit, or starts over without one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from harness.checkpoint.policy import Checkpoints
from harness.config.schema import CkptConfig, CkptPolicy
from harness.store.metrics import read_metrics
from harness.train import Outcome
from tests.support.factory import small_config, stopping, train
from tests.support.mutants import finds
from tests.train.runs import assert_same_run


def test_record_is_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    """Killed after step 3 with a checkpoint of step 2: step 3 is run again and recorded once."""

    def killed(seen: Mapping[str, Any]) -> None:
        if seen["step"] == 3:
            raise KeyboardInterrupt

    config = small_config(train__steps=4, ckpt__every=2)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "b", progress=killed)
    assert len(read_metrics(tmp_path / "b/metrics.jsonl")) == 3
    assert train(config, tmp_path / "b") == Outcome("done", 4, saved=True)
    train(config, tmp_path / "a")
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_without_checkpoints_a_run_starts_over(tmp_path: Path) -> None:
    config = small_config(train__steps=3, ckpt__policy=CkptPolicy.none)
    assert train(config, tmp_path, should_stop=stopping(2)) == Outcome("preempted", 2, saved=False)
    assert not (tmp_path / "ckpt").exists()
    assert train(config, tmp_path) == Outcome("done", 3, saved=False)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_stop_in_the_last_step_is_too_late_to_matter_and_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    assert train(small_config(), tmp_path, should_stop=stopping(3)) == Outcome("done", 3, saved=True)
    before = (tmp_path / "metrics.jsonl").read_text()
    assert train(small_config(), tmp_path) == Outcome("done", 3, saved=True)
    assert (tmp_path / "metrics.jsonl").read_text() == before


# -- saving by time ----------------------------------------------------------------------------------------------------

SLOW_S = 2.0
"""What a save takes here; a step takes less."""


def saved_by_time(folder: Path, minutes: float, slow_s: float) -> tuple[list[int], bool]:
    """Steps of the checkpoints of a run of three, and whether saving counts for some step's time."""
    config = small_config(train__steps=3, ckpt__keep=9, ckpt__minutes=minutes)
    save = Checkpoints.save

    def slowly(*args: Any) -> None:
        save(*args)
        time.sleep(slow_s)

    with mock.patch.object(Checkpoints, "save", slowly):
        train(config, folder)
    times = [record["step_time_s"] for record in read_metrics(folder / "metrics.jsonl")]
    return sorted(int(path.name[-6:]) for path in (folder / "ckpt").glob("step-*")), max(times) >= SLOW_S


BY_TIME = {CkptConfig.minutes: [3], 0.0: [3], 1e-9: [1, 2, 3]}
"""Steps after which a run of three saves, by minutes; a short one only at its end by default."""


@pytest.mark.parametrize("minutes", BY_TIME)
@pytest.mark.parametrize("slow_s", [SLOW_S])
def test_a_checkpoint_by_time_is_off_the_steps_clock(tmp_path: Path, minutes: float, slow_s: float) -> None:
    assert saved_by_time(tmp_path, minutes, slow_s) == (BY_TIME[minutes], False)


test_a_wrong_time_of_saving_is_found = finds(
    "Ends of a run",
    test_a_checkpoint_by_time_is_off_the_steps_clock="""
        0 is always: A run that asks for none saves each step
            train.loop.Loop._is_save_due: 0 < pause_s => 0 <= pause_s
            (minutes=0.0, slow_s=0)
        never: No checkpoint is made by time
            train.loop.Loop._save_if_due: report.stop or report.save => report.stop
            (minutes=1e-9, slow_s=0)
        not exchanged: Ranks do not learn that a save is due by the first one's clock
            control.Control.begin_report: + 2 * int(save) =>
            (minutes=1e-9, slow_s=0)
        seconds: Short runs save after each step by default
            train.loop.Loop._is_save_due: 60 * self => 1e-9 * self
            (minutes=CkptConfig.minutes, slow_s=0)
    """,
)
