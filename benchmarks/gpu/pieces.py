"""The pieces of the acceptance, most valuable first. Each runs cells as a user would, and says what came of them.

A piece fails where a run fails, a verdict is not among those that its cells owe, or something that must be there is
not. What it found is returned in plain values; `benchmarks/pages/gpu.py` makes a page of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.gpu.lab import Facts, Lab, Setting, last_object

ALL = "sharding=no_shard,optim,optim_grads,optim_grads_params"
SHARDED = "sharding=optim_grads,optim_grads_params"
AGREES = ("EQUAL", "EQUIVALENT")
SAME = ("EQUAL",)
PREEMPTED = 75


class Piece(NamedTuple):
    """A part of the acceptance that ends within one limit, or goes on where it was cut off."""

    name: str
    asks: str
    """What it finds out, in a sentence."""
    body: Callable[[Lab], Facts]
    shares: bool = False
    """Whether several ranks share the device, which not every NCCL can."""


def small(setting: Setting) -> list[str]:
    if setting.tiny:
        sizes = ("model.dim=32", "model.num_layers=2", "model.ffn_dim=64", "data.seq_len=16", "train.steps=4")
        return [*sizes, "train.global_batch_size=8", "train.microbatch_size=2", "ckpt=none"]
    return ["train.steps=12", "train.global_batch_size=16", "train.microbatch_size=4", "ckpt=none"]


def imports(lab: Lab) -> Facts:
    done = lab.call("benchmarks/gpu/look.py", lab.setting.device)
    told = last_object(done.stdout)
    if done.returncode or not told:
        broken = {name: why for name, why in told.get("imports", {}).items() if why} or done.stderr[-800:]
        lab.failed.append({"command": lab.commands[-1], "words": f"devices {told.get('devices')}; {broken}"})
    return told


def one_rank(lab: Lab) -> Facts:
    common = ["mesh=one", *small(lab.setting)]
    lab.train("engine=single", "dtype=fp64", *common)
    for dtype in ("fp32", "bf16"):
        lab.train("engine=native", ALL, f"dtype={dtype}", *common)
        lab.train("engine=fsdp2", SHARDED, f"dtype={dtype}", *common)
        lab.train("engine=ddp", f"dtype={dtype}", *common)
        lab.train("engine=single", f"dtype={dtype}", *common)
    return {"verdicts": _against_fp64(lab)}


def odd(lab: Lab) -> Facts:
    common = ["mesh=one", *small(lab.setting)]
    awkward = [word for word in common if not word.startswith("model.")]
    lab.train("engine=single", "model=odd", "dtype=fp64", *awkward)
    lab.train("engine=native", "model=odd", ALL, *awkward)
    lab.train("engine=ddp", "model=odd", *awkward)
    found = {"verdicts": _against_fp64(lab)}
    lab.train("engine=native", "numerics=deterministic", "dtype=bf16", "train.replicate=0,1", *common)
    twice = [lab.runs(numerics__mode="deterministic", train__replicate=number) for number in (0, 1)]
    if not all(twice):
        return found
    return {**found, "again": lab.verdicts(twice[0][0], twice[1], wanted=SAME)}


def interrupted(lab: Lab) -> Facts:
    common = [word for word in small(lab.setting) if not word.startswith("ckpt")]
    cell = ["mesh=one", "numerics=deterministic", "ckpt.every=2", *common]
    lab.train(*cell)
    again = [*cell, "train.replicate=1", "launch.preempt_at=2"]
    codes = [lab.train(*again, must=False) for _ in range(2)]
    if codes != [PREEMPTED, 0]:
        lab.failed.append({"command": lab.commands[-1], "words": f"exit codes {codes}, not {PREEMPTED} and 0"})
    whole, resumed = (lab.runs(train__replicate=number) for number in (0, 1))
    return {"exit_codes": codes, "verdicts": lab.verdicts(whole[0], resumed, wanted=SAME) if whole else []}


def sanitizer(lab: Lab) -> Facts:
    short = [word for word in small(lab.setting) if not word.startswith("train.steps")]
    watch = {"TORCH_CUDA_SANITIZER": "1"} if lab.setting.on_cuda else {}  # a torch without CUDA fails under it
    codes = {}
    for sharding in ALL.partition("=")[2].split(","):
        watched = ["mesh=one", f"sharding={sharding}", "train.steps=2", "train.warmup_steps=0", "measure=light"]
        codes[sharding] = lab.train(*watched, *short, environment=watch)
    return {"exit_codes": codes, "watched": lab.setting.on_cuda}


def times(model: str, batch: int, seq_len: int, blocks: int) -> Callable[[Lab], Facts]:
    """Step time, exposed communication and memory at one size, block by block, every arm once in each."""

    def body(lab: Lab) -> Facts:
        sizes = [f"model={model}", f"data.seq_len={seq_len}", f"train.global_batch_size={batch}"]
        steps = ["train.steps=30", "measure.warmup_steps=10"]
        if lab.setting.tiny:
            sizes = [word for word in small(lab.setting) if word.startswith(("model", "data", "train.global"))]
            steps = ["train.steps=8", "measure.warmup_steps=4"]
        micro = f"train.microbatch_size={batch if not lab.setting.tiny else 8}"
        common = ["mesh=one", "measure=bench", "dtype=bf16", "data=synthetic", micro, *sizes, *steps]
        arms = [("engine=native", ALL), ("engine=ddp", ""), ("engine=fsdp2", SHARDED)]
        if not lab.call("-c", "import megatron_fsdp").returncode:
            arms.append(("engine=megatron_fsdp", "sharding=no_shard,optim"))
        lab.so_far = lambda: {"rows": _rows(lab)}
        for block in range(1 if lab.setting.tiny else blocks):
            for engine, sharding in arms[block % len(arms) :] + arms[: block % len(arms)]:  # no arm is always first
                lab.train(*filter(None, (engine, sharding)), *common, f"train.replicate={block}")
        return lab.so_far()

    return body


def shared(lab: Lab) -> Facts:
    """Several ranks on one device against one process in fp64: collectives, groups, orders and dtypes of every path."""
    common = [*_several(lab), *small(lab.setting)]
    outer = ["mesh.dp_outer=2"] if lab.setting.ranks >= 4 else []
    lab.train("engine=single", "dtype=fp64", "mesh=one", *small(lab.setting))
    for dtype in ("fp32", "bf16_comm"):
        lab.train("engine=native", ALL, f"dtype={dtype}", *common)
        if outer:
            lab.train("engine=native", "sharding=hsdp,hfsdp", f"dtype={dtype}", *outer, *common)
    lab.train("engine=native", ALL, "numerics=exact", *common)
    lab.train("engine=fsdp2", SHARDED, *common)
    lab.train("engine=ddp", *common)
    return {"verdicts": _against_fp64(lab)}


def user_buffers(lab: Lab) -> Facts:
    """Registered buffers and symmetric windows: the same bits, and what NCCL's own log says of them."""
    common = ["engine=native", "launch.nccl_log=choices", *_several(lab), *small(lab.setting)]
    lab.train(*common, "nccl_ub=none")
    lab.train(*common, "nccl_ub=auto,manual")
    lab.train(*common, "nccl_ub=auto", "nccl_ub.symmetric=false")
    plain = lab.runs(nccl_ub__mode="none")
    arms = [run for run in lab.runs() if run not in plain]
    told = {run.name: lab.told(run, "summary.json").get("network", {}) for run in (*plain, *arms)}
    return {"network": told, "verdicts": lab.verdicts(plain[0], arms, wanted=SAME) if plain else []}


def eight_bits(lab: Lab) -> Facts:
    done = lab.call("benchmarks/gpu/products.py", lab.setting.device)
    if done.returncode:
        lab.failed.append({"command": lab.commands[-1], "exit_code": done.returncode, "words": done.stderr[-2000:]})
    sizes = [word for word in small(lab.setting) if not word.startswith("model.")]
    common = ["mesh=one", "model=tiny_wide", *sizes]  # sizes that every recipe takes
    lab.train("engine=single", "dtype=fp64", *common)
    codes = {}
    for recipe in ("fp8_current", "fp8_block", "mxfp8"):
        codes[recipe] = lab.train(
            f"dtype={recipe}", "sharding=optim_grads_params", *common, must=not lab.setting.on_cuda
        )
    verdicts = _against_fp64(lab)
    products = json.loads(done.stdout) if not done.returncode else []
    return {"products": products, "exit_codes": codes, "verdicts": verdicts}


def hang(lab: Lab) -> Facts:
    limit_s = 60 if lab.setting.on_cuda else 12
    stall = ["measure.callbacks=[benchmarks.gpu.stall:Stall]", f"launch.hang_timeout_s={limit_s}", "ckpt=none"]
    code = lab.train(*_several(lab), *stall, *small(lab.setting)[:-1], must=False)
    (run,) = lab.runs() or [None]
    status = {} if run is None else lab.told(run, "status.json")
    if code != 1 or status.get("state") != "failed":
        lab.failed.append({"command": lab.commands[-1], "words": f"exit code {code}, status {status}"})
    return {"exit_code": code, "reason": status.get("reason", "")}


PIECES = (
    Piece("imports", "Does everything load, and which devices and versions are there?", imports),
    Piece("one_rank", "Do native, FSDP2, DDP and plain torch agree with fp64 on one rank?", one_rank),
    Piece("odd", "Do awkward modules train, and does a deterministic run repeat its bits?", odd),
    Piece("interrupted", "Is a run that was stopped resumed to the bit?", interrupted),
    Piece("sanitizer", "Does torch's stream sanitizer find an unordered access in a step?", sanitizer),
    Piece("times_125m", "What does a step cost at 125M weights, in time and memory?", times("gpt_125m", 16, 1024, 5)),
    Piece("shared", "Do several ranks on one device agree with fp64 over NCCL?", shared, shares=True),
    Piece(
        "user_buffers",
        "Are user buffers and symmetric windows used, with the same bits?",
        user_buffers,
        shares=True,
    ),
    Piece("eight_bits", "Do FP8 products train where they are built?", eight_bits),
    Piece("hang", "Is a run with a stopped rank ended, with a reason?", hang, shares=True),
    Piece("times_1b", "What does a step cost at 1B weights, in time and memory?", times("llama_1b", 4, 2048, 5)),
)
"""In the order in which they run. Each of the 35 processes at 1B weights makes, gathers and hashes them for longer than
it trains: that piece comes last, or it would take the minutes of all behind it."""


def _several(lab: Lab) -> list[str]:
    """Several ranks: on one device where there is one, as processes on a CPU."""
    ranks = lab.setting.ranks
    return [f"mesh.world_size={ranks}", *([f"cluster.ranks_per_device={ranks}"] if lab.setting.on_cuda else [])]


def _against_fp64(lab: Lab, apart: Sequence[Path] = ()) -> list[Facts]:
    control = [run for run in lab.runs(engine__name="single") if run in lab.runs(dtype__compute="fp64")]
    arms = [run for run in lab.runs(numerics__mode="fast") if run not in (*control, *apart)]
    arms += lab.runs(numerics__mode="exact")
    done = [run for run in arms if lab.told(run, "status.json")["state"] == "done"]
    return lab.verdicts(control[0], done, wanted=AGREES) if control else []


def _rows(lab: Lab) -> list[Facts]:
    """Each arm over its blocks: medians, and the rank's device memory."""
    from harness.bench.record import Process, load

    arms: dict[str, list[Process]] = {}
    for path in lab.runs():
        process = load(path)
        if isinstance(process, Process):
            arms.setdefault(process.facts["arm"], []).append(process)
    return sorted((_row(blocks) for blocks in arms.values()), key=lambda row: (row["engine"], row["sharding"]))


def _row(blocks: list[Any]) -> Facts:
    config = blocks[0].config
    exposed = [block.facts["parts"]["exposed_comm_s"] for block in blocks]
    return {
        "engine": config["engine"]["name"],
        "sharding": config["sharding"]["strategy"],
        "blocks": len(blocks),
        "step_ms": 1e3 * median(block.median_s for block in blocks),
        "step_ms_by_block": {str(block.facts["block"]): 1e3 * block.median_s for block in blocks},
        "exposed_comm_ms": None if None in exposed else 1e3 * median(exposed),
        "peak_bytes": _largest(block.facts["peak_bytes"] for block in blocks),
        "persistent_bytes": _largest(block.facts["persistent_bytes"] for block in blocks),
        "outside_bytes": _largest(block.facts["outside_bytes"] for block in blocks),
    }


def _largest(values: Any) -> int | None:
    return max((value for value in values if value is not None), default=None)


def files(out: Path) -> dict[str, Path]:
    return {piece.name: out / f"{piece.name}.json" for piece in PIECES}
