"""TensorBoard's events and CSV of a stored run, read back by what reads them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from harness.cli import wandb_sync
from harness.cli.main import main
from harness.store.metrics import read_metrics
from harness.store.rundir import RunDir, Store
from harness.wandb_sync import sync as files
from tests.support.composing import compose
from tests.support.factory import small_config, train
from tests.support.mutants import kills


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Five steps, two of them evaluated, in a store of their own."""
    made = Store(tmp_path).create(compose([f"launch.root={tmp_path}", "train.steps=5"]))
    train(small_config(train__steps=5, measure__validate_every=2), made.path)
    return made


def sync(run: RunDir, kind: str) -> int:
    return main(["sync", str(run.path), "--root", str(run.path.parents[1]), "--to", kind])


def differs(run: RunDir) -> list[str]:
    """Scalars of TensorBoard's files that are not the record's."""
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    told = reading.EventAccumulator(str(run.path / "tensorboard"))
    told.Reload()
    records = read_metrics(run.metrics)
    wanted = {
        "train/loss": [(each["step"], each["loss"]) for each in records],
        "train/time/data_s": [(each["step"], each["time"]["data_s"]) for each in records],
        "train/validation/loss": [
            (each["step"], each["validation"]["loss"]) for each in records if each["step"] in (2, 4)
        ],
    }
    found = {name: [(each.step, each.tensor_proto) for each in told.Tensors(name)] for name in wanted}
    from tensorboard.util.tensor_util import make_ndarray

    values = {name: [(step, float(make_ndarray(value))) for step, value in rows] for name, rows in found.items()}
    return [
        name
        for name, rows in wanted.items()
        if [step for step, _ in rows] != [step for step, _ in values[name]]
        or [value for _, value in values[name]] != pytest.approx([value for _, value in rows], rel=1e-6)
    ]


def test_viewers_read_what_is_written(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sync(run, "csv") == 0
    with (run.path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["train/loss"]) for row in rows] == [each["loss"] for each in read_metrics(run.metrics)]
    assert [row["train/validation/loss"] != "" for row in rows] == [False, True, False, True, False]
    assert next(iter(rows[0])) == "train/step"
    with monkeypatch.context() as patch:
        patch.setattr(wandb_sync.importlib.util, "find_spec", lambda name: None)
        assert sync(run, "tensorboard") == 2
    assert "the package tensorboard is not installed" in capsys.readouterr().err
    pytest.importorskip("tensorboard")
    for _ in range(2):  # the second replaces the first
        assert sync(run, "tensorboard") == 0
    assert differs(run) == []
    assert f"next: tensorboard --logdir {run.path}" in capsys.readouterr().out


@kills("wandb", "events of two syncs", "TensorBoard's files of an earlier time stay, so that steps are there twice")
def test_events_that_are_there_twice_are_found(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(files.shutil, "rmtree", lambda *_, **__: None)
    sync(run, "tensorboard")
    sync(run, "tensorboard")
    assert differs(run) != []
