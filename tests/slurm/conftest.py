"""One real SLURM for all tests here; skipped only where its daemons are not installed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import NEEDED, Cluster, running
from tests.support.needs import skip_without


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    skip_without(*NEEDED)
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: a socket's path has 108 characters
    try:
        with running(folder) as made:
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def meant(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test, and what it starts, mean the cluster; tests of other folders, which it outlives, mean none."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
