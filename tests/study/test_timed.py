"""Timed studies as they are asked for."""

from __future__ import annotations

from collections import Counter

import pytest
from hydra._internal.hydra import Hydra

from harness.config.errors import BadRequest
from harness.config.schema import Config, EngineName, MeasureMode
from harness.store.study import study_record
from tests.study.test_cells import ask, hydra

__all__ = ["hydra"]  # a fixture


def arm_of(c: Config) -> tuple[object, ...]:
    """What tells an arm from the others."""
    split = c.sharding.strategy, c.sharding.outer, c.mesh.world_size, c.mesh.dp_outer
    return c.model.name, c.engine.name, c.dtype.name, *split


def test_the_shipped_study_is_whole_blocks_of_both_regimes(hydra: Hydra) -> None:
    wanted = ask(hydra, "study=engine_step_time")
    configs = [cell.typed for cell in wanted.cells]
    assert all(config.measure.mode is MeasureMode.bench for config in configs)
    assert [config.train.replicate for config in configs] == sorted(config.train.replicate for config in configs)
    arms = Counter(arm_of(c) for c in configs)
    assert set(arms.values()) == {5}
    assert len(arms) == 2 * 19 + 2 * 5 + 6
    assert {arm[1] for arm in arms} == set(EngineName) - {EngineName.single, EngineName.ext}
    assert len({c.train.steps for c in configs}) == 1
    hybrid = [c for c in configs if c.mesh.dp_outer > 1]
    assert len({arm_of(c)[1:] for c in hybrid}) == 5
    assert {c.model.name for c in hybrid} == {"bench_comm"}, "they ask about communication"
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
