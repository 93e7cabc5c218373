"""Timed cells inside an allocation: what srun is told, and what is refused. tests/slurm runs them for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config.errors import BadRequest
from harness.launch.slurm.submission import in_allocation, step_command
from harness.launch.slurm.task import read_task, write_tasks
from harness.study.request import _carried_out_as_one
from tests.launch.cells import make_cell

JOB = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"}


def test_a_batch_script_and_salloc_are_in_an_allocation_and_a_rank_is_not() -> None:
    assert in_allocation(JOB)
    assert not in_allocation(JOB | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"})
    assert not in_allocation({})


def test_a_step_spans_the_nodes_that_its_cell_asks_for(tmp_path: Path) -> None:
    asked = ("mesh.world_size=8", "cluster.nodes=2", "cluster.cpus_per_rank=3", "cluster.srun_args=[--mpi=none]")
    cell = make_cell(tmp_path, "cluster.backend=slurm", "cluster.python=python3 -X dev", *asked)
    command = step_command(cell, "FOLDER")
    assert command[:4] == ["srun", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4"]
    assert {"--kill-on-bad-exit=1", "--cpus-per-task=3", "--mpi=none"} <= set(command)
    assert command[-8:] == ["python3", "-X", "dev", "-P", "-u", "-m", "harness.launch.slurm.task", "FOLDER"]


def test_a_step_reads_its_one_run_wherever_the_allocation_stands_in_an_array(tmp_path: Path) -> None:
    write_tasks(tmp_path, [(tmp_path / "run", 3)])
    assert read_task(tmp_path, {"SLURM_ARRAY_TASK_ID": "5"}) == (tmp_path / "run", 3)


def test_a_timed_study_on_slurm_is_asked_for_from_inside_its_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = ("cluster.backend=slurm", "measure.mode=bench")
    cells = [make_cell(tmp_path, *timed, f"train.replicate={number}") for number in (0, 1)]
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(BadRequest, match="salloc --nodes=N"):
        _carried_out_as_one(cells)
    _carried_out_as_one(cells[:1])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    _carried_out_as_one(cells)
