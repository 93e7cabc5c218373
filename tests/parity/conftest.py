"""Runs of the corpus, made once a session."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.parity import Verdict, compare
from tests.parity.arms import Arm
from tests.parity.corpus import Case
from tests.parity.lab import CLEAN, write


class Bench:
    """Writes each arm once and judges pairs of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs: dict[str, Path] = {}

    def run(self, arm: Arm) -> Path:
        """The directory of an arm."""
        key = repr(arm)  # hooks of a fault are told apart by their address
        if key not in self.runs:
            self.runs[key] = write(self.root / str(len(self.runs)), arm)
        return self.runs[key]

    def paths(self, case: Case) -> tuple[Path, Path]:
        """Arm and control of a case."""
        return self.run(case.arm), self.run(case.control)

    def copy(self, arm: Arm, folder: Path) -> Path:
        """An arm's directory once more under a folder, to be changed."""
        path: Path = shutil.copytree(self.run(arm), folder / "lab" / "run")
        return path

    def held(self, arm: Arm | Path, control: Arm | Path) -> Verdict:
        """The verdict on two arms, or directories."""
        return compare(*(each if isinstance(each, Path) else self.run(each) for each in (arm, control)), sources=CLEAN)

    def judge(self, case: Case) -> Verdict:
        """The verdict on a case."""
        return self.held(case.arm, case.control)


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """All runs of the session."""
    return Bench(tmp_path_factory.mktemp("runs"))
