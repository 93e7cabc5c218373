"""What NCCL is told, as a table: a configuration and the variables that follow from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.config.derived import HEAP, network_environment, run_environment
from harness.launch.local.ranks import rank_environment
from harness.store.rundir import Store
from tests.launch.cells import make_cell

CUDA = "cluster.device=cuda"
OFF = {"NCCL_NVLS_ENABLE": "0", "NCCL_COLLNET_ENABLE": "0"}
NVLINK = OFF | {"NCCL_NVLS_ENABLE": "2"}
HOOK = {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "0"}
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
SAT = {"SHARP_COLL_ENABLE_SAT": "1", "SHARP_COLL_LOG_LEVEL": "3"}


def typed(root: Path, *overrides: str) -> Any:
    """A configuration whose machine is not asked for devices: a cell for SLURM."""
    return make_cell(root, "cluster.backend=slurm", "cluster.gpus_per_node=2", *overrides).typed


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("", {}),
        ("sharp.group=none", OFF),
        ("numerics.mode=deterministic", OFF),
        ("nccl_ub.mode=auto", HOOK),
        ("nccl_ub.mode=auto sharp.group=none", OFF | HOOK),
        ("cluster.ranks_per_device=2", SHARED),
        ("cluster.ranks_per_device=2 sharp.group=none", OFF | SHARED),
        ("sharp.group=dp", NVLINK | SAT),
        ("sharp.group=dp sharp.infiniband=false", NVLINK),
        ("sharp.group=dp sharp.nvlink=false sharp.streaming=false", OFF | SAT | {"SHARP_COLL_ENABLE_SAT": "0"}),
        ("sharp.group=dp launch.nccl_log=none", NVLINK | {"SHARP_COLL_ENABLE_SAT": "1"}),
    ],
)
def test_what_a_configuration_tells_nccl(overrides: str, expected: dict[str, str], tmp_path: Path) -> None:
    assert network_environment(typed(tmp_path, CUDA, *overrides.split())) == expected


def test_gloo_is_told_nothing(tmp_path: Path) -> None:
    config = typed(tmp_path, "sharp.group=dp", "nccl_ub.mode=auto")
    assert network_environment(config, tmp_path) == {}
    assert set(run_environment(config, tmp_path)) == {
        "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", *HEAP,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("wish", "kinds"),
    [("setup", "INIT,ENV,NET,GRAPH,NVLS,REG"), ("choices", "INIT,ENV,NET,GRAPH,NVLS,REG,TUNING")],
)
def test_the_log_lies_in_the_attempts_folder_and_percent_signs_survive(wish: str, kinds: str, tmp_path: Path) -> None:
    folder = tmp_path / "50%h"
    variables = network_environment(typed(tmp_path, CUDA, f"launch.nccl_log={wish}"), folder)
    assert variables["NCCL_DEBUG"] == "INFO"
    assert variables["NCCL_DEBUG_SUBSYS"] == kinds
    assert variables["NCCL_DEBUG_FILE"] == f"{tmp_path}/50%%h/nccl.%h.%p.log"


def test_a_rank_gets_all_of_it_whatever_this_process_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = typed(tmp_path, CUDA, "sharp.group=dp")
    wanted = network_environment(config, tmp_path)
    monkeypatch.setenv("NCCL_COLLNET_ENABLE", "1")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    variables = rank_environment(config, 1, start="t", attempt=tmp_path)
    assert wanted.items() <= variables.items()
    assert variables["RANK"] == "1"
    assert not variables.keys() & {"NCCL_ALGO", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}, "a rank finds its own"
    named = rank_environment(typed(tmp_path, CUDA, "cluster.interface=ib0", "launch.nccl_log=none"), 0, start="t")
    assert named["NCCL_SOCKET_IFNAME"] == named["GLOO_SOCKET_IFNAME"] == "ib0"
    assert not any(name.startswith("NCCL_DEBUG") for name in named), "without a log the user's own settings stand"


STEP = {"JOB_ID": "7", "STEP_ID": "0", "PROCID": "0", "STEP_NUM_TASKS": "1", "LOCALID": "0"}
LOOK = """
import os, sys
from pathlib import Path

class Torch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("CUBLAS_WORKSPACE_CONFIG"), os.environ.get("NCCL_NVLS_ENABLE"))
            sys.stdout.flush()
            os._exit(0)

sys.meta_path.insert(0, Torch())
from harness.worker import main
main(Path(sys.argv[1]), 0)
"""


@pytest.mark.parametrize(
    "place",
    [
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        {f"SLURM_{name}": value for name, value in STEP.items()},
    ],
    ids=["torchrun", "srun"],
)  # fmt: skip
def test_whoever_started_a_rank_its_environment_is_set_before_torch_is_loaded(
    place: dict[str, str], tmp_path: Path
) -> None:
    """A process that is a rank, up to the moment at which it looks for torch."""
    store = Store(tmp_path)
    cell = make_cell(tmp_path, CUDA, "cluster.backend=slurm", "numerics.mode=deterministic", "mesh.world_size=1")
    run = store.create(cell)
    assert run.new_attempt() == 0
    run.adopt(cell)
    unset = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_NVLS_ENABLE", "HARNESS_LEASH_FD")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    ran = subprocess.run(
        [sys.executable, "-c", LOOK, run.path], env=environment | place, capture_output=True, text=True, check=False
    )
    assert ran.stdout.split() == [":4096:8", "0"], ran.stderr
