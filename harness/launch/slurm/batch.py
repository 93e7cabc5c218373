"""A job array before submission: its cells, name, and exact script.

It follows from the cells, their attempts and the code, so that `launch.dry_run=true` shows the same script.
"""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.compose import Cell
from harness.launch.plan import Decision
from harness.launch.slurm.shape import Shape, alike
from harness.store.rundir import DRY_RUN, RunDir, Store
from harness.store.status import SUBMISSIONS

Wanted = Sequence[tuple[Cell, Decision]]


@dataclass(frozen=True)
class Batch:
    study: str
    wanted: tuple[tuple[Cell, Decision], ...]
    token: str
    """Unique token of a submission: hash of the root, the cells and their attempts."""
    root: Path
    code: Path

    @property
    def shape(self) -> Shape:
        return Shape(self.wanted[0][0])

    @property
    def name(self) -> str:
        return f"{self.study}-{self.token}"

    @property
    def folder(self) -> Path:
        return self.root / self.study / SUBMISSIONS / self.token

    @property
    def dry_file(self) -> Path:
        return self.root / self.study / DRY_RUN / f"{self.token}.sh"

    @property
    def command(self) -> str:
        """Command of each rank; `-P` excludes the working directory's `harness`."""
        python = self.shape.python or shlex.quote(sys.executable)
        return f"{python} -P -u -m harness.launch.slurm.task {shlex.quote(str(self.folder))}"

    @property
    def parameters(self) -> dict[str, Any]:
        several = {"map_count": len(self.wanted)} if len(self.wanted) > 1 else {}
        return self.shape.parameters(self.name, self.code) | several

    def script(self) -> str:
        from submitit.slurm.slurm import _make_sbatch_string

        text: str = _make_sbatch_string(command=self.command, folder=self.folder, **self.parameters)
        return text


def batches(store: Store, wanted: Wanted, *, code: Path, limit: int) -> Iterator[Batch]:
    """One array for each study and shape, or several beyond `limit` cells.

    Args: wanted: cells in order of start. code: folder whose `harness` the jobs run.
    """
    for study in dict.fromkeys(cell.study for cell, _ in wanted):
        decisions = {cell.signature: decision for cell, decision in wanted}
        for cells in alike([cell for cell, _ in wanted if cell.study == study]):
            for start in range(0, len(cells), limit):
                chunk = cells[start : start + limit]
                pairs = tuple((cell, decisions[cell.signature]) for cell in chunk)
                yield Batch(study, pairs, _token(store, chunk), store.root, code)


def _token(store: Store, cells: Sequence[Cell]) -> str:
    attempts: Mapping[str, int] = {cell.signature: RunDir(store.path_of(cell)).next_attempt() for cell in cells}
    text = "\n".join([str(store.root), *(f"{signature} {number}" for signature, number in attempts.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:8]
