"""One real SLURM for all tests here; skipped only where its daemons are not installed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing, running


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if missing():
        pytest.skip(f"not installed: {', '.join(missing())} (apt packages: .ci/apt.txt)")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: a socket's path has 108 characters
    try:
        with running(folder) as made, named(made):
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def named(cluster: Cluster) -> Iterator[None]:
    """Let this process, and those that it starts, mean a cluster."""
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = cluster.environment["SLURM_CONF"]
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("SLURM_CONF", None)
        else:
            os.environ["SLURM_CONF"] = before
