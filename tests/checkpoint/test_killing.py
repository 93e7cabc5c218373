"""kill -9 during saves: the newest checkpoint that was told saved is there, whole, or the next one is."""

from __future__ import annotations

import random
from pathlib import Path

from tests.support.killing import kill_many

KILLS = 12
"""Fifty are in docs/checkpoints.md."""


def test_nothing_told_saved_is_lost(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    found = kill_many(tmp_path, KILLS, seed)
    assert len(found) == KILLS
    assert all(each.holds for each in found), f"kill_many(..., {seed}): {[e for e in found if not e.holds]}"
    assert any(each.torn for each in found), "no kill hit a save before it was published"
