"""Rules on this machine before ranks start: devices, memory, disk, scheduler, optional packages.

Nothing is written.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from harness.config.captured import captured
from harness.config.derived import may_leave_unused, state_bytes
from harness.config.errors import Violation
from harness.config.rank_environment import visible_devices
from harness.config.rules.request import Request, rule
from harness.config.schema import Backend, CkptPolicy, Config, Device, EngineName, Registration, WandbMode
from harness.config.wandb_mode import has_key, server, wandb_mode
from harness.store import commands, interpreter
from harness.store.provenance import versions
from harness.store.screen import counted, size

ALLOCATORS = ("megatron", "apex")


@rule("mesh.world_size", "cluster.ranks_per_device")
def devices_exist(request: Request) -> Iterator[Violation]:
    c, ranks = request.config.cluster, request.config.mesh.world_size
    if c.backend is not Backend.local or c.device is not Device.cuda:
        return
    found = len(visible_devices())
    if found * c.ranks_per_device < ranks:
        share = f"cluster.ranks_per_device={-(-ranks // found)}" if found else ""
        fix = f"mesh.world_size={found}, or {share} (NCCL 2.30)" if found else "cluster.device=cpu, or cluster=slurm"
        each = f", cluster.ranks_per_device={c.ranks_per_device}" if c.ranks_per_device > 1 else ""
        problem = f"this process may use {counted(found, 'CUDA device')} for {counted(ranks, 'rank')}{each}"
        yield Violation("cluster.device=cuda", problem, "cpu, cuda", fix)


@rule("cluster.threads_per_rank", "mesh.world_size")
def threads_have_processors(request: Request) -> Iterator[Violation]:
    c, have = request.config.cluster, os.cpu_count() or 1
    if c.backend is Backend.local and c.threads_per_rank > have:
        fix = f"cluster.threads_per_rank={max(1, have // request.config.mesh.world_size)}"
        yield request.wrong("cluster.threads_per_rank", "is more than this machine's processors", f"1 to {have}", fix)


@rule()
def scheduler_exists(request: Request) -> Iterator[Violation]:
    c = request.config.cluster
    if c.backend is Backend.slurm and not request.config.launch.dry_run and shutil.which("sbatch") is None:
        yield Violation(
            "cluster.backend=slurm", "there is no sbatch on PATH", "local, slurm", "cluster=local, or a login node"
        )


@rule()
def torch_is_installed(request: Request) -> Iterator[Violation]:
    c = request.config
    here = c.cluster.backend is Backend.local and not c.launch.dry_run
    if here and importlib.util.find_spec("torch") is None:
        yield Violation("cluster.backend=local", f"{sys.executable} lacks torch", fix=interpreter.REMEDY)


@rule()
def project_has_a_name(request: Request) -> Iterator[Violation]:
    project = request.config.wandb.project
    if not 0 < len(project) <= 128 or set(project) & set(r"/\#?%:"):
        choices, fix = r"1 to 128 characters without / \ # ? % :", "wandb.project=sharded-training"
        yield request.wrong("wandb.project", "is not a name that W&B takes", choices, fix)


@rule()
def wandb_can_start(request: Request) -> Iterator[Violation]:
    try:
        mode = wandb_mode(request.config.wandb.mode, os.environ)
    except ValueError as error:
        yield request.wrong("wandb.mode", str(error), fix="unset WANDB_MODE, or wandb=disabled")
        return
    if mode is WandbMode.disabled:
        return
    if importlib.util.find_spec("wandb") is None:
        fix = "wandb=disabled, or pip install wandb"
        yield request.wrong("wandb.mode", "the package wandb is not installed", fix=fix)
    elif mode is WandbMode.online and not (request.config.launch.dry_run or has_key(os.environ)):
        problem = f"neither WANDB_API_KEY nor ~/.netrc holds a key for {server(os.environ)}"
        fix = f"wandb login, or wandb=offline and `{commands.verb('sync')}` later"
        yield request.wrong("wandb.mode", problem, fix=fix)


@rule()
def engine_is_installed(request: Request) -> Iterator[Violation]:
    engine = request.config.engine.name
    can = request.can
    wanted = can.package
    if wanted is None:
        return
    name, _, version = wanted.partition("==")
    found = versions((name,)).get(name)
    if found != version:
        problem = f"needs {wanted}; " + (f"{name} {found} is installed" if found else f"{name} is not installed")
        yield Violation(f"engine={engine.name}", problem, fix=f"make peers, or {can.install}")


@rule()
def own_allocator_is_there(request: Request) -> Iterator[Violation]:
    """megatron-fsdp needs one of two packages, not its dependencies, to allocate user buffers.

    Checked for this machine, where there is NCCL.
    """
    config = request.config
    here = config.cluster.backend is Backend.local and config.cluster.device is Device.cuda
    asks = config.engine.name is EngineName.megatron_fsdp and config.nccl_ub.mode is not Registration.none
    if here and asks and not any(map(importlib.util.find_spec, ALLOCATORS)):
        yield request.wrong(
            "nccl_ub.mode",
            f"engine=megatron_fsdp registers with the allocator of {' or '.join(ALLOCATORS)}, and neither is installed",
            "none",
            "pip install megatron-core, or nccl_ub=none, or engine=native",
        )


@rule("model.skip_idle")
def torch_copes_with_idle_parameters(request: Request) -> Iterator[Violation]:
    """Parameters used on some ranks only depend on torch's version.

    Checked for this machine's torch, the default of jobs too.
    """
    config, least = request.config, request.can.idle_parameters_torch
    torch = versions(("torch",)).get("torch")
    brings_own = config.cluster.backend is not Backend.local and config.cluster.python is not None
    if least is None or torch is None or brings_own or tuple(map(int, torch.split(".")[:2])) >= least:
        return
    if may_leave_unused(config) and config.mesh.world_size > 1:
        yield request.wrong(
            "model.skip_idle",
            "lets a microbatch leave parameters without a gradient on some ranks only;"
            f" engine={config.engine.name.name} on torch {torch} then reduces other buckets there, and hangs",
            "false",
            f"model.skip_idle=false, or torch {least[0]}.{least[1]} and later, or engine=native",
        )


_SIZES = ("model.vocab_size", "model.dim", "model.num_layers", "model.num_heads", "model.num_kv_heads", "model.ffn_dim")


@rule(*_SIZES)
def model_fits_in_memory(request: Request) -> Iterator[Violation]:
    """One copy of main weights and optimizer state is the least that all ranks together keep; `plan` has all of it."""
    cfg = request.config
    if cfg.cluster.backend is not Backend.local or cfg.cluster.device is not Device.cpu:
        return
    import psutil

    need, have = state_bytes(cfg), psutil.virtual_memory().total
    if need > have:
        problem = f"needs {size(need)} for weights and optimizer alone; this machine has {size(have)}"
        yield Violation(f"model={cfg.model.name}", problem, fix="model=tiny, or a cluster with more machines")


@rule(*_SIZES)
def disk_takes_the_run(request: Request) -> Iterator[Violation]:
    cfg = request.config
    problem = room(Path(cfg.launch.root), 0 if cfg.launch.dry_run else written(cfg))
    if problem:
        yield request.wrong("launch.root", problem, fix="launch.root=A_WRITABLE_FOLDER_WITH_ROOM")


def room(root: Path, need: int) -> str:
    """Reason why `need` bytes cannot be written under `root`; empty if they can. Nothing is written."""
    try:
        folder = nearest(root)
        if not folder.is_dir():
            return f"{folder} is a file, not a folder"
        if not os.access(folder, os.W_OK | os.X_OK):
            return f"{folder} is not writable"
        free = free_bytes(folder)
    except OSError as error:
        return f"cannot be a folder: {error.strerror}"
    return f"{folder} has {size(free)} free, and the run writes about {size(need)}" if free < need else ""


LOGS_BYTES = 1 << 20
"""About the logs of a short run."""


def written(cfg: Config) -> int:
    """Bytes a run needs at once at least: captures, kept checkpoints and the one being written, and logs."""
    checkpoints = (cfg.ckpt.keep + 1) * state_bytes(cfg) if cfg.ckpt.policy is not CkptPolicy.none else 0
    return captured(cfg).num_bytes + checkpoints + LOGS_BYTES


def nearest(path: Path) -> Path:
    """Nearest existing folder. Raises `OSError`: a name is too long."""
    return next((each for each in (path, *path.parents) if each.exists()), Path("/"))


def free_bytes(path: Path) -> int:
    """Free bytes where `path` lies, or will lie; too high under quotas and thin volumes. Raises `OSError`."""
    return shutil.disk_usage(nearest(path)).free
