"""Shape of an array: resources common to its cells, as parameters of sbatch and srun."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.compose import Cell
from harness.config.derived import cpus_per_rank
from harness.config.schema import Device, SharpAxis

SAME = (
    *("nodes", "gpus_per_node", "gres", "mem_gb", "partition", "account", "qos", "time_min", "grace_s"),
    *("array_parallelism", "python", "container_image"),
)
LISTS = ("setup", "teardown", "flags", "srun_args", "container_mounts")

UNLIMITED = 1_000_000


@dataclass(frozen=True)
class Shape:
    root: str
    nodes: int
    ranks_per_node: int
    cpus_per_rank: int
    gpus_per_node: int
    gres: str | None
    mem_gb: float | None
    partition: str | None
    account: str | None
    qos: str | None
    time_min: int
    grace_s: int
    array_parallelism: int | None
    python: str | None
    container_image: str | None
    network: str | None
    setup: tuple[str, ...]
    teardown: tuple[str, ...]
    flags: tuple[str, ...]
    srun_args: tuple[str, ...]
    container_mounts: tuple[str, ...]
    additional: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, cell: Cell) -> Shape:
        """Reads plain values, because typing a thousand cells takes a minute."""
        cluster: dict[str, Any] = cell.config["cluster"]
        lists: dict[str, Any] = {name: tuple(cluster[name]) for name in LISTS}
        return cls(
            root=cell.config["launch"]["root"],
            ranks_per_node=cell.config["mesh"]["world_size"] // cluster["nodes"],
            cpus_per_rank=cpus_per_rank(cluster),
            network=_network(cell),
            additional=tuple(sorted(cluster["additional"].items())),
            **{name: cluster[name] for name in SAME},
            **lists,
        )

    def parameters(self, name: str, code: Path) -> dict[str, Any]:
        """Parameters of submitit for SLURM. Args: code: folder whose `harness` the job runs."""
        flags = dict.fromkeys((flag.replace("_", "-") for flag in self.flags), True)
        further = {key.replace("_", "-"): value for key, value in self.additional}
        return {
            "job_name": name,
            "nodes": self.nodes,
            "ntasks_per_node": self.ranks_per_node,
            "cpus_per_task": self.cpus_per_rank,
            "gpus_per_node": self.gpus_per_node or None,
            "gres": self.gres,
            "mem": None if self.mem_gb is None else f"{math.ceil(self.mem_gb * 1024)}M" if self.mem_gb else "0",
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "time": self.time_min,
            "signal_delay_s": self.grace_s,
            "setup": [*self.setup, f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}"],
            # bash ends with its last command's exit code, and that must be the ranks'
            "teardown": ["ranks=$?", *self.teardown, *self._requeue(), "exit $ranks"] if self._has_end() else None,
            "wckey": None,  # submitit's own key is refused where keys are enforced
            "array_parallelism": self.array_parallelism or UNLIMITED,
            "stderr_to_stdout": True,
            "additional_parameters": {
                "requeue": True,
                **({"network": self.network} if self.network else {}),
                **further,
                **flags,
            },
            "srun_args": self.srun_words(),
        }

    def srun_words(self) -> list[str]:
        # srun takes no cpus-per-task from sbatch since 22.05; a rank that dies must take the step down; and where the
        # job began with no variables (SBATCH_EXPORT=NONE) its ranks would lack PYTHONPATH, and run other code
        own = ["--kill-on-bad-exit=1", f"--cpus-per-task={self.cpus_per_rank}", "--export=ALL"]
        return [*own, *self._container(), *self.srun_args]

    def _has_end(self) -> bool:
        return bool(self.teardown) or self.container_image is not None

    def _requeue(self) -> list[str]:
        back = '[ $ranks -ne 75 ] || scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}'
        return [] if self.container_image is None else [f'{back}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}"']

    def _container(self) -> list[str]:
        if self.container_image is None:
            return []
        mounts = ",".join([f"{self.root}:{self.root}", *self.container_mounts])
        image = f"--container-image={self.container_image}"
        return [image, f"--container-mounts={mounts}", "--container-env=PYTHONPATH"]


def _network(cell: Cell) -> str | None:
    sharp, cluster = cell.config["sharp"], cell.config["cluster"]
    wanted = SharpAxis[sharp["group"]].is_asked and sharp["infiniband"]
    return cluster["sharp_network"] if wanted and cluster["device"] == Device.cuda.name else None


def shapes(cells: Sequence[Cell]) -> dict[Shape, list[Cell]]:
    groups: dict[Shape, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(Shape.of(cell), []).append(cell)
    return groups
