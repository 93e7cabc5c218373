"""What NCCL is told, as a table: a configuration and the variables that follow from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.config.network_variables import network_environment
from harness.launch.environment import HEAP, rank_environment, run_environment
from tests.launch.cells import make_cell

CUDA = "cluster.device=cuda"
OFF = {"NCCL_NVLS_ENABLE": "0", "NCCL_COLLNET_ENABLE": "0"}
NVLINK = OFF | {"NCCL_NVLS_ENABLE": "2"}
HOOK = {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "0"}
SAT = {"SHARP_COLL_ENABLE_SAT": "1", "SHARP_COLL_LOG_LEVEL": "3"}


def typed(root: Path, *overrides: str) -> Any:
    """A configuration whose machine is not asked for devices: a cell for SLURM."""
    return make_cell(root, "cluster.backend=slurm", "cluster.gpus_per_node=2", *overrides).typed


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("", OFF),
        ("nccl_ub.mode=auto", OFF | HOOK),
        ("nccl_ub.mode=manual nccl_ub.cta_policy=zero", OFF | HOOK | {"NCCL_CTA_POLICY": "2"}),
        (
            "nccl_ub.mode=auto nccl_ub.symmetric=false nccl_ub.cta_policy=efficiency",
            OFF | HOOK | {"NCCL_CTA_POLICY": "1"},
        ),
        ("nccl_ub.min_ctas=1 nccl_ub.max_ctas=4", OFF | {"NCCL_MIN_CTAS": "1", "NCCL_MAX_CTAS": "4"}),
        ("sharp.group=dp", NVLINK | SAT),
        ("sharp.group=dp sharp.infiniband=false", NVLINK),
        ("sharp.group=dp sharp.nvlink=false sharp.streaming=false", OFF | SAT | {"SHARP_COLL_ENABLE_SAT": "0"}),
        ("sharp.group=dp sharp.nvls_ctas=8", NVLINK | SAT | {"NCCL_NVLS_NCHANNELS": "8"}),
        ("sharp.group=dp sharp.overlap_gather=true", NVLINK | SAT | {"SHARP_COLLNET_OVERLAP_AG": "1"}),
        ("sharp.algo=^NVLS", OFF | {"NCCL_ALGO": "^NVLS"}),
        ("sharp.group=dp launch.nccl_log=none", NVLINK | {"SHARP_COLL_ENABLE_SAT": "1"}),
    ],
)
def test_what_a_configuration_tells_nccl(overrides: str, expected: dict[str, str], tmp_path: Path) -> None:
    assert network_environment(typed(tmp_path, CUDA, *overrides.split())) == expected


def test_gloo_is_told_nothing(tmp_path: Path) -> None:
    config = typed(tmp_path, "sharp.group=dp", "nccl_ub.mode=auto", "nccl_ub.max_ctas=2")
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


def test_without_a_log_the_users_own_settings_stand(tmp_path: Path) -> None:
    variables = network_environment(typed(tmp_path, CUDA, "launch.nccl_log=none"), tmp_path)
    assert not any(name.startswith("NCCL_DEBUG") for name in variables)


def test_a_rank_gets_all_of_it(tmp_path: Path) -> None:
    config = typed(tmp_path, CUDA, "sharp.group=dp")
    variables = rank_environment(config, 1, start="t", devices=("0", "1"), attempt=tmp_path)
    assert network_environment(config, tmp_path).items() <= variables.items()
    assert variables["RANK"] == "1"


def test_the_same_configuration_gives_the_same_variables_whatever_this_process_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = typed(tmp_path, CUDA, "sharp.group=dp")
    before = network_environment(config)
    monkeypatch.setenv("NCCL_COLLNET_ENABLE", "1")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert network_environment(config) == before
