"""Cells that fit on a disk one by one, and not together; on a disk that really is that small."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.config.catalog import ROOT
from harness.config.disk import kept
from harness.config.errors import BadRequest
from harness.config.schema import CkptPolicy
from harness.launch.control import retry
from harness.launch.room import check_room, held, kept_by
from harness.store import status
from harness.store.rundir import Store
from harness.store.status import State, Status
from tests.launch.cells import make_cell
from tests.support.disk import small_disk
from tests.support.factory import freeze, small_config, train
from tests.support.programs import run_program

MIB = 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Twenty MiB: room for one run of the tiny model, which keeps 12, not for two."""
    with small_disk(tmp_path, 20) as found:
        yield found


def test_a_set_that_will_not_fit_is_refused_before_anything_is_written(disk: Path) -> None:
    words = ["run.py", "-m", "sharding=no_shard,optim", f"launch.root={disk}/runs"]
    refused = run_program(words, cwd=ROOT)
    assert refused.returncode == 2
    told = refused.stderr
    assert (
        f"launch.root={disk}/runs: has 20 MiB free, and what would start (2 of 2 cells) keeps at least 23.2 MiB" in told
    )
    assert "checkpoints 4.98 MiB, captures 18.3 MiB" in told
    assert "fix:   launch.root=A_FOLDER_WITH_ROOM, ckpt=none" in told
    assert list(disk.iterdir()) == []
    assert "2 runs keep at least 23.2 MiB" in run_program([*words, "launch.dry_run=true"], cwd=ROOT).stdout


def test_what_is_done_or_there_already_needs_no_room(disk: Path) -> None:
    """Two of three are done and the third has half of its own; with another there is too little again."""
    wide = "model.dim=96"
    cells = [make_cell(disk, wide, f"train.seed={seed}") for seed in range(4)]
    each = kept_by(cells[:1]).total
    assert 20 * MIB < 3 * each < 30 * MIB
    store, (first, second, third, fourth) = Store(disk), cells
    with pytest.raises(BadRequest, match="3 of 3 cells"):
        check_room(cells[:3])
    for cell in (first, second):
        status.write(store.create(cell).path, Status(State.done, "all steps", 0))
    check_room(cells[:3])
    begun = store.create(third)
    status.write(begun.path, Status(State.failed, "no luck", 0))
    (begun.path / "ckpt").mkdir()
    (begun.path / "ckpt" / "weights").write_bytes(bytes(each // 2))
    assert abs(held(begun.path) - each // 2) < 20_000
    (disk / "others").write_bytes(bytes(20 * MIB - each // 2 - 3 * each // 4))
    check_room(cells[:3])
    with pytest.raises(BadRequest, match=r"2 of 4 cells.* of which 3\.54 MiB are there"):
        check_room([*cells[:3], fourth])
    (disk / "more").write_bytes(bytes(each // 2))
    with pytest.raises(BadRequest, match="1 of 1 cells"):
        retry(store, str(begun.path))


def test_what_is_kept_is_what_lies_there(tmp_path: Path) -> None:
    """A run that saves four times and keeps two, against what is said of it before it starts."""
    config = small_config(train__steps=4, ckpt__policy=CkptPolicy.last, ckpt__every=1, ckpt__keep=2, model__dim=64)
    freeze(config, tmp_path)
    assert train(config, tmp_path).status == "done"
    said = kept(config)
    assert 1.0 <= held(tmp_path / "ckpt") / said.checkpoints < 1.1
    assert 1.0 <= held(tmp_path / "capture") / said.captures < 1.1
