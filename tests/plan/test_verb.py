"""The verb `plan`: its answers, its refusals, what fits, and how long many cells take."""

from __future__ import annotations

import itertools
import json
import time

import pytest

from harness.cli.main import main
from harness.cli.plan import nearest
from harness.config.catalog import ROOT
from harness.plan.planned import Records, planned
from tests.support.composing import compose

WORDS = ("model=tiny", "data=synthetic", "mesh.world_size=4", "train.global_batch_size=32", "train.microbatch_size=4")
GIB = 2**30


def test_a_cell_is_told_with_what_to_type_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, "cluster.device_memory=1"]) == 0
    told = capsys.readouterr().out
    assert all(each in told for each in ("optimizer ", "peak, at: ", "reduce_scatter", "fits: the peak is 0."))
    assert told.splitlines()[-1].endswith(f"run.py {' '.join(WORDS)} cluster.device_memory=1")


def test_what_is_not_planned_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=odd", "data=synthetic"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("no peak and no traffic is planned. model.family=odd does not run on torch's meta device") == 1
    assert "no wire" not in told


def test_a_set_of_cells_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, "sharding=optim_grads,optim_grads_params", "engine=native,fsdp2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len({sum(row["kept"].values()) for row in rows}) == 3, "FSDP2 keeps under both strategies the same"
    assert len({row["peak"]["total"] for row in rows}) == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["shardng=optim"], "did you mean sharding"),
        (["mesh.world_size=0"], "mesh.world_size=0"),
        (["--calibrate", "nobody"], "nobody"),
        (["cluster.device_memory=-1"], "cluster.device_memory=-1"),
    ],
)
def test_nonsense_is_refused_as_run_py_refuses_it(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_model_beyond_this_machine_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=llama_70b", "model.num_layers=4", "mesh.world_size=4096", *_batch(4096)]) == 0
    assert "of each of 4,096 ranks" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["cluster=slurm", "cluster.device=cuda"])
def test_a_cell_that_this_machine_could_not_start_is_planned(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["plan", *WORDS, word]) == 0


def _batch(ranks: int) -> tuple[str, ...]:
    return f"train.global_batch_size={ranks}", "train.microbatch_size=1", "data=synthetic"


def test_what_is_said_to_fit_was_planned_and_is_the_nearest() -> None:
    words = (*WORDS, "sharding=no_shard", "launch.dry_run=true")
    whole = planned(compose(words).config)
    limit = (whole["peak"]["total"] - 1000) / GIB
    cell = compose((*words, f"cluster.device_memory={limit}"))
    assert planned(cell.config)["fits"] is False
    plans = lambda cells: [planned(each.config) for each in cells]  # noqa: E731
    found = nearest(cell, plans)
    assert found
    for changed, plan in found:
        assert plan["peak"]["total"] <= limit * GIB < whole["peak"]["total"]
        keys = {word.partition("=")[0] for word in changed}
        kept = [word for word in words if word.partition("=")[0] not in keys]
        again = compose([*kept, *changed, f"cluster.device_memory={limit}"])
        assert planned(again.config)["peak"] == plan["peak"]
    assert nearest(compose((*words, "cluster.device_memory=0.0001")), plans) == []


def test_two_hundred_cells_take_less_than_ten_seconds() -> None:
    axes = (
        ("no_shard", "optim", "optim_grads", "optim_grads_params"),
        ("fp32", "bf16", "bf16_comm", "bf16_pure", "fp8_current"),
        ("2", "8", "64", "256", "1024"),
        ("1", "2"),
    )
    words = "sharding={} dtype={} mesh.world_size={} mesh.dp_outer={} launch.dry_run=true"
    cells = [compose((*words.format(*each).split(), *_batch(int(each[2])))) for each in itertools.product(*axes)]
    began = time.process_time()
    records: Records = {}
    found = [planned(cell.config, records) for cell in cells]
    took = time.process_time() - began
    assert len(found) == 200
    assert all("kept" in each for each in found)
    assert took < 10, took


@pytest.mark.full
def test_the_record_has_what_its_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plan", "study=will_it_fit"]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    page = (ROOT / "docs" / "records" / "will_it_fit.md").read_text(encoding="utf-8")
    assert page.split("```")[1].strip().splitlines() == printed[:-1]
