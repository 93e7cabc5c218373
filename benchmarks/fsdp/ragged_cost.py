"""Cost of torch's clipping, optimizers and averages on ragged tensors, beside plain tensors and torch's `Shard(0)`.

    python benchmarks/fsdp/ragged_cost.py        measure and write benchmarks/data/ragged_cost.json

One process has a mesh of one rank, so that what is timed is what Python and dispatch cost, and no communication. Kinds
take turns within each round; times are milliseconds of processor time, medians of all rounds with the quartiles, and
each ratio is the median of ratios within one round.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from harness.fsdp.ragged import RaggedShard, RaggedTensor
from harness.fsdp.ragged.tensor import spec_like

OUTPUT = Path(__file__).resolve().parents[1] / "data" / "ragged_cost.json"
PARAMETERS, WIDTH, ROUNDS = 147, 48, 30


def plain(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """A copy."""
    return value.clone()


def even(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """A copy cut by `Shard(0)`."""
    return distribute_tensor(value, mesh, [Shard(0)])


def ragged(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """A copy cut by a `RaggedShard`."""
    return RaggedTensor.of(value.clone(), spec_like(value, mesh, [RaggedShard(((0, len(value)),))]))


KINDS: dict[str, Callable[[Tensor, DeviceMesh], Tensor]] = {"plain": plain, "Shard(0)": even, "RaggedShard": ragged}


def actions(params: list[nn.Parameter]) -> dict[str, Callable[[], Any]]:
    """Each thing that is timed, of one kind of parameters with gradients."""
    adamw = {
        name: torch.optim.AdamW(params, lr=1e-6, **options)
        for name, options in {"fused": {"fused": True}, "foreach": {"foreach": True}, "default": {}}.items()
    }
    averages = [param.detach().clone() for param in params]
    return {
        **{f"AdamW {name}": optimizer.step for name, optimizer in adamw.items()},
        "clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(params, 1e9),
        "average by foreach": lambda: torch._foreach_lerp_(averages, [param.detach() for param in params], 0.1),
    }


def measured(mesh: DeviceMesh) -> dict[str, dict[str, list[float]]]:
    """Milliseconds by action and kind, a number a round."""
    torch.manual_seed(0)
    values = [torch.randn(WIDTH, WIDTH) for _ in range(PARAMETERS)]
    todo = {}
    for kind, make in KINDS.items():
        params = [nn.Parameter(make(value, mesh)) for value in values]
        for param, value in zip(params, values, strict=True):
            param.grad = make(value, mesh)
        todo[kind] = actions(params)
    found: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in KINDS} for name in todo["plain"]}
    for round_ in range(ROUNDS + 2):
        for name, times in found.items():
            for kind in KINDS:
                begin = time.process_time()
                todo[kind][name]()
                if round_ >= 2:
                    times[kind].append(1000 * (time.process_time() - begin))
    return found


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Median and quartiles of each kind, and of ratios to `Shard(0)`."""

    def spread(numbers: list[float]) -> dict[str, float]:
        low, median, high = statistics.quantiles(numbers, n=4)
        return {"median": round(median, 3), "low": round(low, 3), "high": round(high, 3)}

    ratios = [ours / theirs for ours, theirs in zip(times["RaggedShard"], times["Shard(0)"], strict=True)]
    return {**{kind: spread(numbers) for kind, numbers in times.items()}, "ratio to Shard(0)": spread(ratios)}


def main() -> None:
    """Measure and write."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        found = {name: summary(times) for name, times in measured(init_device_mesh("cpu", (1,))).items()}
        dist.destroy_process_group()
    made = {"torch": torch.__version__, "python": platform.python_version(), "parameters": PARAMETERS, "ms": found}
    OUTPUT.write_text(json.dumps(made, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
