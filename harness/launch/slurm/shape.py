"""Shape of an array: resources common to its cells, as parameters of sbatch and srun."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.config.compose import Cell
from harness.config.derived import cpus_per_rank
from harness.config.schema import Device, SharpAxis

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
            **{name: asked[name] for name in ("gres", "partition", "account", "qos")},
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
