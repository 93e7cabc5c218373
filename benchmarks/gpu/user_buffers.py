"""What NCCL user buffers and limits on thread blocks save on a GPU. Writes data/gpu_user_buffers.json.

    python benchmarks/gpu/user_buffers.py                        one rank a device
    LD_PRELOAD=/path/libnccl.so.2 python benchmarks/gpu/user_buffers.py --ranks 4 --one-device

For every arm (plain memory, registered, symmetric; each without and with limits on thread blocks) and every size:

  time      of one gather and one reduce-scatter in place, median over repetitions after warm-up, by CUDA events
  blocks    thread blocks and threads of each NCCL kernel, from torch.profiler (`ncclSymk*` are symmetric kernels; a
            gather by copy engines has none)
  slowdown  of matrix products on rank 0 while every rank communicates on a side stream: what NCCL's blocks take from
            compute. `covered` tells whether communication lasted as long as the products; without that, it is a floor

NCCL reads its variables once, so every arm has processes of its own. Arms take turns in `--rounds` rounds, forwards and
backwards; a figure is the median over rounds, beside the smallest and largest. An arm whose registration fails is in
the results with its reason.

--one-device puts all ranks on one GPU, which NCCL 2.30 and later allow: right for correctness, kernels, blocks and
launch counts. Its times say nothing about bandwidth between devices.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "benchmarks" / "data" / "gpu_user_buffers.json"
SIZES_MIB = (2, 8, 32, 128)
"""Bytes of the whole bucket."""
WARM_UP, REPETITIONS = 10, 30
MATMUL = 4096
"""Side of the square bf16 matrices."""
PRODUCTS = 40
"""Matrix products of one measurement."""
ARM_TIMEOUT_S = 300.0
SHARED_NCCL = (2, 30, 0)
"""First NCCL that lets ranks share a device."""


@dataclass(frozen=True)
class Arm:
    """One way to hold buckets and to limit NCCL."""

    buffers: str
    """plain, registered or symmetric."""
    max_ctas: int | None = None
    policy: str = "default"

    @property
    def name(self) -> str:
        limit = "" if self.max_ctas is None else f"-ctas{self.max_ctas}"
        return self.buffers + limit + ("" if self.policy == "default" else f"-{self.policy}")


ARMS = (
    *(Arm(buffers, most) for buffers in ("plain", "registered", "symmetric") for most in (None, 4, 1)),
    Arm("registered", policy="efficiency"),
    Arm("symmetric", policy="zero"),
)


def environment(arm: Arm, *, one_device: bool) -> dict[str, str]:
    variables = {
        "NCCL_COLLNET_ENABLE": "0",
        # ranks that share a device starve one another with NCCL's usual number of blocks, and have no multicast
        "NCCL_NVLS_ENABLE": "0" if one_device else "2",
        "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "0",
        "NCCL_CTA_POLICY": {"default": "0", "efficiency": "1", "zero": "2"}[arm.policy],
    }
    if one_device:
        variables |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
    if arm.max_ctas is not None:
        variables["NCCL_MAX_CTAS"] = str(arm.max_ctas if not one_device else min(2, arm.max_ctas))
    return variables


def thread_blocks(trace: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Launches, blocks and threads a block of every NCCL kernel in a Chrome trace of torch.profiler's.

    Blocks are those of the widest launch.
    """
    found: dict[str, dict[str, int]] = {}
    for event in trace.get("traceEvents", []):
        name, arguments = str(event.get("name", "")), event.get("args", {})
        if event.get("cat") != "kernel" or "nccl" not in name.lower() or "grid" not in arguments:
            continue
        blocks, threads = _product(arguments["grid"]), _product(arguments["block"])
        entry = found.setdefault(name.split("(")[0], {"launches": 0, "blocks": 0, "threads": 0})
        entry["launches"] += 1
        entry["blocks"] = max(entry["blocks"], blocks)
        entry["threads"] = max(entry["threads"], threads)
    return found


def _product(sizes: Iterable[int]) -> int:
    total = 1
    for size in sizes:
        total *= int(size)
    return total


# -- one rank of one arm ---------------------------------------------------------------------------------------------


def be_rank(arm: Arm, rank: int, ranks: int, store: str, device_index: int, sizes: Sequence[int]) -> dict[str, Any]:
    """Measure one arm; every rank returns, rank 0's figures count."""
    from harness.fsdp.comm.device import DeviceRuntime
    from harness.fsdp.comm.user_buffers import Member, UserBuffers
    from harness.fsdp.vocabulary import Registration

    device = torch.device("cuda", device_index)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, device_id=device)
    group = dist.group.WORLD
    runtime = DeviceRuntime(device)
    buffers = UserBuffers(
        Registration.none if arm.buffers == "plain" else Registration.auto,
        [Member("dp", group, device)],
        runtime,
        symmetric=arm.buffers == "symmetric",
        may_fall_back=True,
    )
    buckets: dict[int, torch.Tensor] = {}
    with buffers.allocating():
        for size in sizes:
            numel = size * 2**20 // 2 // ranks * ranks
            buckets[size] = torch.zeros(numel, dtype=torch.bfloat16, device=device)
    buffers.model_built()
    results: dict[str, Any] = {"user_buffers": buffers.facts(), "sizes": {}}
    for size, bucket in buckets.items():
        own = bucket.chunk(ranks)[rank]
        collectives = {
            "all_gather": partial(dist.all_gather_into_tensor, bucket, own, async_op=True),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, own, bucket, async_op=True),
        }
        results["sizes"][str(size)] = {name: _measure(each, rank, device) for name, each in collectives.items()}
        _check(bucket, own, rank, ranks)
    buffers.close()
    dist.barrier()
    dist.destroy_process_group()
    return results


Collective = Callable[[], Any]


def _measure(collective: Collective, rank: int, device: torch.device) -> dict[str, Any]:
    """Time, blocks and slowdown of one collective; every rank takes part."""
    time_us = _time_us(collective)
    return {"time_us": time_us, "blocks": _profiled(collective), **_slowdown(collective, time_us, rank, device)}


def _time_us(collective: Collective) -> float:
    """Median microseconds on the device of one collective after the other."""
    for _ in range(WARM_UP):
        collective().wait()
    times = []
    for _ in range(REPETITIONS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        collective().wait()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def _profiled(collective: Collective) -> dict[str, dict[str, int]]:
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            collective().wait()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return thread_blocks(json.loads(path.read_text()))


def _slowdown(collective: Collective, time_us: float, rank: int, device: torch.device) -> dict[str, Any]:
    """How much longer matrix products take on rank 0 while all ranks communicate; every rank takes part."""
    count = torch.zeros(1, dtype=torch.int64, device=device)
    matrices = [torch.randn(MATMUL, MATMUL, dtype=torch.bfloat16, device=device) for _ in range(2)]
    alone = _products_us(matrices) if rank == 0 else 0.0
    if rank == 0:  # twice as long as the products take alone: they take longer beside it
        count += max(8, round(2 * alone / max(1.0, time_us)))
    dist.broadcast(count, 0)
    rounds = int(count.item())
    dist.barrier()
    side = torch.cuda.Stream(device)
    end = torch.cuda.Event(enable_timing=True)
    begin = torch.cuda.Event(enable_timing=True)
    begin.record()
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(rounds):
            collective().wait()
        end.record()
    together = _products_us(matrices) if rank == 0 else 0.0
    torch.cuda.synchronize()
    if rank != 0:
        return {}
    communication = begin.elapsed_time(end) * 1e3
    return {
        "matmul_alone_us": alone,
        "matmul_beside_us": together,
        "slowdown": together / alone,
        "covered": communication >= together,
    }


def _products_us(matrices: Sequence[torch.Tensor]) -> float:
    left, right = matrices
    out = torch.empty_like(left)
    for _ in range(3):
        torch.mm(left, right, out=out)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(PRODUCTS):
        torch.mm(left, right, out=out)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def _check(bucket: torch.Tensor, own: torch.Tensor, rank: int, ranks: int) -> None:
    bucket.fill_(-1)
    own.fill_(rank + 1)
    dist.all_gather_into_tensor(bucket, own)
    expected = torch.arange(1, ranks + 1, device=bucket.device, dtype=bucket.dtype)
    if not torch.equal(bucket.view(ranks, -1)[:, 0], expected):
        raise RuntimeError(f"rank {rank}: a gather brought {bucket.view(ranks, -1)[:, 0].tolist()}")
    bucket.fill_(rank + 1)
    dist.reduce_scatter_tensor(own, bucket)
    if own[0].item() != ranks * (ranks + 1) / 2:
        raise RuntimeError(f"rank {rank}: a reduction gave {own[0].item()}, not {ranks * (ranks + 1) / 2}")


# -- all arms --------------------------------------------------------------------------------------------------------


def run_arm(arm: Arm, ranks: int, *, one_device: bool, sizes: Sequence[int]) -> dict[str, Any]:
    """One arm in processes of its own; {"error": ...} where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [_start(arm, rank, ranks, folder, one_device, sizes) for rank in range(ranks)]
        deadline = time.monotonic() + ARM_TIMEOUT_S
        try:
            codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            return {"error": f"not done within {ARM_TIMEOUT_S:g} s"}
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if any(codes):
            logs = [(Path(folder) / f"{rank}.log").read_text().strip().splitlines() for rank in range(ranks)]
            last = next((log[-1] for log, code in zip(logs, codes, strict=True) if code and log), "without a word")
            return {"error": last}
        found: dict[str, Any] = json.loads((Path(folder) / "0.json").read_text())
        return found


def _start(
    arm: Arm, rank: int, ranks: int, folder: str, one_device: bool, sizes: Sequence[int]
) -> subprocess.Popen[bytes]:
    device = 0 if one_device else rank
    words = [str(arm.buffers), str(arm.max_ctas or 0), arm.policy, rank, ranks, folder, device, *sizes]
    with (Path(folder) / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, __file__, "--be-rank", *map(str, words)],
            env=os.environ | environment(arm, one_device=one_device),
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def summarise(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over an arm's rounds, with the smallest and the largest; the errors of rounds that failed."""
    good = [each for each in rounds if "error" not in each]
    errors = sorted({each["error"] for each in rounds if "error" in each})
    if not good:
        return {"errors": errors}
    first = good[0]
    sizes = {
        size: {name: _medians([each["sizes"][size][name] for each in good]) for name in collectives}
        for size, collectives in first["sizes"].items()
    }
    return {"user_buffers": first["user_buffers"], "sizes": sizes} | ({"errors": errors} if errors else {})


def _medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"blocks": rounds[0]["blocks"], "rounds": len(rounds)}
    for name in ("time_us", "matmul_alone_us", "matmul_beside_us", "slowdown"):
        values = [each[name] for each in rounds]
        row[name] = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return row | {"covered": all(each["covered"] for each in rounds)}


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"{'arm':<24} {'MiB':>4} {'collective':<15} {'us':>9} {'blocks':>6} {'matmul':>7}  kernels"]
    for arm, found in results.items():
        if "sizes" not in found:
            lines.append(f"{arm:<24} failed: {'; '.join(found['errors'])}")
            continue
        for size, collectives in found["sizes"].items():
            lines += [f"{arm:<24} {size:>4} {_row(name, row)}" for name, row in collectives.items()]
        if reason := found["user_buffers"].get("reason"):
            lines.append(f"{arm:<24} {found['user_buffers']['effective']}: {reason}")
    return "\n".join(lines)


def _row(name: str, row: Mapping[str, Any]) -> str:
    blocks = max((kernel["blocks"] for kernel in row["blocks"].values()), default=0)
    slowdown = f"{'' if row['covered'] else '>'}x{row['slowdown']['median']:.2f}"
    return (
        f"{name:<15} {row['time_us']['median']:>9.1f} {blocks:>6} {slowdown:>7}  {', '.join(row['blocks']) or 'none'}"
    )


def why_not_here(ranks: int, *, one_device: bool) -> str:
    """What this machine lacks, in one sentence; empty if it has everything."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return f"needs an NVIDIA GPU and a torch with CUDA and NCCL; torch {torch.__version__} sees no CUDA device here"
    if one_device:
        version = tuple(torch.cuda.nccl.version()[:3])
        if version < SHARED_NCCL and "LD_PRELOAD" not in os.environ:
            have, want = (".".join(map(str, each)) for each in (version, SHARED_NCCL))
            return f"--one-device needs NCCL {want} (LD_PRELOAD one); {have} is loaded"
    elif torch.cuda.device_count() < ranks:
        return f"needs {ranks} devices and finds {torch.cuda.device_count()}; --ranks, or --one-device"
    return "" if ranks > 1 else "needs two ranks or more: --ranks 2"


def _be_rank(words: Sequence[str]) -> int:
    buffers, ctas, policy, rank, ranks, folder, device, *sizes = words
    arm = Arm(buffers, int(ctas) or None, policy)
    found = be_rank(arm, int(rank), int(ranks), f"{folder}/store", int(device), [int(size) for size in sizes])
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every arm, keep the figures, print the table; 2 where this machine cannot."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["--be-rank"]:
        return _be_rank(words[1:])
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/user_buffers.py")
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()), help="processes")
    parser.add_argument("--one-device", action="store_true", help="all of them on one GPU (NCCL 2.30 or later)")
    parser.add_argument("--rounds", type=int, default=5, help="processes of every arm, one after the other")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES_MIB), help="MiB of the whole bucket")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args(words)
    lacking = why_not_here(arguments.ranks, one_device=arguments.one_device)
    if lacking:
        sys.stderr.write(f"benchmarks/gpu/user_buffers.py {lacking}\n")
        return 2
    rounds: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in ARMS}
    for number in range(arguments.rounds):
        for arm in ARMS if number % 2 == 0 else reversed(ARMS):
            found = run_arm(arm, arguments.ranks, one_device=arguments.one_device, sizes=arguments.sizes)
            rounds[arm.name].append(found)
    results = {name: summarise(each) for name, each in rounds.items()}
    facts = {
        "device": torch.cuda.get_device_name(0),
        "driver": _driver(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version()[:3])),
        "command": " ".join([Path(__file__).name, *words]),
        "ranks": arguments.ranks,
        "one_device": arguments.one_device,
        "caveat": "one device: no figure here is about bandwidth between devices" if arguments.one_device else None,
        "arms": results,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(facts, indent=1) + "\n")
    print(table(results))
    return 0 if any("sizes" in each for each in results.values()) else 1


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.splitlines()[0].strip()


if __name__ == "__main__":
    raise SystemExit(main())
