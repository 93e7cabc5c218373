"""kill -9 during saves: the newest checkpoint that was told saved is there, whole, or the next one is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.killing import kill_many


@pytest.mark.parametrize("kills", [4, pytest.param(24, marks=pytest.mark.full)])
def test_nothing_told_saved_is_lost(kills: int, tmp_path: Path) -> None:
    """Fifty kills are in docs/checkpoints.md."""
    seed = random.SystemRandom().randrange(1 << 30)
    found = kill_many(tmp_path, kills, seed)
    assert len(found) == kills
    assert all(each.holds for each in found), f"kill_many(..., {seed}): {[e for e in found if not e.holds]}"
    assert any(each.torn for each in found), "no kill hit a save before it was published"
