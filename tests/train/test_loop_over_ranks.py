"""The loop over ranks: what each knows of the others, that they agree with one process, and stop and go on together."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from harness.config.schema import Config, EngineName
from harness.control import Control, StepReport
from harness.probe.collectives import CollectiveMeter
from harness.store.metrics import read_metrics
from harness.train import Outcome
from tests.support.factory import ranks_of, small_config, train
from tests.support.spawn import run_ranks
from tests.train.runs import assert_same_run, summary


def ddp_config(world_size: int = 2, **changes: Any) -> Config:
    return small_config(engine__name=EngineName.ddp, mesh__world_size=world_size, **changes)


def ddp_runs(rank: int, folder: str) -> list[Any]:
    """A whole run, one stopped by rank 1 after step 2 and then taken up, on the same two ranks."""
    path = Path(folder)
    outcomes = [train(ddp_config(train__steps=4), path / "straight", rank)]
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return rank == 1 and len(asked) == 2

    outcomes.append(train(ddp_config(train__steps=4), path / "resumed", rank, should_stop=stop))
    outcomes.append(train(ddp_config(train__steps=4), path / "resumed", rank))
    return [outcomes, exchange(rank)]


def exchange(rank: int) -> StepReport:
    """What both ranks know when each reports two losses, rank 1 was asked to stop, and rank 0 finds a save due."""
    with closing(CollectiveMeter()) as meter:
        control = Control(ranks_of(ddp_config(), rank), dist.new_group(backend="gloo"), meter)
        report = control.begin_report([rank + 0.1, rank - math.inf], (1 << 64) - 1 - rank, rank, rank == 1, rank == 0)()
        assert meter.take() == []
    return report


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("ddp")
    return folder, run_ranks(ddp_runs, 2, str(folder))


def test_every_rank_knows_all_reports_in_rank_order(ddp: tuple[Path, Any]) -> None:
    for _, report in ddp[1]:
        assert report == StepReport(
            [0.1, -math.inf, 1.1, -math.inf], [(1 << 64) - 1, (1 << 64) - 2], [0, 1], True, True
        )


def test_ranks_agree_with_one_process(ddp: tuple[Path, Any], tmp_path: Path) -> None:
    train(small_config(train__steps=4), tmp_path)
    pairs = zip(read_metrics(tmp_path / "metrics.jsonl"), read_metrics(ddp[0] / "straight/metrics.jsonl"), strict=True)
    for single, double in pairs:
        if single["step"] == 1:
            assert double["loss"] == single["loss"], "same weights, same microbatches, summed in the same order"
        for key in ("step", "lr", "tokens", "data_digest"):
            assert single[key] == double[key]
        assert double["loss"] == pytest.approx(single["loss"], rel=1e-6)
        assert double["grad_norm"] == pytest.approx(single["grad_norm"], rel=1e-5)
    first = summary(tmp_path)["initial_weights"]
    assert summary(ddp[0] / "straight")["initial_weights"] == first


def test_own_traffic_is_left_out_of_the_record(ddp: tuple[Path, Any]) -> None:
    """Only DDP's one bucket: no control exchange, no capture, no norm of the weights."""
    facts = summary(ddp[0] / "straight")
    num_bytes = facts["parameters"] * 4
    for record in read_metrics(ddp[0] / "straight/metrics.jsonl"):
        if record["step"] == 2:  # DDP broadcasts its final order of buckets, once
            assert record["comm"].pop("broadcast")["bytes"] < 1000
        assert record["comm"] == {"all_reduce": {"count": 1, "bytes": num_bytes}}
    assert facts["collectives"] == [{"kind": "all_reduce", "bucket": "", "count": 1, "bytes": num_bytes}]


def test_one_ranks_stop_stops_all_and_resume_is_bitwise(ddp: tuple[Path, Any]) -> None:
    folder, outcomes = ddp
    for rank in (0, 1):
        assert outcomes[rank][0] == [Outcome("done", 4, True), Outcome("preempted", 2, True), Outcome("done", 4, True)]
    assert_same_run(folder / "straight", folder / "resumed")
