"""Step time of our engine beside DDP's and FSDP2's, in turns within the same processes. Writes data/peers_step.json.

    python benchmarks/costs/peers_step.py [SHAPE ...] [--turns N] [--apart] [--out FILE]   6 minutes on two idle cores
    python benchmarks/costs/peers_step.py --over gloo --apart --out FILE        all engines on gloo
    python benchmarks/costs/peers_step.py --over shm --apart --out FILE         all engines on harness/shm

Two ranks of one thread over gloo hold one model an arm, made and sharded as a user does it, and all arms step in turns:
whatever else the machine does, meets all alike. With `--apart` the ranks of each arm are processes of its own, as a
user's are: no arm finds its memory, or the backend's threads, in the state that another one has left. Each arm comes in
three rounds of so many turns then, and those made without `fused` are left out.

A step is forward, backward, update and zero_grad, without clipping; every optimizer is AdamW, `fused=True` or, where an
arm says `defaults`, made without `fused` and `foreach`. Ratios are of medians over turns, wall time of rank 0, with a
bootstrap interval (harness/bench/stats.py). `cpu_ms` is the processor time of rank 0's main thread a step: what the
loop itself takes, without the threads that copy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import harness.shm
from harness.bench.stats import Interval, median_ratio
from harness.config.schema import Strategy
from harness.fsdp import fully_shard_model, fully_shard_optimizer
from harness.models.llama import Block, Embedding, Head, Llama
from tests.support.factory import small_config
from tests.support.spawn import run_ranks

OUTPUT = Path(__file__).resolve().parents[1] / "data" / "peers_step.json"
RANKS, LAYERS, STEPS, WARMUP = 2, 4, 6, 3
SHAPES = {"comm": (512, 1344, 8), "between": (512, 1344, 128), "compute": (256, 704, 384)}
"""Width, width of the feed-forward layer, and tokens a rank and step; 12.7 M weights twice, then 3.1 M."""
UNITS = (Embedding, Block, Head)
DDP, DDP_DEFAULTS, FSDP2, DEFAULTS = "ddp", "ddp, defaults", "fsdp2", ", defaults"
OURS = tuple(strategy.value for strategy in Strategy)
ARMS = (DDP, FSDP2, *OURS, DDP_DEFAULTS, *(f"{name}{DEFAULTS}" for name in (OURS[0], OURS[-1])))
CHOSEN = "chosen"
ROUNDS = 3
"""How often each arm has processes of its own."""


class Took(NamedTuple):
    """A step's seconds: by the wall, and of the main thread's processor time."""

    wall: float
    cpu: float


def decoder(dim: int, ffn_dim: int, tokens: int) -> nn.Module:
    """The harness' decoder, with weights that are the same on every rank."""
    model = small_config().model
    model.dim, model.ffn_dim, model.num_layers, model.vocab_size = dim, ffn_dim, LAYERS, 256
    model.num_heads, model.num_kv_heads, model.max_seq_len = dim // 64, dim // 64, tokens
    made = Llama(model, "cpu", torch.float32)
    torch.manual_seed(0)
    for param in made.parameters():
        nn.init.normal_(param, 1.0 if param.dim() == 1 else 0.0, 0.02)
    return made


def prepare(
    arm: str, module: nn.Module, over: str = CHOSEN
) -> tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer]:
    group = dist.new_group(backend="shm") if over == "shm" else None
    kernel: dict[str, Any] = {} if arm.endswith(DEFAULTS) else {"fused": True}
    name = arm.removesuffix(DEFAULTS)
    if name == DDP:
        model = DistributedDataParallel(module, process_group=group)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, **kernel)
    if name == FSDP2:
        mesh = None if group is None else DeviceMesh.from_group(group, "cpu")
        for unit in module.modules():
            if isinstance(unit, UNITS):
                torch_fsdp.fully_shard(unit, mesh=mesh)
        torch_fsdp.fully_shard(module, mesh=mesh)
        return module, torch.optim.AdamW(module.parameters(), lr=1e-4, **kernel)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, **kernel)
    gloo: dict[str, Any] = {"transport": "backend"} if over == "gloo" else {}
    model = fully_shard_model(module, fsdp_unit_modules=[*UNITS], zero_dp_strategy=name, **gloo)
    return model, fully_shard_optimizer(model, optimizer)


def one_rank(
    rank: int, sizes: tuple[int, int, int], turns: int, names: tuple[str, ...], over: str
) -> dict[str, list[list[Took]]]:
    """Seconds of every step of every turn, by arm; sizes: a shape's."""
    harness.shm.register()
    dim, ffn_dim, tokens = sizes
    generator = torch.Generator().manual_seed(1 + rank)
    batch = torch.randint(0, 256, (1, tokens + 1), generator=generator)
    arms = {arm: prepare(arm, decoder(dim, ffn_dim, tokens), over) for arm in names}

    def step(arm: str) -> Took:
        model, optimizer = arms[arm]
        began, cpu = time.perf_counter(), time.thread_time()
        logits = model(batch[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return Took(time.perf_counter() - began, time.thread_time() - cpu)

    found: dict[str, list[list[Took]]] = {arm: [] for arm in names}
    for turn in range(turns):
        for arm in in_order(turn, names):
            for _ in range(WARMUP if turn == 0 else 1):
                step(arm)
            found[arm].append([step(arm) for _ in range(STEPS)])
    return found


def in_order(turn: int, names: tuple[str, ...]) -> Iterator[str]:
    """These arms, begun with another one each turn, every second turn backwards."""
    first = turn % len(names)
    order = names[first:] + names[:first]
    return iter(order if turn % 2 == 0 else order[::-1])


def medians(turns: list[list[Took]], part: str) -> list[float]:
    """The median step of each turn."""
    return [statistics.median(getattr(took, part) for took in turn) for turn in turns]


def told(ratio: Interval | None) -> dict[str, float]:
    assert ratio is not None
    return {key: round(getattr(ratio, key), 3) for key in ("value", "low", "high")}


def taken(shape: str, turns: int, over: str, *, apart: bool) -> dict[str, list[list[Took]]]:
    """Steps of rank 0, by arm and turn: all in the same processes, or each in its own."""
    if not apart:
        return dict(run_ranks(one_rank, RANKS, SHAPES[shape], turns, ARMS, over)[0])
    names = tuple(arm for arm in ARMS if not arm.endswith(DEFAULTS))
    found: dict[str, list[list[Took]]] = {arm: [] for arm in names}
    for round_ in range(ROUNDS):
        for arm in in_order(round_, names):
            found[arm] += run_ranks(one_rank, RANKS, SHAPES[shape], turns, (arm,), over)[0][arm]
    return found


def measure(shape: str, turns: int, over: str = CHOSEN, *, apart: bool = False) -> dict[str, dict[str, Any]]:
    first = taken(shape, turns, over, apart=apart)
    wall = {arm: medians(first[arm], "wall") for arm in first}
    return {
        arm: {
            "wall_ms": round(1e3 * statistics.median(wall[arm]), 2),
            "cpu_ms": round(1e3 * statistics.median(medians(first[arm], "cpu")), 2),
            "to_ddp": told(median_ratio(wall[arm], [wall[DDP]])),
            "to_fsdp2": told(median_ratio(wall[arm], [wall[FSDP2]])),
        }
        for arm in first
    }


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"{', '.join(SHAPES)} (default: all)")
    parser.add_argument("--turns", type=int, default=12, help="turns of every arm, 3 or more (default: %(default)s)")
    parser.add_argument("--over", choices=(CHOSEN, "gloo", "shm"), default=CHOSEN, help="transport of all engines")
    parser.add_argument("--apart", action="store_true", help="give each arm processes of its own")
    parser.add_argument("--out", type=Path, default=OUTPUT, help="file to write (default: data/peers_step.json)")
    chosen = parser.parse_args()
    if unknown := set(chosen.shapes) - set(SHAPES):
        parser.error(f"no shape {', '.join(sorted(unknown))}; there are: {', '.join(SHAPES)}")
    if chosen.turns < 3:
        parser.error(f"--turns={chosen.turns} must be 3 or more: an interval needs three")
    load, rows = os.getloadavg()[0], dict[str, Any]()
    print(f"{'shape':8} {'arm':28} {'wall ms':>8} {'cpu ms':>8} {'/ ddp':>22} {'/ fsdp2':>22}")
    for shape in chosen.shapes or SHAPES:
        rows[shape] = measure(shape, chosen.turns, chosen.over, apart=chosen.apart)
        for arm, row in rows[shape].items():
            ratios = [
                f"{each['value']:.2f} ({each['low']:.2f}..{each['high']:.2f})"
                for each in (row["to_ddp"], row["to_fsdp2"])
            ]
            print(
                f"{shape:8} {arm:28} {row['wall_ms']:8.2f} {row['cpu_ms']:8.2f} {ratios[0]:>22} {ratios[1]:>22}",
                flush=True,
            )
    facts = {
        "ranks": RANKS,
        "turns": chosen.turns,
        "apart": chosen.apart,
        "over": chosen.over,
        "steps": STEPS,
        "load_average": {"before": load, "after": os.getloadavg()[0]},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "cores": os.cpu_count(),
        "rows": rows,
    }
    chosen.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
