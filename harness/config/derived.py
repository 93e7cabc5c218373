"""Numbers that follow from a configuration, and environments of its ranks. Pure functions of the typed root.

Some variables are read at process start, and only the launcher can set them. The rest are read when torch is loaded, so
that a rank under torchrun or srun can set them itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from harness.config.own import capabilities_of
from harness.config.schema import (
    Config,
    Device,
    Dtype,
    ModelConfig,
    ModelFamily,
    NcclLog,
    Numerics,
    OptimizerName,
    Registration,
    Schedule,
    SharpAxis,
    WandbMode,
)
from harness.fsdp import options
from harness.store.wandb_run import VARIABLE


def global_microbatches(cfg: Config) -> int:
    """M: microbatches of one step over all ranks. Exact only where the batch rules hold."""
    return cfg.train.global_batch_size // cfg.train.microbatch_size


def data_ranks(cfg: Config) -> int:
    """Ranks with data of their own: world_size / tp, at least 1. Exact only where mesh.tp divides mesh.world_size."""
    return max(1, cfg.mesh.world_size // max(1, cfg.mesh.tp))


def microbatches_per_rank(cfg: Config) -> int:
    """k: microbatches of one step on each rank. Exact only where the batch rules hold."""
    return global_microbatches(cfg) // data_ranks(cfg)


def tokens_per_step(cfg: Config) -> int:
    return cfg.train.global_batch_size * cfg.data.seq_len


CUDA_CPUS = 4


def cpus_per_rank(cluster: Mapping[str, Any]) -> int:
    least = CUDA_CPUS if cluster["device"] == Device.cuda.name else 1
    return int(cluster["cpus_per_rank"] or max(least, cluster["threads_per_rank"]))


def devices_per_node(cfg: Config) -> int:
    """Devices on each machine. Exact only where world_size is divisible by nodes."""
    return -(-(cfg.mesh.world_size // cfg.cluster.nodes) // cfg.cluster.ranks_per_device)


def accumulate_dtype(cfg: Config) -> Dtype:
    return cfg.dtype.grad_accum or own_sum(cfg.dtype.grad_comm, capabilities_of(cfg).sums_itself)


def own_sum(wire: Dtype, sums_itself: bool) -> Dtype:
    """Default of `dtype.grad_accum`: the wire's dtype, and at least fp32 where an engine sums itself."""
    return Dtype.fp32 if sums_itself and wire.bytes < 4 else wire


def engine_options(cfg: Config) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, each in options.OPTIONS.items():
        if each.setting:
            opposite, _, path = each.setting.rpartition(" ")
            value = attrgetter(path)(cfg)
            found[name] = not value if opposite else value
    if found["watchdog_timeout_s"] is None:  # sooner than the watch that ends a run without a step
        found["watchdog_timeout_s"] = 0.8 * cfg.launch.hang_timeout_s
    return found


def fixed_buffers(cfg: Config) -> bool:
    return options.fixed_buffers(engine_options(cfg))


def wants_infiniband_sharp(cfg: Config) -> bool:
    return cfg.sharp.group.is_asked and cfg.sharp.infiniband


ODD_KERNEL, ODD_RANK, ODD_CELLS, ODD_TAPS = 3, 7, 3 * 5, 3
"""Fixed sizes of the odd family: positions of the convolution, width of the low-rank path, positional cells, and
weights of each mixture."""

ODD_SIDE_MODULUS = 3
"""Sequences whose first token is a multiple of it take the odd family's side branch."""


def parameter_count(cfg: Config) -> int:
    return model_parameters(cfg.model)


def model_parameters(m: ModelConfig) -> int:
    """Weights of a model of these sizes; of the user's own as counted before, 0 where that failed."""
    if m.family is ModelFamily.ext:
        return m.parameters or 0
    if m.family is not ModelFamily.odd:
        is_moe, kv_dim = m.family is ModelFamily.moe, m.dim // max(1, m.num_heads) * m.num_kv_heads
        experts, embeddings = m.num_experts if is_moe else 1, m.vocab_size * (1 if m.tie_embeddings else 2)
        block = 2 * m.dim + 2 * kv_dim + 3 * experts * m.ffn_dim + experts * is_moe + 2
        return (m.num_layers * block + embeddings + 1) * m.dim
    square, vectors = m.dim * m.dim, m.dim
    convolution = ODD_KERNEL * square + vectors
    feed_forward = 2 * m.dim * m.ffn_dim + m.ffn_dim
    block = vectors + convolution + 2 * ODD_RANK * m.dim + ODD_TAPS + feed_forward + 1 + square + vectors
    frozen = square + vectors
    root = m.vocab_size * m.dim + m.vocab_size + ODD_CELLS * m.dim + ODD_TAPS + vectors + 1
    return m.num_layers * block + frozen + root


def may_leave_unused(cfg: Config) -> bool:
    """True if a microbatch may leave trained parameters without a gradient, differently on each rank."""
    m = cfg.model
    if m.family is ModelFamily.moe:
        return m.skip_idle and m.experts_per_token < m.num_experts
    return m.skip_idle and m.family in (ModelFamily.odd, ModelFamily.ext)


def optimizer_states(cfg: Config) -> int:
    """Buffers of the optimizer, each the size of the main weights: 2 for Adam, 1 for SGD with momentum, else 0.

    1 for Muon, whose embeddings and heads have 2, under the AdamW beside it.
    """
    if cfg.optimizer.name in (OptimizerName.sgd, OptimizerName.muon):
        return int(cfg.optimizer.name is OptimizerName.muon or cfg.optimizer.momentum > 0)
    return 2


def lr_at(config: Config, step: int) -> float:
    """Learning rate of step `step` (counted from 1): linear warm-up, then the schedule.

    Warm-up reaches the peak at step `warmup_steps`; cosine and linear reach `min_lr_ratio` of it at the last step.
    """
    train, peak = config.train, config.optimizer.lr
    if step <= train.warmup_steps:
        return peak * step / train.warmup_steps
    if train.schedule is Schedule.constant:
        return peak
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    remaining = 0.5 * (1.0 + math.cos(math.pi * done)) if train.schedule is Schedule.cosine else 1.0 - done
    return peak * (train.min_lr_ratio + (1.0 - train.min_lr_ratio) * remaining)


HEAP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""Size from which glibc maps a block by itself, and returns free memory to the kernel.

Engines free and take buckets all the time; with glibc's own thresholds each may cost its pages anew.
"""


def run_environment(config: Config, attempt: Path | None = None) -> dict[str, str]:
    """Variables of every rank of a cell.

    Args: attempt: folder of logs; None logs nothing (a preview, a process that only imports).
    """
    of_the_process = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **HEAP}
    return of_the_process | library_environment(config, attempt)


def library_environment(config: Config, attempt: Path | None = None) -> dict[str, str]:
    threads = str(config.cluster.threads_per_rank)
    variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if config.cluster.device is Device.cuda and config.numerics.mode is not Numerics.fast:
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reruns alike only with a fixed workspace
    if config.cluster.interface is not None:
        variables |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), config.cluster.interface)
    return variables | network_environment(config, attempt)


NCCL_LOG = "nccl.%h.%p.log"

SHARED_DEVICE_CTAS = 2
"""Most thread blocks of a collective with several ranks on a device."""


def network_environment(config: Config, attempt: Path | None = None) -> dict[str, str]:
    """Variables of NCCL, torch and SHARP; empty on CPU.

    [Note: Left alone] `sharp=default` sets nothing, so that a run is as without this harness: NCCL uses NVLS at will,
    and the user's exports stand. But a promised order of arithmetic excludes sums in switches. Several ranks on one
    device (NCCL 2.30) have no multicast, and few thread blocks each: one whose collective fills the device leaves no
    room for its peer.
    """
    if config.cluster.device is not Device.cuda:
        return {}
    sharp, ub, log = config.sharp, config.nccl_ub, config.launch.nccl_log
    is_decided = sharp.group is not SharpAxis.default or config.numerics.mode is not Numerics.fast
    nvlink, shares = sharp.group.is_asked and sharp.nvlink, config.cluster.ranks_per_device > 1
    chosen: dict[str, object] = {
        # 2 is "where the devices have it"; 1 would claim it of any device and fail while a communicator is made
        "NCCL_NVLS_ENABLE": 0 if shares else (2 if nvlink else 0) if is_decided else None,
        # NCCL reads this for each communicator anew: whoever creates the one that owns SHARP raises it meanwhile
        "NCCL_COLLNET_ENABLE": 0 if is_decided else None,
        "NCCL_MAX_CTAS": SHARED_DEVICE_CTAS if shares else None,
        "NCCL_MULTI_RANK_GPU_ENABLE": 1 if shares else None,
        # torch would register every tensor of every collective by itself, beside the engine's pool
        "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": None if ub.mode is Registration.none else 0,
    }
    if wants_infiniband_sharp(config):
        chosen["SHARP_COLL_ENABLE_SAT"] = int(sharp.streaming)
        # 3 tells whether the switches gave the job a tree
        chosen["SHARP_COLL_LOG_LEVEL"] = None if log is NcclLog.none else 3
    if log is not NcclLog.none and attempt is not None:
        kinds = "INIT,ENV,NET,GRAPH,NVLS,REG" + ",TUNING" * (log is NcclLog.choices)
        file = f"{str(attempt.absolute()).replace('%', '%%')}/{NCCL_LOG}"
        chosen |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": kinds, "NCCL_DEBUG_FILE": file}
    return {name: str(value) for name, value in chosen.items() if value is not None}


def wandb_mode(asked: WandbMode, environment: Mapping[str, str]) -> WandbMode:
    """Effective mode: `WANDB_MODE` chooses among copies, but never turns one on.

    Raises `ValueError`: the variable holds no mode. `shared`, under which processes write one run, is none here.
    """
    word = environment.get(VARIABLE, "").strip().lower()
    if asked is WandbMode.disabled or not word:
        return asked
    if word not in WandbMode.__members__:
        raise ValueError(f"{VARIABLE}={word} is none of {', '.join(WandbMode.__members__)}")
    return WandbMode[word]
