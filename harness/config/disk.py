"""Disk space of runs and of the disk, estimated from the configuration before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path

from harness.config.captured import captured
from harness.config.derived import state_bytes
from harness.config.schema import CkptPolicy, Config

LOGS_BYTES = 1 << 20
"""About the logs of a short run."""


def written(cfg: Config) -> int:
    """Bytes a run needs at once at least: captures, kept checkpoints and the one being written, and logs."""
    checkpoints = (cfg.ckpt.keep + 1) * state_bytes(cfg) if cfg.ckpt.policy is not CkptPolicy.none else 0
    return captured(cfg).num_bytes + checkpoints + LOGS_BYTES


def nearest(path: Path) -> Path:
    """Nearest existing folder. Raises `OSError`: a name is too long."""
    return next((each for each in (path, *path.parents) if each.exists()), Path("/"))


def free_bytes(path: Path) -> int:
    """Free bytes where `path` lies, or will lie; too high under quotas and thin volumes. Raises `OSError`."""
    return shutil.disk_usage(nearest(path)).free
