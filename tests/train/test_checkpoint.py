"""Checkpoints that are damaged, foreign, or cannot be written."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.probe.collectives import CollectiveMeter
from harness.store.errors import StoreError
from harness.train import checkpoint
from harness.train.checkpoint import Checkpoint, Checkpoints
from harness.train.control import Control
from tests.engines.test_replicated import build
from tests.factory import ranks_of, small_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


def checkpoints(folder: Path, **changes: Any) -> Checkpoints:
    config = small_config(**changes)
    meter = CollectiveMeter()
    meter.close()
    return Checkpoints(folder, config, ranks_of(config), Control(ranks_of(config), None, meter))


def keep_both(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Checkpoints of steps 1 and 2, made from weights that differ; returns the engine's weights at each."""
    monkeypatch.setattr(Checkpoints, "_drop_all_but", lambda *_: None)
    engine = build(small_config())
    weights = {}
    for step in (1, 2):
        with torch.no_grad():
            engine.weights["head.norm.weight"].add_(1)  # type: ignore[attr-defined]
        weights[step] = {name: weight.clone() for name, weight in engine.named_weights()}
        checkpoints(folder).save(engine, step, "digest")
    return weights


def damage(path: Path, how: str) -> None:
    rank_file = path / "rank-00000.safetensors"
    if how == "flipped bit":
        data = bytearray(rank_file.read_bytes())
        data[-1] ^= 1
        rank_file.write_bytes(data)
    elif how == "cut short":
        rank_file.write_bytes(rank_file.read_bytes()[:-1])
    elif how == "no rank file":
        rank_file.unlink()
    elif how == "no meta":
        (path / "meta.json").unlink()
    elif how == "torn meta":
        (path / "meta.json").write_text('{"format": 1, "step"')
    elif how == "unpublished":
        path.rename(path.with_suffix(".tmp"))


@pytest.mark.parametrize("how", ["flipped bit", "cut short", "no rank file", "no meta", "torn meta", "unpublished"])
def test_falls_back_to_the_newest_intact_one(folder: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    weights = keep_both(folder, monkeypatch)
    engine = build(small_config(train__seed=9))
    assert checkpoints(folder).load_newest(engine) == Checkpoint(2, "digest")
    damage(folder / "step-000002", how)
    assert checkpoints(folder).load_newest(engine) == Checkpoint(1, "digest")
    assert all(torch.equal(weight, weights[1][name]) for name, weight in engine.named_weights())
    damage(folder / "step-000001", how)
    assert checkpoints(folder).load_newest(engine) is None


def test_only_the_newest_is_kept_and_leftovers_go(folder: Path) -> None:
    engine = build(small_config())
    (folder / "step-000001.tmp").mkdir(parents=True)
    for step in (2, 3):
        checkpoints(folder).save(engine, step, "")
    assert [path.name for path in folder.iterdir()] == ["step-000003"]
    meta = json.loads((folder / "step-000003/meta.json").read_text())
    shape = {"strategy": "no_shard", "outer": "no_shard", "world_size": 1, "dp_outer": 1}
    assert meta["layout"] == {"engine": "single", **shape, "main_params": "fp32"}
    assert meta["files"][0]["bytes"] == (folder / "step-000003/rank-00000.safetensors").stat().st_size


def test_random_number_state_is_part_of_it(folder: Path) -> None:
    engine = build(small_config())
    torch.manual_seed(5)
    checkpoints(folder).save(engine, 1, "")
    expected = torch.rand(3)
    torch.manual_seed(6)
    checkpoints(folder).load_newest(engine)
    assert torch.equal(torch.rand(3), expected)


def test_another_layout_is_refused(folder: Path) -> None:
    checkpoints(folder).save(build(small_config()), 1, "")
    meta = folder / "step-000001/meta.json"
    meta.write_text(meta.read_text().replace('"world_size": 1', '"world_size": 4'))
    with pytest.raises(StoreError, match=r"'world_size': 4.*'world_size': 1.*remove ckpt/"):
        checkpoints(folder).load_newest(build(small_config()))


def test_full_disk_keeps_the_older_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(small_config())
    checkpoints(folder).save(engine, 1, "")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(RuntimeError, match=r"checkpoint: cannot write .*No space left on device"):
        checkpoints(folder).save(engine, 2, "")
    assert checkpoints(folder).load_newest(engine) == Checkpoint(1, "")
