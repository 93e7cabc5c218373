"""A disk that really is full: the run ends with one message, and the older checkpoint is what the next one takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.checkpoint import folder as folders
from tests.support.disk import small_disk
from tests.support.layouts import Layout, build, checkpoints_of
from tests.support.spawn import run_ranks

LAYOUT = Layout("native", "optim_grads", 2, dtype="fp32")
WIDTH = 8_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Six MiB: room for one checkpoint of some four, not for a second."""
    with small_disk(tmp_path, 6) as found:
        yield found


def save_two(rank: int, root: Path) -> tuple[str, int, list[str]]:
    """What the second save says, which step is loaded afterwards, and what lies there."""
    config = LAYOUT.config()
    config.model.ffn_dim = WIDTH
    engine = build(config, rank)
    checkpoints = checkpoints_of(root / "ckpt", config, rank)
    checkpoints.save(engine, 1, "")
    try:
        checkpoints.save(engine, 2, "")
        told = ""
    except RuntimeError as error:
        told = str(error)
    found = checkpoints.load_newest(engine)
    engine.close()
    return told, 0 if found is None else found.step, [path.name for path in root.glob("ckpt/step-*[0-9]")]


def test_every_rank_says_so_and_the_older_one_is_whole(disk: Path) -> None:
    for told, step, names in run_ranks(save_two, 2, disk):
        assert told.startswith("checkpoint: rank ")
        assert "No space left on device" in told
        assert step == 1
        assert names == ["step-000001"]
    assert folders.read_verified(disk / "ckpt" / "step-000001").values["step"] == 1
