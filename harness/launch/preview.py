"""Preview of a request (launch.dry_run=true). Starts nothing, and writes only batch scripts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from harness.config.compose import Cell
from harness.config.rank_environment import run_environment
from harness.launch.local.ranks import rank_environment, worker_command
from harness.launch.opening import Sources, look
from harness.launch.plan import Decision
from harness.launch.slurm.batch import Batch
from harness.launch.slurm.scheduler import probe
from harness.launch.slurm.submission import is_remote, planned
from harness.store.files import write_atomic
from harness.store.rundir import Store


def preview(cells: Sequence[Cell]) -> str:
    """Cells with directories and decisions, then the environment, then the batch scripts.

    Scripts are also written to `Batch.dry_file`. Raises `OSError`: a script cannot be written.
    """
    store = Store(cells[0].config["launch"]["root"])
    sources, jobs = Sources.gather(), probe()
    local = [cell for cell in cells if not is_remote(cell)]
    remote = [cell for cell in cells if is_remote(cell)]
    decisions = {cell.signature: look(store, cell, sources, jobs) for cell in local}

    def keep(cell: Cell, decision: Decision) -> None:
        decisions[cell.signature] = decision

    batches = planned(store, remote, sources, jobs, keep) if remote else []
    decisions |= {cell.signature: decision for batch in batches for cell, decision in batch.wanted}
    written = "nothing is written but batch scripts" if batches else "nothing is written"
    parts = [f"{len(cells)} cell{'s' * (len(cells) > 1)}; dry run: {written}, nothing is started"]
    for cell in cells:
        decision = decisions[cell.signature]
        parts.append(f"\n{store.path_of(cell)}\n    {decision.action.value}: {decision.why}")
        parts.extend(f"    {override}" for override in cell.overrides)
    if local:
        parts.append(_local(store, local[0]))
    parts.extend(_script(store, batch) for batch in batches)
    return "\n".join(parts)


def _local(store: Store, cell: Cell) -> str:
    config = cell.typed
    variables = rank_environment(config, 0, start="TOKEN")
    command = shlex.join(worker_command(store.path_of(cell), 0))
    return (
        f"\nrank 0 of {config.mesh.world_size} on this machine (the others differ in RANK and LOCAL_RANK):\n"
        f"{_assignments(variables)}\n    {command}"
    )


def _script(store: Store, batch: Batch) -> str:
    count, text = len(batch.wanted), batch.script()
    store.claim()
    batch.dry_file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(batch.dry_file, text)
    variables = _assignments(run_environment(batch.wanted[0][0].typed))
    title = f"sbatch script of {count} cell{'s' * (count > 1)} ({batch.dry_file}):"
    return f"\n{title}\n\n{text}\nin each rank:\n{variables}"


def _assignments(variables: dict[str, str]) -> str:
    return "\n".join(f"    {name}={shlex.quote(value)}" for name, value in sorted(variables.items()))
