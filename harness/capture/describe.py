"""A watched run in the words of a run's configuration and provenance."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from harness.capture.shards import INSIDE, OUTSIDE
from harness.capture.watching import Watching, of_model
from harness.probe.step_checks.pieces import local_part
from harness.store import provenance, status
from harness.store.files import write_atomic, write_json
from harness.store.provenance import WATCHED
from harness.store.status import State, Status

VERSION = 1
NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
COARSE = ("bf16", "fp16", "fp32", "fp64")
"""Names of dtypes, the least precise first."""
RULES: Mapping[type[Optimizer], str] = {SGD: "sgd", Adam: "adam", AdamW: "adamw"}
SHARED = ("lr", "betas", "eps", "momentum")
OTHERWISE = ("maximize", "amsgrad", "nesterov", "dampening")
"""Options of torch's optimizers under which the rule is another."""


def begin(path: Path, models: Sequence[nn.Module]) -> None:
    """Rank 0's first files: whose run this is, and that it is running. What an earlier end has written goes."""
    (path / "summary.json").unlink(missing_ok=True)
    (path / "metrics.jsonl").unlink(missing_ok=True)
    shutil.rmtree(path / "capture", ignore_errors=True)
    measure = {"capture_steps": None, "update_steps": None}
    write_config(path, {"model": {"name": _class(models[0])}, "train": {"steps": 0}, "measure": measure})
    write_provenance(path, [_machine(torch.device("cpu"))])
    reason = "watched by harness.capture"
    status.write(path, Status(State.running, reason, 0, host=socket.gethostname(), pid=os.getpid()))


def _machine(device: torch.device) -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "device": device.type,
        "threads_per_rank": torch.get_num_threads(),
        "machine": {
            **provenance.machine_facts(),
            "cuda": str(torch.version.cuda),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "allow_tf32": str(torch.backends.cuda.matmul.allow_tf32),
        },
        "versions": provenance.versions(),
    }


def part(watching: Watching, rank: int, world_size: int) -> dict[str, Any]:
    """Facts of one rank, after its first step; `config` as far as it knows the run's configuration."""
    tensors = [
        {"name": name, "shape": list(shard.shape), "places": [block.place.numbers for block in shard.blocks]}
        for name, shard in watching.shards.items()
    ]
    device = local_part(next(iter(watching.params.values()))[1]).device
    model, sharded = _class(watching.models[0]), any(s.numel < math.prod(s.shape) for s in watching.shards.values())
    return {
        "rank": rank,
        "world_size": world_size,
        "tensors": tensors,
        "initial": watching.initial,
        "unplaced": watching.found.unplaced,
        "decayed": sorted(watching.decayed),
        "config": {
            WATCHED: {"version": VERSION, "ranks": world_size, **of_model(watching.models, watching.counted)},
            "model": {"name": model.lower(), "family": "ext", "target": model},
            "optimizer": _optimizer(watching),
            "dtype": _dtypes(watching, sharded),
            "engine": {"name": "ext"},
            "sharding": {"strategy": "optim_grads_params" if sharded else "no_shard", "outer": "no_shard"},
            "numerics": {"mode": "fast"},
            "measure": {"mode": "record", "step_checks": True, "capture_steps": None, "update_steps": None},
            "cluster": {"backend": "local", "device": device.type, "threads_per_rank": torch.get_num_threads()},
            "fault": {"name": "none"},
            "ckpt": {"policy": "none"},
            "run": {"name": None},
            "notes": "",
        },
        **_machine(device),
    }


def _class(model: nn.Module) -> str:
    """Class of a model, out of what wraps it."""
    inner = model
    while len(inner._modules) == 1 and (found := {OUTSIDE, *INSIDE} & inner._modules.keys()):
        inner = inner.get_submodule(found.pop())
    return type(inner).__name__.removeprefix("FSDP")


def _dtypes(watching: Watching, sharded: bool) -> dict[str, str]:
    weights = {shard.source.dtype for shard in watching.shards.values() if shard.trained}
    main, grads = _coarsest(weights), _coarsest(watching.grads)
    compute = _coarsest(watching.compute or {next(iter(watching.params.values()))[1].dtype})
    wire = min(compute, grads, key=COARSE.index) if sharded else grads
    named = {"compute": compute, "main_params": main, "main_grads": grads, "grad_comm": wire, "grad_accum": wire}
    return {"name": compute, **named}


def _coarsest(dtypes: Iterable[torch.dtype]) -> str:
    names = {NAMES[dtype] for dtype in dtypes if dtype in NAMES}
    return min(names, key=COARSE.index, default="fp32")


def _optimizer(watching: Watching) -> dict[str, Any]:
    """Optimizer's rule by name and constants; `ext` for one that verdicts do not know."""
    groups = [group for optimizer in watching.optimizers for group in optimizer.param_groups]
    kinds = {RULES.get(type(optimizer), "ext") for optimizer in watching.optimizers}
    first = groups[0] if groups else {}
    decays = {float(group.get("weight_decay", 0.0)) for group in groups} - {0.0}
    alike = all(group.get(key) == first.get(key) for group in groups for key in SHARED)
    plain = not any(group.get(key) for group in groups for key in OTHERWISE)
    known = len(kinds) == 1 and alike and plain and len(decays) < 2 and watching.is_fresh
    return {
        "name": kinds.pop() if known else "ext",
        "target": "+".join(type(each).__name__ for each in watching.optimizers) or None,
        "lr": float(first.get("lr", 0.0)),
        "betas": [float(beta) for beta in first.get("betas", (0.9, 0.999))],
        "eps": float(first.get("eps", 1e-8)),
        "momentum": float(first.get("momentum", 0.0)),
        "weight_decay": max(decays, default=0.0),
        "clip_norm": None,  # gradients are seen as the optimizer takes them, after any clipping
    }


def config(parts: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Configuration of a run. Args: parts: facts of every rank. steps: of every step what all ranks were fed."""
    found, first = dict(parts[0]["config"]), steps[0] if steps else {}
    if any(each["repeats"] for each in steps):  # a rule is of one update from a step's first weights
        found["optimizer"]["name"] = "ext"
    shapes = {each["name"]: each["shape"] for part in parts for each in part["tensors"]}
    found["model"]["parameters"] = sum(math.prod(shape) for shape in shapes.values())
    copies = max(1, first.get("readers", 1))
    # of most steps: a pipeline's first one has a forward more, by which it learns shapes
    microbatches = int(statistics.median_low([each["microbatches"] for each in steps] or [1]))
    rows = max(1, first.get("rows", 0) // (copies * microbatches))
    batch = rows * copies * microbatches
    tokens = max(batch, int(first.get("tokens") or 0))
    inner = max(found[WATCHED]["inner"], tokens // (copies * microbatches))
    told = {"data": bool(first.get("digest")), "inner": inner}
    return found | {
        WATCHED: found[WATCHED] | told,
        "data": {"kind": "ext", "seq_len": tokens // batch},
        "mesh": {"world_size": copies, "tp": 1, "dp_outer": 1},
        "train": {"steps": len(steps), "global_batch_size": batch, "microbatch_size": rows, "seed": 0, "replicate": 0},
        "study": {"name": name.partition("/")[0]},
    }


def write_config(path: Path, values: Mapping[str, Any]) -> None:
    """Write JSON, which is YAML but for numbers without a point: YAML 1.1 takes 1e-05 for a text."""
    text = re.sub(r'^( *(?:"[^"]*": )?-?\d+)e', r"\1.0e", json.dumps(values, indent=1), flags=re.MULTILINE)
    write_atomic(path / "config.yaml", text + "\n")


def write_provenance(path: Path, parts: Sequence[Mapping[str, Any]]) -> None:
    first = parts[0]
    origin = {
        WATCHED: VERSION,
        "sources_digest": WATCHED,
        "versions": first["versions"],
        **first["machine"],
        "hosts": [each["host"] for each in parts],
        "device": first["device"],
        "threads_per_rank": first["threads_per_rank"],
    }
    write_json(path / "provenance.json", origin)
