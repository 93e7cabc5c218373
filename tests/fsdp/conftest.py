"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[Any]:
    """The default process group, in tests that start no ranks."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
