"""The wandb mirror copies the record and cannot hurt the run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.config.schema import WandbMode
from harness.store.metrics import read_metrics
from harness.train.mirror import Mirror, mirror_id
from tests.support.factory import freeze, small_config, train


class FakeRun:
    """Remembers what it was given; fails from the given call on."""

    def __init__(self, fail_at: int = 10**9) -> None:
        self.logged: list[dict[str, Any]] = []
        self.metrics: list[tuple[Any, ...]] = []
        self.finished = 0
        self.fail_at = fail_at

    def log(self, values: dict[str, Any]) -> None:
        if len(self.logged) >= self.fail_at:
            raise ConnectionError("gone")
        self.logged.append(values)

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def finish(self, **_: object) -> None:
        self.finished += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeRun, dict[str, Any]]:
    run, given = FakeRun(), {}

    def init(**arguments: Any) -> FakeRun:
        given.update(arguments)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=lambda **settings: settings))
    return run, given


def test_every_line_is_mirrored(tmp_path: Path, fake: tuple[FakeRun, dict[str, Any]]) -> None:
    run, given = fake
    config = small_config(wandb__mode=WandbMode.offline, study__name="adhoc")
    freeze(config, tmp_path)
    train(config, tmp_path)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["train/loss"] for line in run.logged] == [record["loss"] for record in records]
    assert run.logged[0]["train/time/data_s"] == records[0]["time"]["data_s"]
    assert not any("mfu" in key for line in run.logged for key in line), "null is left out"
    assert not any("data_digest" in key for line in run.logged for key in line), "what its metric keeps back too"
    assert ("train/*", "train/step") in run.metrics
    assert given["mode"] == "offline"
    assert given["resume"] == "allow"
    assert given["id"].startswith("adhoc-")
    assert given["config"]["train"]["steps"] == 3
    assert run.finished == 1


def test_a_failing_mirror_is_dropped_and_training_goes_on(
    tmp_path: Path, fake: tuple[FakeRun, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    run, _ = fake
    run.fail_at = 1
    config = small_config(wandb__mode=WandbMode.offline)
    freeze(config, tmp_path)
    assert train(config, tmp_path).status == "done"
    assert len(run.logged) == 1
    assert [record.message for record in caplog.records] == [
        "wandb mirror stopped, training goes on: ConnectionError: gone"
    ]


def test_missing_package_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = small_config(wandb__mode=WandbMode.offline)
    mirror = Mirror.open(config, tmp_path)
    mirror.log({"step": 1})
    mirror.close()
    assert "could not start" in caplog.text


def test_disabled_never_imports_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    mirror = Mirror.open(small_config(), tmp_path)
    mirror.log({"step": 1})
    mirror.close()


@pytest.mark.parametrize("study", ["a", "x" * 31, "x" * 200])
def test_ids_fit_and_keep_runs_apart(study: str) -> None:
    ids = {mirror_id(study, signature) for signature in ("a" * 64, "a" * 31 + "b" + "a" * 32)}
    assert len(ids) == 2
    assert all(len(identity) <= 64 for identity in ids)


def test_offline_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package itself and no network: a folder appears beside the record."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = small_config(train__steps=1, wandb__mode=WandbMode.offline)
    freeze(config, tmp_path)
    train(config, tmp_path)
    files = [path for path in (tmp_path / "wandb").rglob("*.wandb") if path.is_file()]
    assert len(files) == 1
    assert files[0].stat().st_size > 0
