"""A disk of a few MiB, to be filled: a tmpfs, where this user may mount one; elsewhere its tests are skipped."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """Mount a disk of `mib` MiB over a folder that is there; what still has a file of it open does not keep it."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
