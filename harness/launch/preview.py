"""What a request would do, in words: launch.dry_run=true. Writes nothing, starts nothing."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from harness.config.compose import Cell
from harness.launch.environment import rank_environment, run_environment
from harness.launch.local.ranks import worker_command
from harness.launch.opening import Sources, look
from harness.launch.slurm.scheduler import probe
from harness.launch.slurm.submission import SUBMISSIONS, is_remote, script, shapes
from harness.store.rundir import Store


def preview(cells: Sequence[Cell]) -> str:
    """Every cell with its directory and what would become of it, then the environment, then the batch scripts."""
    store = Store(cells[0].config["launch"]["root"])
    sources, jobs = Sources.gather(), probe()
    parts = [f"{len(cells)} cell{'s' * (len(cells) > 1)}; dry run: nothing is written, nothing is started"]
    for cell in cells:
        decision = look(store, cell, sources, jobs)
        parts.append(f"\n{store.path_of(cell)}\n    {decision.action.value}: {decision.why}")
        parts.extend(f"    {override}" for override in cell.overrides)
    local = [cell for cell in cells if not is_remote(cell)]
    if local:
        parts.append(_local(store, local[0]))
    parts.extend(_scripts(store, [cell for cell in cells if is_remote(cell)]))
    return "\n".join(parts)


def _local(store: Store, cell: Cell) -> str:
    config = cell.typed
    variables = rank_environment(config, 0, start="TOKEN")
    command = shlex.join(worker_command(store.path_of(cell), 0))
    return (
        f"\nrank 0 of {config.mesh.world_size} on this machine (the others differ in RANK and LOCAL_RANK):\n"
        f"{_assignments(variables)}\n    {command}"
    )


def _scripts(store: Store, cells: Sequence[Cell]) -> list[str]:
    parts = []
    for shape, group in shapes(cells).items():
        study = group[0].study
        folder = store.root / study / SUBMISSIONS / "TOKEN"
        text = script(folder, shape, f"{study}-TOKEN", len(group))
        variables = _assignments(run_environment(group[0].typed))
        parts.append(
            f"\nsbatch script of {len(group)} cell{'s' * (len(group) > 1)}:\n\n{text}\nin each rank:\n{variables}"
        )
    return parts


def _assignments(variables: dict[str, str]) -> str:
    return "\n".join(f"    {name}={shlex.quote(value)}" for name, value in sorted(variables.items()))
