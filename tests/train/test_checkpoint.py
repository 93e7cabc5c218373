"""Checkpoints that are damaged, foreign, or cannot be written: the right one is taken, or the fault is named."""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.checkpoint import tensor_file
from harness.checkpoint.manifest import Manifest
from harness.checkpoint.policy import Checkpoint, Checkpoints
from harness.config.schema import OptimizerName
from harness.control import Control
from harness.probe.collectives import CollectiveMeter
from harness.store.errors import StoreError
from tests.engines.test_replicated import build
from tests.support.factory import ranks_of, small_config
from tests.support.mutants import finds

RANK_FILE = "rank-00000.safetensors"
PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


def checkpoints(folder: Path, told: list[str] | None = None, **changes: Any) -> Checkpoints:
    config = small_config(**{"ckpt__keep": 2, **changes})
    meter = CollectiveMeter()
    meter.close()
    warn = [].append if told is None else told.append
    return Checkpoints(folder, config, ranks_of(config), Control(ranks_of(config), None, meter), warn)


def keep_both(folder: Path) -> Any:
    """Checkpoints of steps 1 and 2, made from weights that differ; returns the engine's weights at each."""
    engine = build(small_config())
    weights = {}
    for step in (1, 2):
        with torch.no_grad():
            engine.weights["head.norm.weight"].add_(1)
        weights[step] = {name: weight.clone() for name, weight in engine.named_weights()}
        checkpoints(folder).save(engine, step, "digest")
    return weights


def rewrite(path: Path, change: Any) -> None:
    path.write_bytes(change(bytearray(path.read_bytes())))


def flipped(data: bytearray, at: int) -> bytearray:
    data[at] ^= 1
    return data


def replaced_by_a_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


DAMAGE: dict[str, Any] = {
    "a device for a file": lambda p: replaced_by_a_device(p / RANK_FILE),
    "flipped bit in the data": lambda p: rewrite(p / RANK_FILE, lambda d: flipped(d, -1)),
    "flipped bit in the header": lambda p: rewrite(p / RANK_FILE, lambda d: flipped(d, 20)),
    "cut short": lambda p: rewrite(p / RANK_FILE, lambda d: d[:-1]),
    "grown": lambda p: rewrite(p / RANK_FILE, lambda d: d + b"\0"),
    "empty": lambda p: (p / RANK_FILE).write_bytes(b""),
    "no rank file": lambda p: (p / RANK_FILE).unlink(),
    "no manifest": lambda p: (p / "manifest.json").unlink(),
    "torn manifest": lambda p: rewrite(p / "manifest.json", lambda d: d[: len(d) // 2]),
    "a digit changed in the manifest": lambda p: rewrite(
        p / "manifest.json", lambda d: d.replace(b'"step": 2', b'"step": 9').replace(b'"step": 1', b'"step": 9')
    ),
    "another format": lambda p: (p / "manifest.json").write_text('{"format": 1}'),
    "no JSON object": lambda p: (p / "manifest.json").write_text("[1, 2]"),
    "unpublished": lambda p: p.rename(p.with_suffix(".tmp")),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_falls_back_to_the_newest_intact_one_and_says_so(folder: Path, how: str) -> None:
    weights = keep_both(folder)
    engine = build(small_config(train__seed=9))
    told: list[str] = []
    assert loaded(checkpoints(folder, told), engine) == 2
    assert told == []
    size = (folder / "step-000002" / RANK_FILE).stat().st_size
    DAMAGE[how](folder / "step-000002")
    assert loaded(checkpoints(folder, told), engine) == 1
    assert all(torch.equal(weight, weights[1][name]) for name, weight in engine.named_weights())
    if how == "unpublished":
        return  # a torn save is nobody's checkpoint
    assert len(told) == 1
    assert "step-000002: " in told[0]
    assert told[0].endswith("step-000001 is intact and used")
    assert how != "cut short" or f"{RANK_FILE} has {size - 1} bytes, {size} were written" in told[0]
    DAMAGE[how](folder / "step-000001")
    with pytest.raises(StoreError, match=r"is intact: step-000002: .*step-000001: .*rm -r \S+/ckpt begins at step 0$"):
        checkpoints(folder).load_newest(engine)


def loaded(held: Checkpoints, engine: Any) -> int:
    found = held.load_newest(engine)
    assert isinstance(found, Checkpoint)
    assert found.wrong == ()
    return found.step


def test_only_the_newest_are_kept_and_leftovers_go(folder: Path) -> None:
    engine = build(small_config())
    (folder / "step-000001.tmp").mkdir(parents=True)
    for step in (2, 3, 4):
        checkpoints(folder, ckpt__keep=2).save(engine, step, "")
    assert sorted(path.name for path in folder.iterdir()) == ["step-000003", "step-000004"]
    assert {path.suffix for path in folder.glob("*/*")} == {".json", ".safetensors"}, "nothing on the disk is a pickle"
    manifest = Manifest.read(folder / "step-000004")
    shape = {"strategy": "no_shard", "outer": "no_shard", "world_size": 1, "dp_outer": 1}
    assert manifest.values["layout"] == {"engine": "single", **shape, "main_params": "fp32"}
    assert manifest.files[RANK_FILE].bytes == (folder / "step-000004" / RANK_FILE).stat().st_size


FOREIGN = {
    "another model's": ({"model__ffn_dim": 40}, r"weights/blocks.0.\S+ is \[48, 32\], here \[40, 32\]"),
    "a deeper model's": ({"model__num_layers": 3}, r"missing weights/blocks.2\S+; .*and \d+ more"),
    "a shallower model's": ({"model__num_layers": 1}, r"unexpected weights/blocks.1"),
    "another optimizer's": (
        {"optimizer__name": OptimizerName.sgd},
        r"unexpected optimizer/\S+/exp_avg; .*or another optimizer",
    ),
    "another order's": ({"data__order_seed": 9}, r"data.order_seed was 1234, here it is 9"),
    "another batch size's": ({"train__global_batch_size": 4}, r"data.sequences_done was 16, here it is 8"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_another_s_checkpoint_is_refused_by_name(folder: Path, what: str) -> None:
    keep_both(folder)
    changes, message = FOREIGN[what]
    engine = build(small_config(**changes))
    before = {name: weight.clone() for name, weight in engine.named_weights()}
    with pytest.raises(ValueError, match=message) as caught:
        checkpoints(folder, **changes).load_newest(engine)
    assert "nothing was loaded" in str(caught.value)
    assert "ckpt.strict=false" in str(caught.value)
    assert all(torch.equal(weight, before[name]) for name, weight in engine.named_weights())


def test_relaxed_what_fits_is_taken_and_the_rest_is_named(folder: Path) -> None:
    weights = keep_both(folder)[2]
    changes = {"model__num_layers": 3, "ckpt__strict": False}
    engine = build(small_config(**changes))
    own = {name: weight.clone() for name, weight in engine.named_weights()}
    told: list[str] = []
    assert loaded(checkpoints(folder, told, **changes), engine) == 2
    for name, weight in engine.named_weights():
        assert torch.equal(weight, weights.get(name, own[name]))
    assert "names do not fit" in told[0]


def test_a_run_begins_from_another_s_checkpoint(folder: Path, tmp_path: Path) -> None:
    weights = keep_both(folder)
    for named, step in ((folder, 2), (folder.parent, 2), (folder / "step-000001", 1)):
        engine = build(small_config(train__seed=9))
        own = checkpoints(tmp_path / "own", ckpt__load=str(named))
        found = own.load_newest(engine)
        assert found is not None
        assert (found.step, found.begins_after) == (step, step)
        assert all(torch.equal(weight, weights[step][name]) for name, weight in engine.named_weights())
    own.save(engine, 3, "digest", begins_after=1)
    found = own.load_newest(engine)
    assert found is not None
    assert (found.step, found.begins_after) == (3, 1), "its own checkpoint comes before the one it began from"
    with pytest.raises(StoreError, match="holds no checkpoint"):
        checkpoints(tmp_path / "none", ckpt__load=str(tmp_path / "nowhere")).load_newest(engine)


def test_full_disk_keeps_the_older_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(small_config())
    checkpoints(folder).save(engine, 1, "")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensor_file, "write", full)
    with pytest.raises(RuntimeError, match=r"checkpoint: rank 0 cannot write .*No space left on device"):
        checkpoints(folder).save(engine, 2, "")
    monkeypatch.undo()
    assert loaded(checkpoints(folder), engine) == 1
    checkpoints(folder).save(engine, 2, "")
    assert loaded(checkpoints(folder), engine) == 2


def test_replacing_a_checkpoint_leaves_one_at_every_moment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = keep_both(folder)
    DAMAGE["flipped bit in the data"](folder / "step-000002")
    engine = build(small_config())
    held = checkpoints(folder)
    assert loaded(held, engine) == 1
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # killed before anything old was removed
    held.save(engine, 2, "digest")
    assert loaded(held, engine) == 2
    assert all(torch.equal(weight, weights[1][name]) for name, weight in engine.named_weights())


def test_a_damaged_newer_one_does_not_push_out_what_was_saved_after_it(folder: Path) -> None:
    """Step 2 is damaged; the run goes on from 1 under ckpt.keep=1 and is stopped before it comes to 2 again."""
    keep_both(folder)
    (folder / "step-000002").rename(folder / "step-000009")
    DAMAGE["flipped bit in the data"](folder / "step-000009")
    engine = build(small_config())
    held = checkpoints(folder, ckpt__keep=1)
    assert loaded(held, engine) == 1
    held.save(engine, 2, "digest")
    assert [path.name for path in folder.iterdir()] == ["step-000002"]
    assert loaded(held, engine) == 2


def test_a_checkpoint_beyond_the_end_of_the_run_is_refused(tmp_path: Path) -> None:
    checkpoints(tmp_path / "ckpt").save(build(small_config()), 60, "digest")
    with pytest.raises(ValueError, match=r"of step 60, and train\.steps=3 counts from the beginning"):
        checkpoints(tmp_path / "other", ckpt__load=str(tmp_path / "ckpt")).load_newest(build(small_config()))


def advice(folder: Path, own: Path, load: Path | None = None) -> str:
    """Last sentence of what is said where nothing could be loaded."""
    with pytest.raises(StoreError, match=r"is (intact|damaged)") as told:
        checkpoints(own, ckpt__load=load and str(load)).load_newest(build(small_config()))
    assert str(folder) in str(told.value)
    return str(told.value).rpartition(". ")[2]


def test_an_intact_one_beside_a_damaged_one_that_was_named_is_told(tmp_path: Path) -> None:
    """The same load of what it names instead works."""
    folder = tmp_path / "ckpt"
    keep_both(folder)
    DAMAGE["cut short"](folder / "step-000002")
    said = advice(folder, tmp_path / "own", folder / "step-000002")
    assert said == f"ckpt.load={folder / 'step-000001'} is intact"
    DAMAGE["cut short"](folder / "step-000001")
    said = advice(folder, tmp_path / "own", folder / "step-000002")
    assert said == f"No other in {folder} is intact; ckpt.load=null begins at step 0"
    assert advice(folder, tmp_path / "own", folder) == "ckpt.load=null begins at step 0"
    assert advice(folder, folder) == f"rm -r {folder} begins at step 0"
    assert advice(folder, folder, tmp_path / "x") == f"rm -r {folder} begins from ckpt.load={tmp_path / 'x'}"


test_a_damaged_one_that_is_named_instead_is_found = finds(
    "checkpoint files",
    test_an_intact_one_beside_a_damaged_one_that_was_named_is_told="""
        another damaged one is named: Damaged, too, is what is named instead
            checkpoint.folder.newest_intact: read_verified(path) => Manifest.read(path)
    """,
)


def test_the_lines_of_the_page_read_a_checkpoint(folder: Path) -> None:
    engine = build(small_config())
    checkpoints(folder).save(engine, 20, "")
    (lines,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    found: dict[str, Any] = {}
    exec(re.sub(r'Path\("runs.*?"\)', f"Path({str(folder / 'step-000020')!r})", lines), found)
    right = dict(engine.named_weights())
    assert found["weights"].keys() == right.keys()
    assert all(torch.equal(found["weights"][name], weight) for name, weight in right.items())
