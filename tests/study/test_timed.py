"""Timed studies as they are asked for."""

from __future__ import annotations

from collections import Counter

import pytest
from hydra._internal.hydra import Hydra

from harness.config.errors import BadRequest
from harness.config.schema import EngineName, MeasureMode
from harness.store.study import study_record
from tests.study.test_cells import ask, hydra

__all__ = ["hydra"]  # a fixture


def test_the_shipped_study_is_whole_blocks_of_both_regimes(hydra: Hydra) -> None:
    wanted = ask(hydra, "study=engine_step_time")
    configs = [cell.typed for cell in wanted.cells]
    assert all(config.measure.mode is MeasureMode.bench for config in configs)
    assert [config.train.replicate for config in configs] == sorted(config.train.replicate for config in configs)
    arms = Counter((c.model.name, c.engine.name, c.sharding.strategy) for c in configs)
    assert set(arms.values()) == {5}
    assert len(arms) == 38
    assert {engine for _, engine, _ in arms} == set(EngineName) - {EngineName.single, EngineName.ext}
    assert len({c.train.steps for c in configs}) == 1
    record = study_record(wanted.cells, wanted.controls)
    assert record["order_seed"] == 0
    assert [cell["signature"] for cell in record["cells"]] == [cell.signature for cell in wanted.cells]
    blocks = {cell.signature: cell.typed.train.replicate for cell in wanted.cells}
    assert all(blocks[arm] == blocks[control] for arm, control in wanted.controls.items()), "arms are paired by block"


def test_a_set_of_timed_jobs_is_refused_and_one_is_not(hydra: Hydra) -> None:
    words = ("measure=bench", "cluster=slurm")
    with pytest.raises(BadRequest, match="inside one allocation"):
        ask(hydra, *words, "train.replicate=0,1")
    assert len(ask(hydra, *words).cells) == 1
