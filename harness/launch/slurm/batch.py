"""A job array before submission: its cells, their common resources, its name, and exact script.

It follows from the cells, their attempts and the code, so that `launch.dry_run=true` shows the same script.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.compose import Cell
from harness.config.derived import cpus_per_rank
from harness.config.schema import Device, SharpAxis
from harness.launch.plan import Decision
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
    def folder(self) -> Path:
        return self.root / self.study / SUBMISSIONS / self.token

    @property
    def dry_file(self) -> Path:
        return self.root / self.study / DRY_RUN / f"{self.token}.sh"

    @property
    def parameters(self) -> dict[str, Any]:
        several = {"map_count": len(self.wanted)} if len(self.wanted) > 1 else {}
        return Shape(self.wanted[0][0]).parameters(f"{self.study}-{self.token}", self.code) | several

    def script(self) -> str:
        """The command of each rank has `-P`, which excludes the working directory's `harness`."""
        from submitit.slurm.slurm import _make_sbatch_string

        python = Shape(self.wanted[0][0]).python or shlex.quote(sys.executable)
        command = f"{python} -P -u -m harness.launch.slurm.task {shlex.quote(str(self.folder))}"
        text: str = _make_sbatch_string(command=command, folder=self.folder, **self.parameters)
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


UNLIMITED = 1_000_000


class Shape:
    """Resources of a cell, from plain values, because typing a thousand cells takes a minute."""

    def __init__(self, cell: Cell) -> None:
        cluster: dict[str, Any] = cell.config["cluster"]
        self.nodes: int = cluster["nodes"]
        self.ranks_per_node: int = cell.config["mesh"]["world_size"] // self.nodes
        self.cpus_per_rank = cpus_per_rank(cluster)
        self.python: str | None = cluster["python"]
        self._root: str = cell.config["launch"]["root"]
        self._network = _network(cell)
        self._cluster = cluster

    @property
    def key(self) -> str:
        """Equal for cells that fit into one array."""
        return json.dumps([self._cluster, self.ranks_per_node, self._network, self._root], sort_keys=True)

    def parameters(self, name: str, code: Path) -> dict[str, Any]:
        """Parameters of submitit for SLURM. Args: code: folder whose `harness` the job runs."""
        asked = self._cluster
        flags = dict.fromkeys((flag.replace("_", "-") for flag in asked["flags"]), True)
        further = {key.replace("_", "-"): value for key, value in sorted(asked["additional"].items())}
        memory = asked["mem_gb"]
        return {
            "job_name": name,
            "nodes": self.nodes,
            "ntasks_per_node": self.ranks_per_node,
            "cpus_per_task": self.cpus_per_rank,
            "gpus_per_node": asked["gpus_per_node"] or None,
            "mem": None if memory is None else f"{math.ceil(memory * 1024)}M" if memory else "0",
            **{name: asked[name] for name in ("partition", "account", "qos")},
            "time": asked["time_min"],
            "signal_delay_s": asked["grace_s"],
            "setup": [*asked["setup"], f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}"],
            # bash ends with its last command's exit code, and that must be the ranks'
            "teardown": ["ranks=$?", *asked["teardown"], "exit $ranks"] if asked["teardown"] else None,
            "wckey": None,  # submitit's own key is refused where keys are enforced
            "array_parallelism": asked["array_parallelism"] or UNLIMITED,
            "stderr_to_stdout": True,
            "additional_parameters": {
                "requeue": True,
                **({"network": self._network} if self._network else {}),
                **further,
                **flags,
            },
            "srun_args": self.srun_words(),
        }

    def srun_words(self) -> list[str]:
        # srun takes no cpus-per-task from sbatch since 22.05; a rank that dies must take the step down; and where the
        # job began with no variables (SBATCH_EXPORT=NONE) its ranks would lack PYTHONPATH, and run other code
        own = ["--kill-on-bad-exit=1", f"--cpus-per-task={self.cpus_per_rank}", "--export=ALL"]
        return [*own, *self._cluster["srun_args"]]


def _network(cell: Cell) -> str | None:
    sharp, cluster = cell.config["sharp"], cell.config["cluster"]
    wanted = SharpAxis[sharp["group"]].is_asked and sharp["infiniband"]
    return cluster["sharp_network"] if wanted and cluster["device"] == Device.cuda.name else None


def alike(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells of one shape together, in the order of each shape's first."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(Shape(cell).key, []).append(cell)
    return list(groups.values())
