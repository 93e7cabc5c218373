"""The typed root of a cell: one dataclass a group, one sentence a field.

YAML under `conf/` holds values, this module types, defaults, ranges and units, `harness.config.rules` conditions
between fields. A group, its package and its dataclass field share one name. `harness.config.doc` reads the sentence
under a field for the generated guide and for error hints. Torch is never imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Annotated

from harness.config.groups import (
    COUNT,
    CUDA,
    SEED,
    Backend as Backend,
    ClusterConfig as ClusterConfig,
    Device as Device,
    EngineConfig as EngineConfig,
    EngineName as EngineName,
    Flag,
    Group,
    LossScale as LossScale,
    ModelConfig as ModelConfig,
    ModelFamily as ModelFamily,
    NcclLog as NcclLog,
    NcclUbConfig,
    Only,
    Range,
    SharpConfig,
    of_option,
)
from harness.fsdp.options import (
    Dtype as Dtype,
    Fp8 as Fp8,
    GradBuffer as GradBuffer,
    Numerics as Numerics,
    Options,
    OuterStrategy as OuterStrategy,
    Registration as Registration,
    SharpAxis as SharpAxis,
    Strategy as Strategy,
    Transport as Transport,
)

DYNAMIC = Only("dtype.loss_scale", "dynamic", choose="dtype.loss_scale=dynamic")
CKPT = Only("ckpt.policy", "last")
WANDB = Only("wandb.mode", "offline", "online")
BENCH = Only("measure.mode", "bench")
RECORD = Only("measure.mode", "record", choose="measure=default")
TRACE = Only("measure.trace_steps", but=[], choose="measure=trace")
VALIDATES = Only("measure.validate_every", but=0, choose="measure.validate_every=10")
OWN_OPTIMIZER = Only("optimizer.name", "ext")
ADAM = Only("optimizer.name", "adam", "adamw", "muon")
MUON = Only("optimizer.name", "muon")
TOKENS = Only("data.kind", "tokens")

FaultStrength = StrEnum("FaultStrength", "full middle weak")
DataKind = StrEnum("DataKind", "stdlib text tokens synthetic ext")
TokenDtype = StrEnum("TokenDtype", "uint16 uint32")
OptimizerName = StrEnum("OptimizerName", "sgd adam adamw muon ext")
AdjustLr = StrEnum("AdjustLr", "original match_rms_adamw")
Schedule = StrEnum("Schedule", "constant cosine linear")
CkptPolicy = StrEnum("CkptPolicy", "none last")
MeasureMode = StrEnum("MeasureMode", "record bench")
Rerun = StrEnum("Rerun", "never stale always")
WandbMode = StrEnum("WandbMode", "disabled offline online")


@dataclass
class DataConfig(Group):
    """Real or synthetic tokens in a fixed global order."""

    kind: DataKind = DataKind.stdlib
    """Source of tokens."""
    target: Annotated[str | None, Only("data.kind", "ext")] = None
    """Your own data source, as package.module:Class (ext)."""
    path: Annotated[str | None, Only("data.kind", "text", "tokens", "ext")] = None
    """File or folder for `text`, `tokens` and `ext`; unused otherwise."""
    seq_len: Annotated[int, Range(1, 2**24, "tokens")] = 128
    """Tokens per sequence that the model is trained on; seq_len + 1 are read."""
    token_dtype: Annotated[TokenDtype, TOKENS] = TokenDtype.uint16
    """Width of a token for `tokens` files."""
    header_bytes: Annotated[int, Range(0, 2**40, "bytes"), TOKENS] = 0
    """Bytes to skip at the start of each token file (0 for nanoGPT and Megatron .bin, 1024 for llm.c)."""
    order_seed: Annotated[int, Range(0, SEED)] = 1234
    """Seed of the order of sequences. It is separate from train.seed, so that weights and data vary independently."""
    num_sequences: Annotated[int, Range(1, 2**40, "sequences"), Only("data.kind", "synthetic")] = 4096
    """Number of distinct sequences of `synthetic`."""


@dataclass
class OptimizerConfig(Group):
    """Update rule and its constants."""

    name: OptimizerName = OptimizerName.adamw
    """Update rule."""
    target: Annotated[str | None, OWN_OPTIMIZER] = None
    """Your own optimizer, as package.module:Class (ext)."""
    options: Annotated[dict[str, float], OWN_OPTIMIZER] = field(default_factory=dict)
    """Arguments of your own optimizer, in addition to the learning rate (ext)."""
    lr: Annotated[float, Range(0, 10**6)] = 1.0e-3
    """Peak learning rate."""
    betas: Annotated[list[Annotated[float, Range(0, 1, below=True)]], ADAM] = field(default_factory=lambda: [0.9, 0.95])
    """Adam's two decay rates; under muon, of the AdamW beside it."""
    eps: Annotated[float, Range(0, 1, above=True), ADAM] = 1.0e-8
    """Adam's epsilon; under muon, of the AdamW beside it."""
    weight_decay: Annotated[float, Range(0, 10**6)] = 0.1
    """Weight decay of matrices. Vectors (norm scales, biases) are a second parameter group without decay."""
    momentum: Annotated[float, Range(0, 1, below=True), Only("optimizer.name", "sgd", "muon")] = 0.0
    """Momentum of SGD, and of Muon."""
    nesterov: Annotated[Flag, MUON] = True
    """Orthogonalize Muon's gradient mixed with its momentum. false: the momentum itself."""
    ns_coefficients: Annotated[list[Annotated[float, Range(-100, 100)]], MUON] = field(
        default_factory=lambda: [3.4445, -4.775, 2.0315]
    )
    """Three coefficients of Muon's Newton-Schulz iteration."""
    ns_steps: Annotated[int, Range(0, 99, "iterations"), MUON] = 5
    """Newton-Schulz iterations of a step of Muon."""
    adjust_lr_fn: Annotated[AdjustLr, MUON] = AdjustLr.original
    """How Muon's rate follows a matrix's shape. original: times sqrt(max(1, rows / columns)). match_rms_adamw: times
    0.2 sqrt(max(rows, columns)), for which AdamW's rate and decay fit."""
    clip_norm: Annotated[float, Range(0, 10**9, above=True)] | None = 1.0
    """Largest global gradient norm. null: gradients are not clipped; the norm is still logged."""


@dataclass
class TrainConfig(Group):
    """Length, batch and seeds of one run."""

    steps: Annotated[int, Range(1, COUNT, "steps")] = 20
    """Number of optimizer updates."""
    seed: Annotated[int, Range(0, SEED)] = 0
    """Seed of the initial weights."""
    global_batch_size: Annotated[int, Range(1, COUNT, "sequences")] = 16
    """Sequences per optimizer step, over all ranks and microbatches."""
    microbatch_size: Annotated[int, Range(1, COUNT, "sequences")] = 4
    """Sequences of one forward and backward on one rank."""
    replicate: Annotated[int, Range(0, 9_999)] = 0
    """Number of this repetition; part of the signature, so that A/A pairs are two runs."""
    schedule: Schedule = Schedule.cosine
    """Shape of the learning rate after warm-up."""
    warmup_steps: Annotated[int, Range(0, COUNT, "steps")] = 2
    """Steps of linear warm-up."""
    min_lr_ratio: Annotated[float, Range(0, 1)] = 0.1
    """The last learning rate divided by the peak learning rate."""
    param_norm_every: Annotated[int, Range(0, COUNT, "steps"), RECORD] = 10
    """Steps between records of the weights' norm. 0: never. measure=bench never records it."""


@dataclass
class ShardingConfig(Group):
    """Sharding over the data-parallel ranks."""

    strategy: Strategy = Strategy.optim_grads_params
    """ZeRO stage by name: state sharded over the inner axis."""
    outer: Annotated[OuterStrategy, Only("mesh.dp_outer", but=1, choose="mesh=two_by_two")] = OuterStrategy.no_shard
    """State also sharded over the outer axis, if mesh.dp_outer > 1."""


@dataclass
class DtypeConfig(Group):
    """The dtype of each buffer and of each collective."""

    name: str = "fp32"
    """Label used in run names and reports."""
    compute: Dtype = Dtype.fp32
    """Dtype of weights and activations in forward and backward."""
    main_params: Dtype = Dtype.fp32
    """Dtype of the weights that the optimizer updates."""
    main_grads: Dtype = Dtype.fp32
    """Dtype of stored and accumulated gradients."""
    grad_comm: Dtype = Dtype.fp32
    """Dtype in which a reduction sends gradients."""
    grad_accum: Dtype | None = None
    """Dtype of the sum inside a reduction. null: fp32 or wider if the engine itself sums, otherwise grad_comm."""
    allow_low_precision_grads: Flag = False
    """Permits main gradients below fp32, sums in fewer bits than fp32 or than grad_comm, and fp16 without a loss
    scale."""
    loss_scale: LossScale = LossScale.none
    """Factor on the loss, so that fp16 gradients do not underflow: none, or dynamic (native)."""
    loss_scale_growth_steps: Annotated[int, Range(1, COUNT, "steps"), DYNAMIC] = 2000
    """Steps without overflow after which a dynamic loss scale doubles; it starts at 65536."""
    fp8: Fp8 | None = None
    """FP8 recipe of the projections of attention and feed-forward. null: they do not use FP8."""


DTYPE_ROLES = tuple(each.name for each in fields(DtypeConfig) if each.type in ("Dtype", "Dtype | None"))
"""Settings of `dtype` that are a format: the role of a number between a forward and an update."""


@dataclass
class NumericsConfig(Group):
    """The promise about the order of sums: options of the native engine."""

    mode: Numerics = Options.numerics
    exact_bits: Annotated[int, of_option("exact_bits"), Only("numerics.mode", "exact")] = Options.exact_bits


@dataclass
class MeshConfig(Group):
    """The number of ranks and the sizes of their axes."""

    world_size: Annotated[int, Range(1, 2**20, "ranks")] = 2
    """Number of ranks."""
    dp_outer: Annotated[int, Range(1, 2**20, "ranks")] = 1
    """Size of the outer data-parallel axis. world_size / tp / dp_outer ranks share one sharded copy of the model."""
    tp: Annotated[int, Range(1, 2**10, "ranks")] = 1
    """Size of the tensor-parallel axis. Neighbouring ranks work on the same microbatch, each with a part of the
    matrices."""
    sequence_parallel: Annotated[Flag, Only("mesh.tp", but=1, choose="mesh.tp=2")] = False
    """Split the positions of a sequence over tensor-parallel ranks between matrices, for example in norms."""


NO_FAULT = "none"
"""Option of the group `fault` for a normal run."""


@dataclass
class FaultConfig(Group):
    """A deliberate mistake, to test whether a verdict finds it."""

    name: str = NO_FAULT
    """A sample, or the function that makes it, as package.module:function; none is a normal run."""
    strength: FaultStrength = FaultStrength.full
    """full: the fault as reported. middle: a tenth of it. weak: a hundredth of it. A fault that keeps fewer bits keeps
    8, 11 or 16 bits."""
    begins_at: Annotated[int, Range(1, COUNT), Only("fault.name", but="none", choose="a fault")] = 1
    """The first step in which the fault acts; steps before it are normal."""


@dataclass
class CkptConfig(Group):
    """Checkpoints for resuming."""

    policy: CkptPolicy = CkptPolicy.last
    """none: no checkpoints. last: the newest ones are kept."""
    every: Annotated[int, Range(0, COUNT, "steps"), CKPT] = 0
    """Steps between saves. 0: only by ckpt.minutes, when stopped, and at the end."""
    minutes: Annotated[float, Range(0, 10**6, "minutes"), CKPT] = 10.0
    """Time after which a save is due, at the end of a step, since the last save or the start. 0: never by time. Saving
    counts for no step's time."""
    keep: Annotated[int, Range(1, COUNT, "checkpoints"), CKPT] = 1
    """How many of the newest checkpoints are kept. If the newest is damaged, the run resumes from an older one."""
    keep_best: Annotated[int, Range(0, COUNT, "checkpoints"), CKPT, VALIDATES] = 0
    """How many checkpoints of the lowest held-out losses are saved and kept in addition (measure.validate_every)."""
    load: str | None = None
    """Checkpoint to start from if this run has none of its own: a run (a path, digits of its signature, `@last`), its
    ckpt/ folder, or one of its step-* folders. Its layout may differ."""
    strict: Flag = True
    """Refuse a checkpoint whose names, shapes or position in the data differ. false: load what fits."""


@dataclass
class MeasureConfig(Group):
    """Records in addition to the loss."""

    mode: MeasureMode = MeasureMode.record
    """record: all steps are recorded alike. bench: warm-up steps, then timed steps, alone on the machine."""
    warmup_steps: Annotated[int, Range(0, COUNT, "steps"), BENCH] = 0
    """How many of train.steps are warm-up steps before the timed ones (bench). Fixed beforehand."""
    capture_steps: list[Annotated[int, Range(1, COUNT)]] | None = None
    """Steps whose full gradients, before clipping, are written to `capture/`. null: the first step, the last, and
    100, 1000, ... between them, with their updates, as many as fit into capture_limit_mib."""
    update_steps: list[Annotated[int, Range(1, COUNT)]] | None = None
    """Steps whose whole update (main weights after minus before) is written to `capture/`; it shows faults that Adam
    hides in later numbers. null: the steps chosen by capture_steps if that is null too, otherwise none."""
    rounding_draws: Annotated[int, Range(0, 1_000, "draws")] = 0
    """How often an fp64 reference repeats its first step for each dtype, with a random rounding error after every
    operation. Verdicts against this run then use the measured effect of rounding on each gradient. 0: bounds are
    computed by counting roundings."""
    capture_limit_mib: Annotated[int, Range(0, 2**30, "MiB")] = 1024
    """If one step of gradients would take more, none are captured. If capture_steps is null, everything captured in
    addition to the gradients of step 1 must fit into it together."""
    callbacks: list[str] = field(default_factory=list)
    """Your own classes that are called every step, as package.module:Class. Their results are recorded as `own`."""
    validate_every: Annotated[int, Range(0, COUNT, "steps"), RECORD] = 0
    """Steps between evaluations of the loss on held-out data. 0: never. Training has the same bits with and without."""
    validation_batches: Annotated[int, Range(1, COUNT, "batches"), VALIDATES] = 1
    """Batches of train.global_batch_size sequences in an evaluation."""
    validation_path: Annotated[str | None, VALIDATES] = None
    """File or folder of held-out data, of the kind of data.kind. null: the last sequences of the first epoch, which
    train.steps must not reach."""
    trace_steps: list[Annotated[int, Range(1, COUNT)]] = field(default_factory=list)
    """Steps that torch.profiler records to `trace/`, after a step of warm-up; Perfetto (ui.perfetto.dev) opens the
    files. These steps count for no median."""
    trace_ranks: Annotated[list[Annotated[int, Range(0, 2**20)]] | None, TRACE] = field(default_factory=lambda: [0])
    """Ranks that record the traced steps. null: all."""
    memory_snapshot: Annotated[Flag, TRACE, CUDA] = False
    """Write each allocation of CUDA in the traced steps, with its stack, for pytorch.org/memory_viz. On a CPU the trace
    itself has the allocations."""
    step_checks: Annotated[Flag, RECORD] = True
    """Check every step from outside the engine and write the results to `step_checks/`: local gradients against their
    sum, gathered weights against stored ones, the optimizer's rule on a sample. Never in timed runs (bench)."""
    step_checks_limit_mib: Annotated[int, Range(1, 2**30, "MiB"), RECORD, Only("measure.step_checks", True)] = 256
    """After the first 512 steps, sketches of every tensor are kept as often as fits into this size."""
    step_checks_share: Annotated[
        float, Range(0, 1, "of the training time"), RECORD, Only("measure.step_checks", True)
    ] = 0.02
    """Share of training time that checks may take. Beyond it, and a second, they look at two steps in each 4, 8 or more
    and at captured ones; a verdict says at how many. 1: at every step. 0: as seldom as can be."""
    again: Annotated[float, Range(0, 1, "of the steps"), RECORD, Only("measure.step_checks", True)] = 0.01
    """Share of steps, drawn by train.seed, whose forwards and backwards are worked out again by the plain model, beside
    every captured step. It finds what is wrong in a single step; each costs a forward and a backward on every rank."""


@dataclass
class LaunchConfig(Group):
    """How a request is carried out. Never part of the signature."""

    root: str = "runs"
    """Where runs are stored."""
    dry_run: Flag = False
    """Print what would run, batch scripts too, and start nothing."""
    wait: Flag = False
    """Wait until submitted cells end (SLURM). A local launch always waits."""
    inline: Flag = False
    """Run the only rank inside this process, so that a debugger works."""
    rerun: Rerun = Rerun.never
    """Which finished cells to run again."""
    hang_timeout_s: Annotated[float, Range(1, 10**7, "seconds")] = 1800.0
    """After this time without a step, every rank's stack is dumped and the run ends."""
    stop_grace_s: Annotated[float, Range(0, 86_400, "seconds")] = 20.0
    """Time that ranks have to save after a request to stop, before they are killed."""
    nccl_log: NcclLog = NcclLog.setup
    """Log of NCCL in the attempt's folder on CUDA: none, setup (communicators, registrations), choices (a line for
    every collective as well)."""
    preempt_at: Annotated[int, Range(0, COUNT)] = 0
    """After this step, save and end as preempted, once, to rehearse an interruption. 0: never."""


@dataclass
class WandbConfig(Group):
    """The copy of the record in wandb. Never part of the signature."""

    mode: WandbMode = WandbMode.disabled
    """disabled, offline or online."""
    project: Annotated[str, WANDB] = "sharded-training"
    """Project on the server."""
    entity: Annotated[str | None, WANDB] = None
    """Team or user on the server."""


@dataclass
class StudyConfig(Group):
    """A question, its arms, its control and its margins. None of these settings is part of the signature."""

    name: str = "adhoc"
    """Name of the study, and of the folder of its runs."""
    question: str = ""
    """Question of the study, in a sentence."""
    control: dict[str, str] = field(default_factory=dict)
    """Overrides that select the arm with which all others are compared."""
    base: dict[str, str] = field(default_factory=dict)
    """Overrides of every cell."""
    grid: dict[str, list[str]] = field(default_factory=dict)
    """Axes of which all combinations are run."""
    zip: dict[str, list[str]] = field(default_factory=dict)
    """Axes of equal length whose values are taken together, first with first and so on."""
    skip_if: list[str] = field(default_factory=list)
    """Lines of space-separated overrides. A cell that has all overrides of a line is left out."""
    replicates: Annotated[int, Range(1, 9_999, "repetitions")] = 1
    """Repetitions of every cell (train.replicate 0 .. n-1). Under measure=bench a repetition is a block."""
    margins: dict[str, float] = field(default_factory=dict)
    """Largest mean difference over seeds that does not matter: loss (relative), grad_norm (logarithm of the ratio)."""
    window: Annotated[int, Range(0, COUNT, "steps")] = 0
    """Number of last steps to which the margins apply. 0: the later half of the run."""
    objective: str = "loss"
    """Number that Hydra's sweepers such as Optuna are given: loss, grad_norm, or another of the last step's record."""
    order_seed: Annotated[int, Range(0, SEED), BENCH] = 0
    """Seed of the order in which the arms of a block run; each block has a new order (bench)."""


@dataclass
class RunConfig(Group):
    """The run's own name. Never part of the signature."""

    name: str | None = None
    """Name of the run's folder, before its signature. null: made of the run's settings. A run that has begun keeps its
    folder."""


@dataclass
class Config(Group):
    """A complete cell."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    dtype: DtypeConfig = field(default_factory=DtypeConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    nccl_ub: NcclUbConfig = field(default_factory=NcclUbConfig)
    sharp: SharpConfig = field(default_factory=SharpConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    ckpt: CkptConfig = field(default_factory=CkptConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    study: StudyConfig = field(default_factory=StudyConfig)
    run: RunConfig = field(default_factory=RunConfig)
    notes: str = ""
    """Free text; never part of the signature."""
