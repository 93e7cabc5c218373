"""The groups `model`, `engine`, `nccl_ub`, `sharp` and `cluster`, and how a setting declares its range.

Settings of NCCL are in the signature: who sums, and in what order, can change numbers. `harness.fsdp.options` declares
the engine's own options, with the sentences of fields that have none here.
"""

from __future__ import annotations

import typing
from dataclasses import astuple, dataclass, field, fields, make_dataclass
from enum import StrEnum
from typing import Annotated, Any, TypeVar, cast

from harness.config.capabilities import EngineName as EngineName
from harness.fsdp import options
from harness.fsdp.options import OPTIONS, EngineOptions, Options, Registration, SharpAxis

T = TypeVar("T")

COUNT = 2**31 - 1
SEED = 2**63 - 1


class Range(options.Range):
    """Range and unit of a number, declared at its field: `Annotated[int, Range(1, 64, "ranks")]`."""

    def __get_pydantic_core_schema__(self, kind: Any, handler: Any) -> Any:
        ends = {"gt" if self.above else "ge": self.low, "lt" if self.below else "le": self.high}
        return {"type": "int" if kind is int else "float", "strict": True, **ends}


class _Strict:
    """No number is true, and none is false."""

    def __get_pydantic_core_schema__(self, kind: Any, handler: Any) -> Any:
        return {"type": "bool", "strict": True}


Flag = Annotated[bool, _Strict()]


def of_option(name: str) -> Range:
    declared = OPTIONS[name].range
    assert declared is not None
    return Range(*astuple(declared))


class Only:
    """Condition of a setting's effect, declared at its field: another setting has one of these values.

    but: instead of values, the one it must not have. choose: option or setting that makes it so.
    """

    def __init__(self, path: str, *values: Any, but: Any = ..., choose: str = "") -> None:
        self.path, self.values, self.but = path, values, but
        named = f"{path}=true" if values == (True,) else ""
        self.choose = choose or named or " or ".join(f"{path.partition('.')[0]}={value}" for value in values)

    def holds(self, value: Any) -> bool:
        plain = getattr(value, "name", value)
        return plain in self.values if self.but is ... else plain != self.but


SLURM = Only("cluster.backend", "slurm")
CUDA = Only("cluster.device", "cuda", choose="cluster.device=cuda")
UB = Only("nccl_ub.mode", but="none", choose="nccl_ub=auto")
SHARP = Only("sharp.group", "dp", "dp_outer", choose="sharp=dp")
DECODER = Only("model.family", "llama", "moe", "ext", choose="model=tiny")
MOE = Only("model.family", "moe", "ext", choose="model=moe")


class Group:
    """Base of groups of settings, with pydantic's configuration."""

    __pydantic_config__: typing.ClassVar = {"extra": "forbid", "coerce_numbers_to_str": True}


ModelFamily = StrEnum("ModelFamily", "llama moe odd ext")


@dataclass
class ModelConfig(Group):
    """The model that is trained: a family of modules and its sizes."""

    name: str = "tiny"
    """Label used in run names and reports."""
    family: ModelFamily = ModelFamily.llama
    """Family of the model: llama is a Llama-style decoder, moe the same with routed experts, odd a set of
    awkward cases, and ext your own class."""
    target: Annotated[str | None, Only("model.family", "ext")] = None
    """Your own model, as package.module:Class (ext)."""
    parameters: Annotated[int, Range(0, 2**50, "weights")] | None = None
    """Number of weights of your own model (ext). It is counted before ranks start and cannot be set."""
    vocab_size: Annotated[int, Range(2, COUNT, "token ids")] = 256
    """Number of token ids; 256 for bytes."""
    dim: Annotated[int, Range(1, 2**20, "features")] = 64
    """Width of the residual stream."""
    num_layers: Annotated[int, Range(1, 10_000, "blocks")] = 4
    """Number of transformer blocks."""
    num_heads: Annotated[int, Range(1, 2**16, "heads"), DECODER] = 4
    """Number of query heads; it must divide `dim`."""
    num_kv_heads: Annotated[int, Range(1, 2**16, "heads"), DECODER] = 2
    """Number of key and value heads (grouped-query attention); it must divide `num_heads`."""
    ffn_dim: Annotated[int, Range(1, 2**22, "features")] = 176
    """Hidden width of the SwiGLU feed-forward."""
    max_seq_len: Annotated[int, Range(1, 2**24, "tokens")] = 2048
    """Longest sequence that the rotary table covers."""
    rope_theta: Annotated[float, Range(0, 10**12, above=True), DECODER] = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: Annotated[float, Range(0, 1, above=True)] = 1.0e-5
    """Epsilon inside RMSNorm."""
    tie_embeddings: Annotated[Flag, DECODER] = False
    """Tie the output projection to the embedding matrix."""
    activation_checkpointing: Flag = False
    """Recompute the activations of each block in the backward."""
    num_experts: Annotated[int, Range(1, 2**16, "experts"), MOE] = 4
    """Number of experts (feed-forwards) in every block (moe)."""
    experts_per_token: Annotated[int, Range(1, 2**16, "experts"), MOE] = 2
    """Number of experts to which each token is routed (moe)."""
    skip_idle: Annotated[Flag, Only("model.family", "moe", "odd", "ext")] = True
    """Skip a part that no token of a microbatch uses (an expert, a side branch), so that its parameters get no gradient
    there (moe, odd). false: it runs on zero tokens, and its gradients are zeros. For ext: parts may be skipped."""
    repeat_unit: Annotated[Flag, Only("model.family", "odd", "ext", choose="model=odd")] = False
    """Run the first block a second time, after the last one (odd)."""
    init_std: Annotated[float, Range(0, 1_000)] = 0.02
    """Standard deviation of initial weights. For residual projections it is divided by sqrt(2 * num_layers)."""


def thawed(frozen: type[T]) -> type[T]:
    """Mutable dataclass with the same fields, its own before inherited ones, with the ranges of `OPTIONS`.

    The type checker still sees the frozen one.
    """
    hints = typing.get_type_hints(frozen)
    # mypy wants a dataclass here, and `type` is all that the caller can promise of what it thaws
    ordered = sorted(fields(frozen), key=lambda each: each.name not in frozen.__annotations__)  # type: ignore[arg-type]
    for name, option in OPTIONS.items():
        if name in hints and option.kind in (bool, int, float):
            bare: Any = Flag if option.kind is bool else Annotated[option.kind, of_option(name)]
            hints[name] = bare | None if option.optional else bare
    typed = [(each.name, hints[each.name], field(default=each.default)) for each in ordered]
    made = make_dataclass(frozen.__name__, typed, bases=(Group,), namespace={"__doc__": frozen.__doc__})
    made.__module__ = frozen.__module__
    return cast("type[T]", made)


@thawed
@dataclass(frozen=True)
class EngineConfig(EngineOptions):
    """Which engine, and what only some engines take."""

    name: EngineName = EngineName.native
    """Engine."""
    adapter: str | None = None
    """A class of your own that implements `harness.engines.protocol.Engine`, as `package.module:Class` (ext)."""


NcclLog = StrEnum("NcclLog", "none setup choices")
LossScale = StrEnum("LossScale", "none dynamic")


@dataclass
class NcclUbConfig(Group):
    """NCCL user buffers: collectives read and write the engine's buckets without a copy, on few thread blocks."""

    mode: Registration = Options.nccl_ub
    symmetric: Annotated[Flag, UB] = not Options.disable_symmetric_registration
    """Register buckets as symmetric windows, for which NCCL 2.27 has special kernels. false: they are
    registered only for NVLink SHARP and zero copy."""


@dataclass
class SharpConfig(Group):
    """SHARP: reductions inside NVLink switches and InfiniBand switches. Their order of sums is not guaranteed.

    default leaves both kinds to NCCL and to exported variables, as in other programs, and records what took effect.
    none turns both off, so that NCCL's thread blocks on the devices make all sums.
    """

    group: SharpAxis = SharpAxis.default
    """The communicator that uses InfiniBand SHARP; only one communicator of a run can."""
    nvlink: Annotated[Flag, SHARP] = True
    """Use NVLink SHARP (NVLS) for all communicators of the run, if group names an axis and the devices have it."""
    infiniband: Annotated[Flag, SHARP] = True
    """Use InfiniBand SHARP (CollNet) for the communicator that group names, if two or more machines share a switch."""
    streaming: Annotated[Flag, SHARP, Only("sharp.infiniband", True)] = True
    """Streaming aggregation of long messages (InfiniBand SHARP). A switch has room for two such flows."""


Backend = StrEnum("Backend", "local slurm")
Device = StrEnum("Device", "cpu cuda")


@dataclass
class ClusterConfig(Group):
    """Facts of the machine. Never part of the signature."""

    backend: Backend = Backend.local
    """Launcher of the ranks: this machine or SLURM."""
    device: Device = Device.cpu
    """Device of a rank: cpu with gloo, or cuda with NCCL."""
    nodes: Annotated[int, Range(1, 2**16, "machines"), SLURM] = 1
    """Machines of a cell; world_size is divided evenly over them."""
    threads_per_rank: Annotated[int, Range(1, 4_096, "threads")] = 1
    """Intra-op threads of a rank. Some sums depend on this number, so a verdict requires equal ones."""
    cpus_per_rank: Annotated[int, Range(1, 4_096, "processors"), SLURM] | None = None
    """Processors per rank that the scheduler is asked for. null: threads_per_rank, and at least 4 on CUDA, where NCCL,
    autograd and the checkpoint writer have threads of their own."""
    ranks_per_device: Annotated[int, Range(1, 64, "ranks"), CUDA] = 1
    """How many neighbouring ranks share a CUDA device (needs NCCL 2.30 or newer), to try several ranks on few devices.
    Their times do not apply to ranks with a device each."""
    device_memory: Annotated[float, Range(0, 10**6, "GiB", above=True)] | None = None
    """Memory of a rank's device for tensors, against which `plan` holds the peak of a step. null: against nothing."""
    interface: str | None = None
    """Network interface of gloo and NCCL (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), as ip addr shows it.
    null: loopback where all ranks are on one host; else gloo uses the one that leads to rank 0, and NCCL chooses."""
    partition: Annotated[str | None, SLURM] = None
    """SLURM partition."""
    account: Annotated[str | None, SLURM] = None
    """SLURM account."""
    qos: Annotated[str | None, SLURM] = None
    """SLURM quality of service."""
    time_min: Annotated[int, Range(1, 525_600, "minutes"), SLURM] = 60
    """Time limit of one attempt."""
    grace_s: Annotated[int, Range(0, 86_400, "seconds"), SLURM] = 120
    """How long before the time limit a run is asked to save and requeue."""
    mem_gb: Annotated[float, Range(0, 10**6, "GB"), SLURM] | None = None
    """Memory per node. null: the scheduler decides. 0: all memory, which an exclusive node does not imply."""
    gpus_per_node: Annotated[int, Range(0, 1_024, "devices"), SLURM] = 0
    """Devices per node that the scheduler is asked for."""
    setup: Annotated[list[str], SLURM] = field(default_factory=list)
    """Shell lines of the batch script before the ranks (module loads)."""
    teardown: Annotated[list[str], SLURM] = field(default_factory=list)
    """Shell lines of the batch script after the ranks, also if these failed. The job keeps the ranks' exit code."""
    array_parallelism: Annotated[int, Range(1, 1_000_000, "cells"), SLURM] | None = None
    """Cells of a job array that run at a time. null: no limit."""
    sharp_network: Annotated[str | None, SLURM] = "sharp"
    """Value of sbatch's --network for a cell that uses InfiniBand SHARP. null: the option is left out."""
    flags: Annotated[list[str], SLURM] = field(default_factory=list)
    """Further sbatch options without a value, such as exclusive."""
    additional: Annotated[dict[str, str], SLURM] = field(default_factory=dict)
    """Further sbatch options, as `name: value`, such as `gres: gpu:h100:8` if a site has no --gpus-per-node."""
    srun_args: Annotated[list[str], SLURM] = field(default_factory=list)
    """Further arguments of the srun that starts the ranks, such as --mpi=none."""
    python: Annotated[str | None, SLURM] = None
    """Shell words that start Python in a job. null: the path of the interpreter that made the request."""
