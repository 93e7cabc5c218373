"""Which worker of `pytest -n` runs what and when: files stay whole, the slowest begin, and some tests are alone."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

SLOWEST = (
    "tests/test_fresh_clone.py",
    "tests/cli/test_damaged_runs.py",  # of `make test-all`, where one worker has it for a quarter of an hour
    "tests/parity",
    "tests/slurm",
    "tests/engines",
    "tests/study",
    "tests/launch",
    "tests/checkpoint",
    "tests/fsdp",
    "tests/train",
    "tests/models",
    "tests/own",
    "tests/cli",
)
"""Begun first, in this order, so that no worker is left with a long file when the others have ended."""
SLOW = (
    "tests/analysis/test_notebook.py",
    "tests/architecture/test_places.py",
    "tests/architecture/test_places_metrics.py",
    "tests/bench/test_report.py",
    "tests/capture/test_doors.py",
    "tests/capture/test_flat.py",
    "tests/capture/test_ours.py",
    "tests/checkpoint/test_killing.py",
    "tests/checkpoint/test_matrix.py",
    "tests/cli/test_hydra_plugins.py",
    "tests/cli/test_nonsense.py",
    "tests/cli/test_printed_commands.py",
    "tests/config/test_fixes.py",
    "tests/faults/test_bites.py",
    "tests/fsdp/local_step/test_programs.py",
    "tests/fsdp/fp8/test_sharded.py",
    "tests/fsdp/tensor_parallel/test_edges.py",
    "tests/fsdp/tensor_parallel/test_training.py",
    "tests/fsdp/test_composition.py",
    "tests/fsdp/test_ended_ranks.py",
    "tests/fsdp/test_process_state.py",
    "tests/fsdp/test_uneven.py",
    "tests/fsdp/test_watchdog.py",
    "tests/launch/test_ends.py",
    "tests/launch/test_kills.py",
    "tests/models/test_eight_bits.py",
    "tests/models/test_tensor_parallel.py",
    "tests/own",
    "tests/parity/test_script.py",
    "tests/slurm",
    "tests/streams/test_races.py",
    "tests/study/test_late.py",
    "tests/study/test_power.py",
    "tests/support/test_limits.py",
    "tests/train/test_muon.py",
    "tests/train/test_resume.py",
    "tests/train/test_step_checks.py",
)
"""What gets the mark `slow`: `make test-slow` runs it, and `make test` does not. Each is a file whose promise shorter
tests of its folder hold in part: long waits, killed processes, real schedulers, whole studies, products."""
TOGETHER = ("tests/parity", "tests/slurm")
"""Folders whose tests share fixtures of the session: one worker runs them all, so that these are made once."""


def unit_of(nodeid: str) -> str:
    """What a test is run together with: its file, whose tests share caches and fixtures, or its folder."""
    path = nodeid.split("::", 1)[0]
    return next((folder for folder in TOGETHER if path.startswith(f"{folder}/")), path)


def is_slow(nodeid: str) -> bool:
    """In a file or folder of SLOW."""
    path = nodeid.split("::", 1)[0]
    return any(path == name or path.startswith(f"{name}/") for name in SLOW)


def place_of(nodeid: str) -> int:
    """When a test is begun, by how long its file or folder is known to take."""
    return next((place for place, name in enumerate(SLOWEST) if nodeid.startswith(name)), len(SLOWEST))


class WholeUnits(LoadScopeScheduling):
    """Hands a worker one unit after the other, in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        """The test that ended its worker has failed, and is not given to the next one, which it would end too."""
        units = self.assigned_work[node].values()
        pending = ((unit, nodeid) for unit in units for nodeid, completed in unit.items() if not completed)
        unit, ended_by = next(pending, (None, None))
        if unit is None:
            return super().remove_node(node)
        unit[ended_by] = True
        super().remove_node(node)
        return ended_by


@contextmanager
def admitted(folder: Path, alone: bool) -> Iterator[None]:
    """Run the body beside those of other processes, unless one of them is to be alone.

    Whoever is to be alone keeps the door while the others leave, so that those who come do not keep it waiting.
    """
    how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    with _locked(folder / "door", fcntl.LOCK_EX) as door, _locked(folder / "room", how):
        if not alone:
            fcntl.flock(door, fcntl.LOCK_UN)
        yield


@contextmanager
def _locked(path: Path, how: int) -> Iterator[int]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, how)
        yield descriptor
    finally:
        fcntl.flock(
            descriptor, fcntl.LOCK_UN
        )  # closing is not enough: a process forked meanwhile has the file open too
        os.close(descriptor)
