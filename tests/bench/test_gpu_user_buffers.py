"""The benchmark of user buffers, as far as it goes without a GPU: what it asks, what it reads, how it ends here."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from benchmarks.gpu import user_buffers as bench
from benchmarks.gpu.user_buffers import ARMS, Arm, environment, run_arm, summarise, table, thread_blocks

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@NO_GPU
def test_without_a_gpu_it_ends_with_one_clear_line() -> None:
    done = subprocess.run([sys.executable, bench.__file__], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "needs an NVIDIA GPU and a torch with CUDA and NCCL" in line


@NO_GPU
def test_an_arm_whose_ranks_fail_is_an_error_with_their_last_words() -> None:
    found = run_arm(Arm("plain"), 1, one_device=True, sizes=[2])
    assert set(found) == {"error"}
    assert "Error" in found["error"]


@pytest.mark.parametrize(
    ("arm", "one_device", "expected"),
    [
        (Arm("plain"), False, {"NCCL_NVLS_ENABLE": "2", "NCCL_CTA_POLICY": "0"}),
        (Arm("plain", 4), False, {"NCCL_MAX_CTAS": "4"}),
        (Arm("plain", 4), True, {"NCCL_MAX_CTAS": "2", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}),
        (Arm("symmetric", 1), True, {"NCCL_MAX_CTAS": "1"}),
        (Arm("symmetric", policy="zero"), False, {"NCCL_CTA_POLICY": "2"}),
        (Arm("registered", policy="efficiency"), False, {"NCCL_CTA_POLICY": "1"}),
    ],
)
def test_what_an_arm_tells_nccl(arm: Arm, one_device: bool, expected: dict[str, str]) -> None:
    assert expected.items() <= environment(arm, one_device=one_device).items()


def test_arms_have_names_of_their_own_and_policies_their_buffers() -> None:
    assert len({arm.name for arm in ARMS}) == len(ARMS)
    assert {(arm.policy, arm.buffers) for arm in ARMS if arm.policy != "default"} == {
        ("efficiency", "registered"),
        ("zero", "symmetric"),
    }


def kernel(name: str, grid: list[int], block: list[int], cat: str = "kernel") -> dict[str, Any]:
    """An event as torch.profiler's Chrome trace has it."""
    return {"ph": "X", "cat": cat, "name": name, "args": {"grid": grid, "block": block, "stream": 20}}


def test_blocks_of_nccls_kernels_alone_by_name() -> None:
    trace = {
        "traceEvents": [
            kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", [16, 1, 1], [512, 1, 1]),
            kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", [4, 1, 1], [544, 1, 1]),
            kernel("ncclSymkDevKernel_ReduceScatter_LD_sum_bf16(ncclSymkDevWorkArgs4K)", [2, 3, 1], [512, 1, 1]),
            kernel("ampere_bf16_s1688gemm", [64, 1, 1], [256, 1, 1]),
            kernel("ncclDevKernel_in_another_category", [9, 1, 1], [1, 1, 1], cat="gpu_memcpy"),
            {"ph": "M", "name": "process_name", "args": {"name": "nccl"}},
        ]
    }
    assert thread_blocks(trace) == {
        "ncclDevKernel_AllGather_RING_LL": {"launches": 2, "blocks": 16, "threads": 544},
        "ncclSymkDevKernel_ReduceScatter_LD_sum_bf16": {"launches": 1, "blocks": 6, "threads": 512},
    }
    assert thread_blocks({}) == {}


def one_round(time_us: float, slowdown: float, *, covered: bool = True) -> dict[str, Any]:
    """What a rank 0 hands back."""
    row = {
        "time_us": time_us,
        "blocks": {"ncclSymkDevKernel_AllGather_ST": {"launches": 3, "blocks": 6, "threads": 512}},
        "matmul_alone_us": 100.0,
        "matmul_beside_us": 100.0 * slowdown,
        "slowdown": slowdown,
        "covered": covered,
    }
    return {
        "user_buffers": {"requested": "auto", "effective": "auto, symmetric, dp"},
        "sizes": {"8": {"all_gather": row}},
    }


def test_rounds_become_medians_and_failed_ones_stay_visible() -> None:
    rounds = [one_round(10, 1.1), {"error": "out of memory"}, one_round(30, 1.3, covered=False), one_round(20, 1.2)]
    found = summarise(rounds)
    row = found["sizes"]["8"]["all_gather"]
    assert row["time_us"] == {"median": 20, "least": 10, "most": 30}
    assert row["rounds"] == 3
    assert row["covered"] is False
    assert found["errors"] == ["out of memory"]
    assert summarise([{"error": "b"}, {"error": "a"}, {"error": "b"}]) == {"errors": ["a", "b"]}


def test_the_table_says_what_failed_what_fell_back_and_what_is_a_floor() -> None:
    fell_back = one_round(10, 1.5, covered=False)
    fell_back["user_buffers"] = {"requested": "auto", "effective": "none", "reason": "no pool"}
    text = table(
        {"plain": summarise([one_round(12.34, 1.25)]), "bad": {"errors": ["boom"]}, "fell": summarise([fell_back])}
    )
    lines = text.splitlines()
    assert lines[1].split() == ["plain", "8", "all_gather", "12.3", "6", "x1.25", "ncclSymkDevKernel_AllGather_ST"]
    assert lines[2].split() == ["bad", "failed:", "boom"]
    assert ">x1.50" in lines[3]
    assert lines[4].split() == ["fell", "none:", "no", "pool"]
