"""The loop: what it records, that it costs next to nothing, and that no number of it depends on the dtype."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from harness.config.derived import lr_at
from harness.config.schema import Config, DataKind, Dtype, EngineName, Schedule
from harness.control import Control, StepReport
from harness.data.loader import global_digest
from harness.engines.protocol import Microbatch
from harness.probe.collectives import CollectiveMeter
from harness.store.fields import leaves
from harness.store.metrics import read_metrics
from harness.train import Outcome
from harness.train.record import global_loss, weights_digest
from tests.data.test_loader import held
from tests.support.factory import ranks_of, small_config, train, with_dtypes
from tests.support.spawn import run_ranks
from tests.train.runs import Passing, assert_same_run, summary

NULL = {
    *("validation/loss", "validation/perplexity", "loss_scale", "counters/transient_peak_bytes", "mfu"),
    *(f"memory/{name}" for name in ("allocated", "reserved", "alloc_retries")),
    *("memory/persistent_tensor_bytes", "memory/peak_tensor_bytes"),
}
"""What a plain run on a CPU has no value of; that a line has all metrics, tests/architecture/test_places_metrics.py."""


@pytest.mark.alone
def test_record_of_a_run(tmp_path: Path) -> None:
    config = small_config(train__steps=4, train__param_norm_every=2, measure__capture_steps=[1, 3, 99])
    seen: list[Mapping[str, Any]] = []
    outcome = train(config, tmp_path, progress=seen.append)
    assert outcome == Outcome("done", 4, saved=True)
    records = read_metrics(tmp_path / "metrics.jsonl")
    for number, record in enumerate(records, start=1):
        values = dict(leaves(record))
        assert {path for path, value in values.items() if value is None} - {"param_norm"} == NULL
        assert {type(value) for value in values.values()} == {int, float, str, bool, type(None)}
        assert (type(record["tokens"]), type(record["loss"]), type(record["skipped"])) == (int, float, bool)
        assert record["step"] == number
        assert record["lr"] == lr_at(config, number)
        assert record["tokens"] == 8 * 16
        assert record["data_digest"] == record["fed_digest"] == global_digest([held(config, 0, number)])
        assert (record["param_norm"] is not None) == (number % 2 == 0)
        assert record["time"].pop("exposed_comm_s") == 0.0, "one rank"
        assert all(value > 0 for value in record["time"].values())
    assert [(told["step"], told["loss"]) for told in seen] == [(each["step"], each["loss"]) for each in records]
    files = {path.name for path in (tmp_path / "capture").iterdir()}
    assert files == {"step-000001.safetensors", "step-000003.safetensors"}
    tensors = load_file(tmp_path / "capture" / "step-000001.safetensors")
    assert {name.partition("/")[0] for name in tensors} == {"gradient", "local"}
    gradients = {name: tensor for name, tensor in tensors.items() if name.startswith("gradient/")}
    norm = torch.cat([gradient.double().flatten() for gradient in gradients.values()]).norm().item()
    assert norm == pytest.approx(records[0]["grad_norm"], rel=1e-12), "captured before clipping"

    facts = summary(tmp_path)
    assert list(facts) == [
        "status", "step", "steps", "tokens", "loss", "grad_norm", "parameters", "initial_weights", "final_weights",
        "accounted_bytes", "engine", "network", "other_replicas", "wall_s", "collectives",
        "step_time_s",
    ]  # fmt: skip
    assert facts["network"]["nccl_ub"] == {"requested": "none", "effective": "none"}
    assert facts["network"]["sharp"] == {"requested": "default", "effective": "none"}
    assert (facts["status"], facts["step"], facts["tokens"]) == ("done", 4, 4 * 128)
    assert facts["loss"] == records[-1]["loss"]
    assert facts["initial_weights"] != facts["final_weights"]
    assert facts["other_replicas"] == []
    assert facts["step_time_s"]["median"] == statistics.median(record["step_time_s"] for record in records[1:])


def test_loss_falls_on_real_text(tmp_path: Path) -> None:
    config = small_config(data__kind=DataKind.stdlib, model__vocab_size=256, train__steps=30, optimizer__lr=1e-2)
    train(config, tmp_path)
    losses = [record["loss"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert losses[-1] < losses[0] - 1.5


def test_initial_weights_digest_does_not_depend_on_the_dtype(tmp_path: Path) -> None:
    digests = set()
    for compute, main in ((Dtype.fp32, Dtype.fp32), (Dtype.fp64, Dtype.fp64), (Dtype.bf16, Dtype.fp32)):
        train(with_dtypes(small_config(train__steps=1), compute, main), tmp_path / compute.name)
        digests.add(summary(tmp_path / compute.name)["initial_weights"])
    assert len(digests) == 1


def test_weights_digest_sees_name_shape_and_bits() -> None:
    def digest(name: str, tensor: Tensor) -> str:
        return weights_digest([(name, tensor)])

    base = digest("a", torch.zeros(2, 3))
    assert base == digest("a", torch.zeros(2, 3))
    others = [digest("b", torch.zeros(2, 3)), digest("a", torch.zeros(3, 2)), digest("a", -torch.zeros(2, 3))]
    others.append(digest("a", torch.zeros(2, 3, dtype=torch.float64)))
    assert len({base, *others}) == 5


def test_losses_are_added_in_order_in_fp64() -> None:
    losses = [1e16, 1.0, -1e16, 3.0]
    assert global_loss(losses) == 3.0 / 4, "one after the other: 1 is lost"
    assert math.fsum(losses) / 4 == 1.0, "any cleverer sum would differ"


class Diverging(Passing):
    """Its loss is infinite in step 1; its weights, and so all that follows, are nan after step 2."""

    def forward_backward(self, batch: Microbatch, *, last: bool) -> Tensor:
        loss: Tensor = self.engine.forward_backward(batch, last=last)
        return torch.tensor(math.inf) if self.number == 1 else loss

    def step(self, lr: float) -> float:
        if self.number == 2:
            self.engine.weights["head.norm.weight"].grad.fill_(math.nan)
        return super().step(lr)


def test_divergence_is_recorded_not_crashed_on(tmp_path: Path) -> None:
    config = small_config(train__param_norm_every=1, measure__capture_steps=[3])
    assert train(config, tmp_path, wrap_engine=Diverging).status == "done"
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert records[0]["loss"] == math.inf
    assert math.isfinite(records[0]["grad_norm"])
    assert math.isfinite(records[1]["loss"])
    assert math.isnan(records[1]["grad_norm"])
    assert math.isnan(records[1]["param_norm"])
    assert math.isnan(records[2]["loss"])
    assert (tmp_path / "metrics.jsonl").read_text().count('"nan"') == 5
    assert summary(tmp_path)["loss"] == "nan"
    third = load_file(tmp_path / "capture/step-000003.safetensors")
    assert third["gradient/embedding.weight"].isnan().any()


# -- the learning rate, step by step -----------------------------------------------------------------------------------


def rates(schedule: Schedule, steps: int = 6, warmup: int = 2) -> list[float]:
    config = small_config(
        optimizer__lr=1.0,
        train__schedule=schedule,
        train__steps=steps,
        train__warmup_steps=warmup,
        train__min_lr_ratio=0.1,
    )
    return [lr_at(config, step) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("schedule", "after"),
    [
        (Schedule.constant, [1, 1, 1, 1]),
        (Schedule.linear, [0.775, 0.55, 0.325, 0.1]),
        (Schedule.cosine, [0.8681980515339464, 0.55, 0.23180194846605365, 0.1]),
    ],
)
def test_warm_up_then_schedule(schedule: Schedule, after: list[float]) -> None:
    assert rates(schedule) == pytest.approx([0.5, 1.0, *after], rel=1e-12)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_edges(schedule: Schedule) -> None:
    assert rates(schedule, steps=1, warmup=0) == pytest.approx([1.0 if schedule is Schedule.constant else 0.1])
    assert rates(schedule, steps=2, warmup=4) == pytest.approx([0.25, 0.5])
    assert rates(schedule, steps=2, warmup=2) == pytest.approx([0.5, 1.0])


# -- over ranks: what each knows of the others, and that they stop and go on together ----------------------------------


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
