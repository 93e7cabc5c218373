"""Steps of the engine of another checkout beside those of this one, on one GPU. Writes data/gpu/versions.json.

    git archive f5f18313 | tar -x -C /tmp/base && python benchmarks/gpu/versions.py --base /tmp/base
    python benchmarks/gpu/versions.py --base /tmp/base --device cpu --tiny --out FILE          a rehearsal

Each side is one process with one model an arm: ours by strategy, DDP and FSDP2, weights and products in bf16, main
weights, gradients and state of AdamW in fp32 (DDP: all in fp32 under autocast). Only one side steps at a time, and they
take turns, A B A B. A step is forward, backward, update, zero_grad, and takes the time between two events on the
device; `host_ms` is how long the loop issues it. A turn has the median of its steps; ratios are of medians over turns,
with a bootstrap interval of pairs of turns. One step under torch.profiler tells kernels, copies and waits of the host;
`peak` is allocated by one step, above what a process with all arms holds at rest. One rank: collectives have nobody to
wait for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path.cwd() if "--serve" in sys.argv else Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "benchmarks" / "data" / "gpu" / "versions.json"
OURS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
ARMS = (*OURS, "fsdp2", "ddp")
SIZES = {False: (768, 12, 32000, 8, 1024), True: (64, 2, 256, 2, 16)}
"""Width, layers, words, sequences and their length: 134 M weights, and a rehearsal."""
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")


class Block(nn.Module):
    """One layer of a decoder."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, length, dim]."""
        heads = self.qkv(self.before(x)).unflatten(-1, (3, -1, 64)).movedim(-3, 0).transpose(-3, -2)
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(-3, -2).flatten(-2)
        x = x + self.out(seen)
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


def decoder(tiny: bool, device: str, dtype: torch.dtype) -> nn.Module:
    dim, layers, words, _, _ = SIZES[tiny]
    torch.manual_seed(0)
    parts = [nn.Embedding(words, dim), *(Block(dim) for _ in range(layers)), nn.LayerNorm(dim), nn.Linear(dim, words)]
    return nn.Sequential(*parts).to(device, dtype)


def prepare(arm: str, tiny: bool, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    made = decoder(tiny, device, torch.bfloat16 if arm in OURS else torch.float32)
    if arm == "ddp":
        model: nn.Module = nn.parallel.DistributedDataParallel(made)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if arm == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in made:
            if isinstance(block, Block):
                fully_shard(block, mp_policy=policy)
        fully_shard(made, mp_policy=policy)
        return made, torch.optim.AdamW(made.parameters(), lr=1e-4, fused=True)
    from harness.fsdp import fully_shard_model, fully_shard_optimizer

    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4, fused=True)
    sharded = fully_shard_model(made, fsdp_unit_modules=[Block], zero_dp_strategy=arm)
    return sharded, fully_shard_optimizer(sharded, optimizer)


def serve(device: str, tiny: bool, port: int) -> None:
    """Make the arms; then answer each line `VERB ARM COUNT` of the standard input with JSON."""
    cuda = device == "cuda"
    import harness

    if not Path(str(harness.__file__)).is_relative_to(Path.cwd()):
        raise RuntimeError(f"harness comes from {harness.__file__}, not from {Path.cwd()}")
    backend, where = ("nccl", {"device_id": torch.device("cuda", 0)}) if cuda else ("gloo", {})
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1, **where)
    _, _, words, batch, length = SIZES[tiny]
    tokens = torch.randint(0, words, (batch, length + 1), generator=torch.Generator().manual_seed(1)).to(device)
    arms = {arm: prepare(arm, tiny, device) for arm in ARMS}

    def step(arm: str) -> None:
        model, optimizer = arms[arm]
        with torch.autocast(device, torch.bfloat16, enabled=arm == "ddp"):
            logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def timed(arm: str) -> list[float]:
        if not cuda:
            began = time.perf_counter()
            step(arm)
            return [1e3 * (time.perf_counter() - began)] * 2
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        began = time.perf_counter()
        first.record()
        step(arm)
        last.record()
        host = 1e3 * (time.perf_counter() - began)
        torch.cuda.synchronize()
        return [first.elapsed_time(last), host]

    def counted(arm: str) -> dict[str, Any]:
        kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if cuda else [])]
        rest = torch.cuda.memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        step(arm)
        peak = torch.cuda.max_memory_allocated() - rest if cuda else None
        with torch.profiler.profile(activities=kinds) as profile:
            step(arm)
            if cuda:
                torch.cuda.synchronize()
        calls = Counter(event.name for event in profile.events())
        return {
            "kernels": sum(count for name, count in calls.items() if name.startswith(("cudaLaunchKernel", "cuLaunch"))),
            "copies": sum(count for name, count in calls.items() if name.startswith("cudaMemcpyAsync")),
            "fills": sum(count for name, count in calls.items() if name.startswith("cudaMemsetAsync")),
            "waits": sum(calls[name] for name in WAITS) - (1 if cuda else 0),
            "collectives": sum(count for name, count in calls.items() if name.startswith("nccl:")),
            "peak_mib": None if peak is None else round(peak / 2**20, 1),
        }

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        verb, arm, count = line.split()
        print(json.dumps(counted(arm) if verb == "count" else [timed(arm) for _ in range(int(count))]), flush=True)
    dist.destroy_process_group()


class Side:
    """The process of one checkout."""

    def __init__(self, checkout: Path, device: str, tiny: bool, port: int) -> None:
        words = ["--serve", str(port), "--device", device, *(["--tiny"] if tiny else [])]
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, *words],
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, verb: str, arm: str, count: int = 1) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{verb} {arm} {count}\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a side ended: exit code {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="folder of the other checkout")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=5, help="in a turn")
    parser.add_argument("--out", type=Path, default=OUTPUT)
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        return serve(chosen.device, chosen.tiny, chosen.serve)
    from benchmarks.costs.peers_step import told
    from benchmarks.gpu.look import devices, versions
    from harness.bench.stats import median_ratio

    places = {"base": chosen.base.resolve(), "here": ROOT}
    sides = {
        which: Side(place, chosen.device, chosen.tiny, 29710 + n) for n, (which, place) in enumerate(places.items())
    }
    with contextlib.ExitStack() as open_sides:
        for side in sides.values():
            open_sides.callback(side.close)
            side.answer()
        for side in sides.values():
            for arm in ARMS:
                side.ask("step", arm, 10)
        took: dict[str, dict[str, list[float]]] = {arm: {"base": [], "here": [], "host": []} for arm in ARMS}
        for turn in range(chosen.turns):
            for arm in ARMS:
                for which, side in [*sides.items()][:: 1 if turn % 2 else -1]:
                    steps = side.ask("step", arm, chosen.steps)
                    took[arm][which].append(statistics.median(device for device, _ in steps))
                    if which == "here":
                        took[arm]["host"].append(statistics.median(host for _, host in steps))
        counted = {which: {arm: side.ask("count", arm) for arm in ARMS} for which, side in sides.items()}
    rows = {}
    for arm, each in took.items():
        ratio, peer = median_ratio(each["here"], [each["base"]]), median_ratio(each["here"], [took["fsdp2"]["here"]])
        rows[arm] = {
            **{f"{which}_ms": round(statistics.median(each[which]), 3) for which in ("base", "here", "host")},
            "ratio": told(ratio),
            "to_fsdp2": told(peer),
            **{which: counted[which][arm] for which in sides},
        }
        print(arm, json.dumps(rows[arm]), flush=True)
    facts = {"sizes": SIZES[chosen.tiny], "turns": chosen.turns, "steps": chosen.steps, "versions": versions()}
    text = json.dumps({**facts, "machine": devices(), "rows": rows}, indent=1, sort_keys=True)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
