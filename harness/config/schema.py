"""The typed root of a cell: one dataclass a group, one sentence a field.

YAML under `conf/` holds values, this module types, defaults, ranges and units, `harness.config.rules` conditions
between fields. A group, its package and its dataclass field share one name. `harness.config.doc` reads the sentence
under a field for the generated guide and for error hints. Torch is never imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum

from harness.config.cluster_group import Backend as Backend
from harness.config.cluster_group import ClusterConfig as ClusterConfig
from harness.config.cluster_group import Device as Device
from harness.config.engine_group import EngineConfig as EngineConfig
from harness.config.engine_group import EngineName as EngineName
from harness.config.model_group import ModelConfig as ModelConfig
from harness.config.model_group import ModelFamily as ModelFamily
from harness.config.network import NcclLog as NcclLog
from harness.config.network import NcclUbConfig, SharpConfig
from harness.config.number import COUNT, SEED, number
from harness.fsdp.options import Options, Range
from harness.fsdp.vocabulary import CtaPolicy as CtaPolicy
from harness.fsdp.vocabulary import Dtype as Dtype
from harness.fsdp.vocabulary import Fallback as Fallback
from harness.fsdp.vocabulary import Fp8 as Fp8
from harness.fsdp.vocabulary import GradBuffer as GradBuffer
from harness.fsdp.vocabulary import Numerics as Numerics
from harness.fsdp.vocabulary import OuterStrategy as OuterStrategy
from harness.fsdp.vocabulary import Registration as Registration
from harness.fsdp.vocabulary import SharpAxis as SharpAxis
from harness.fsdp.vocabulary import Strategy as Strategy
from harness.fsdp.vocabulary import Transport as Transport


class FaultStrength(Enum):
    full = "full"
    middle = "middle"
    weak = "weak"


class DataKind(Enum):
    stdlib = "stdlib"
    text = "text"
    tokens = "tokens"
    synthetic = "synthetic"
    ext = "ext"


class TokenDtype(Enum):
    uint16 = "uint16"
    uint32 = "uint32"


class OptimizerName(Enum):
    sgd = "sgd"
    adam = "adam"
    adamw = "adamw"
    ext = "ext"


class Schedule(Enum):
    constant = "constant"
    cosine = "cosine"
    linear = "linear"


class CkptPolicy(Enum):
    none = "none"
    last = "last"


class MeasureMode(Enum):
    record = "record"
    bench = "bench"


class Rerun(Enum):
    never = "never"
    stale = "stale"
    always = "always"


class WandbMode(Enum):
    disabled = "disabled"
    offline = "offline"
    online = "online"


@dataclass
class DataConfig:
    """Real or synthetic tokens in a fixed global order."""

    kind: DataKind = DataKind.stdlib
    """Source of tokens."""
    target: str | None = None
    """Your own data source, as package.module:Class (ext)."""
    path: str | None = None
    """File or folder for `text`, `tokens` and `ext`; unused otherwise."""
    seq_len: int = number(128, 1, 2**24, "tokens")
    """Tokens per sequence that the model is trained on; seq_len + 1 are read."""
    token_dtype: TokenDtype = TokenDtype.uint16
    """Width of a token for `tokens` files."""
    header_bytes: int = number(0, 0, 2**40, "bytes")
    """Bytes to skip at the start of each token file (0 for nanoGPT and Megatron .bin, 1024 for llm.c)."""
    order_seed: int = number(1234, 0, SEED)
    """Seed of the order of sequences. It is separate from train.seed, so that weights and data vary independently."""
    num_sequences: int = number(4096, 1, 2**40, "sequences")
    """Number of distinct sequences of `synthetic`."""


@dataclass
class OptimizerConfig:
    """Update rule and its constants."""

    name: OptimizerName = OptimizerName.adamw
    """Update rule."""
    target: str | None = None
    """Your own optimizer, as package.module:Class (ext)."""
    options: dict[str, float] = field(default_factory=dict)
    """Arguments of your own optimizer, in addition to the learning rate (ext)."""
    lr: float = number(1.0e-3, 0, 10**6)
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95], metadata={"range": Range(0, 1, below=True)})
    """Adam's two decay rates."""
    eps: float = number(1.0e-8, 0, 1, above=True)
    """Adam's epsilon."""
    weight_decay: float = number(0.1, 0, 10**6)
    """Weight decay of matrices. Vectors (norm scales, biases) are a second parameter group without decay."""
    momentum: float = number(0.0, 0, 1, below=True)
    """SGD's momentum."""
    clip_norm: float | None = number(1.0, 0, 10**9, above=True)
    """Largest global gradient norm. null: gradients are not clipped; the norm is still logged."""


@dataclass
class TrainConfig:
    """Length, batch and seeds of one run."""

    steps: int = number(20, 1, COUNT, "steps")
    """Number of optimizer updates."""
    seed: int = number(0, 0, SEED)
    """Seed of the initial weights."""
    global_batch_size: int = number(16, 1, COUNT, "sequences")
    """Sequences per optimizer step, over all ranks and microbatches."""
    microbatch_size: int = number(4, 1, COUNT, "sequences")
    """Sequences of one forward and backward on one rank."""
    replicate: int = number(0, 0, 9_999)
    """Number of this repetition; part of the signature, so that A/A pairs are two runs."""
    schedule: Schedule = Schedule.cosine
    """Shape of the learning rate after warm-up."""
    warmup_steps: int = number(2, 0, COUNT, "steps")
    """Steps of linear warm-up."""
    min_lr_ratio: float = number(0.1, 0, 1)
    """The last learning rate divided by the peak learning rate."""
    param_norm_every: int = number(10, 0, COUNT, "steps")
    """Steps between records of the weights' norm. 0: never. measure=bench never records it."""


@dataclass
class ShardingConfig:
    """Sharding over the data-parallel ranks."""

    strategy: Strategy = Strategy.optim_grads_params
    """ZeRO stage by name: state sharded over the inner axis."""
    outer: OuterStrategy = OuterStrategy.no_shard
    """State also sharded over the outer axis, if mesh.dp_outer > 1."""


@dataclass
class DtypeConfig:
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
    allow_low_precision_grads: bool = False
    """Permits main gradients below fp32, sums in fewer bits than fp32 or than grad_comm, and fp16 without a loss
    scale."""
    loss_scale: str = "none"
    """Factor on the loss, so that fp16 gradients do not underflow: none, dynamic, or a fixed power of two (native)."""
    loss_scale_growth_steps: int = number(2000, 1, COUNT, "steps")
    """Steps without overflow after which a dynamic loss scale doubles; it starts at 65536."""
    fp8: Fp8 | None = None
    """FP8 recipe of the projections of attention and feed-forward. null: they do not use FP8."""
    fp8_history: int = number(1024, 1, 2**20, "steps")
    """Number of past steps whose largest magnitudes delayed scaling uses."""


DTYPE_ROLES = tuple(each.name for each in fields(DtypeConfig) if each.type in ("Dtype", "Dtype | None"))
"""Settings of `dtype` that are a format: the role of a number between a forward and an update."""


@dataclass
class NumericsConfig:
    """The promise about the order of sums: options of the native engine."""

    mode: Numerics = Options.numerics
    exact_bits: int = Options.exact_bits


@dataclass
class MeshConfig:
    """The number of ranks and the sizes of their axes."""

    world_size: int = number(2, 1, 2**20, "ranks")
    """Number of ranks."""
    dp_outer: int = number(1, 1, 2**20, "ranks")
    """Size of the outer data-parallel axis. world_size / tp / dp_outer ranks share one sharded copy of the model."""
    tp: int = number(1, 1, 2**10, "ranks")
    """Size of the tensor-parallel axis. Neighbouring ranks work on the same microbatch, each with a part of the
    matrices."""
    sequence_parallel: bool = False
    """Split the positions of a sequence over tensor-parallel ranks between matrices, for example in norms."""


NO_FAULT = "none"
"""Option of the group `fault` for a normal run."""


@dataclass
class FaultConfig:
    """A deliberate mistake, to test whether a verdict finds it."""

    name: str = NO_FAULT
    """A sample, or the function that makes it, as package.module:function; none is a normal run."""
    strength: FaultStrength = FaultStrength.full
    """full: the fault as reported. middle: a tenth of it. weak: a hundredth of it. A fault that keeps fewer bits keeps
    8, 11 or 16 bits."""
    begins_at: int = number(1, 1, COUNT)
    """The first step in which the fault acts; steps before it are normal."""


@dataclass
class CkptConfig:
    """Checkpoints for resuming."""

    policy: CkptPolicy = CkptPolicy.last
    """none: no checkpoints. last: the newest ones are kept."""
    every: int = number(0, 0, COUNT, "steps")
    """Steps between saves. 0: only by ckpt.minutes, when stopped, and at the end."""
    minutes: float = number(10.0, 0, 10**6, "minutes")
    """Time after which a save is due, at the end of a step, since the last save or the start. 0: never by time. Saving
    counts for no step's time."""
    keep: int = number(1, 1, COUNT, "checkpoints")
    """How many of the newest checkpoints are kept. If the newest is damaged, the run resumes from an older one."""
    background: bool = False
    """Copy the state, and write it while training goes on. The copy takes the state's size in CPU memory once more."""
    load: str | None = None
    """Checkpoint to start from if this run has none of its own: a run (a path, digits of its signature, `@last`), its
    ckpt/ folder, or one of its step-* folders. Its layout may differ."""
    strict: bool = True
    """Refuse a checkpoint whose names, shapes or position in the data differ. false: load what fits."""


@dataclass
class MeasureConfig:
    """Records in addition to the loss."""

    mode: MeasureMode = MeasureMode.record
    """record: all steps are recorded alike. bench: warm-up steps, then timed steps, alone on the machine."""
    warmup_steps: int = number(0, 0, COUNT, "steps")
    """How many of train.steps are warm-up steps before the timed ones (bench). Fixed beforehand."""
    capture_steps: list[int] | None = None
    """Steps whose full gradients, before clipping, are written to `capture/`. null: the first step, the last, and 3,
    10, 30, 100, ... between them, with their updates and the last weights, as many as fit into capture_limit_mib."""
    update_steps: list[int] | None = None
    """Steps whose whole update (main weights after minus before) is written to `capture/`; it shows faults that Adam
    hides in later numbers. null: the steps chosen by capture_steps if that is null too, otherwise none."""
    rounding_draws: int = number(0, 0, 1_000, "draws")
    """How often an fp64 reference repeats its first step for each dtype, with a random rounding error after every
    operation. Verdicts against this run then use the measured effect of rounding on each gradient. 0: bounds are
    computed by counting roundings."""
    rounding_fp8: bool = False
    """Repeat that for every FP8 recipe that fits the model's sizes."""
    capture_limit_mib: int = number(1024, 0, 2**30, "MiB")
    """If one step of gradients would take more, none are captured. If capture_steps is null, everything captured in
    addition to the gradients of step 1 must fit into it together."""
    callbacks: list[str] = field(default_factory=list)
    """Your own classes that are called every step, as package.module:Class. Their results are recorded as `own`."""
    trace_steps: list[int] = field(default_factory=list)
    """Steps that torch.profiler records to `trace/`, after a step of warm-up; Perfetto (ui.perfetto.dev) opens the
    files. These steps count for no median."""
    trace_ranks: list[int] | None = field(default_factory=lambda: [0])
    """Ranks that record the traced steps. null: all."""
    memory_snapshot: bool = False
    """Write each allocation of CUDA in the traced steps, with its stack, for pytorch.org/memory_viz. On a CPU the trace
    itself has the allocations."""
    step_checks: bool = True
    """Check every step from outside the engine and write the results to `step_checks/`: local gradients against their
    sum, gathered weights against stored ones, the optimizer's rule on a sample. Never in timed runs (bench)."""
    step_checks_limit_mib: int = number(256, 1, 2**30, "MiB")
    """After the first 512 steps, sketches of every tensor are kept as often as fits into this size."""


@dataclass
class LaunchConfig:
    """How a request is carried out. Never part of the signature."""

    root: str = "runs"
    """Where runs are stored."""
    dry_run: bool = False
    """Print what would run, and start nothing. Batch scripts are written to <root>/<study>/.dry_run/."""
    wait: bool = False
    """Wait until submitted cells end (SLURM). A local launch always waits."""
    inline: bool = False
    """Run the only rank inside this process, so that a debugger works."""
    rerun: Rerun = Rerun.never
    """Which finished cells to run again."""
    fail_fast: bool = False
    """Once a run of a request has failed, start no further run of it. Runs that have started go on."""
    hang_timeout_s: float = number(1800.0, 1, 10**7, "seconds")
    """After this time without a step, every rank's stack is dumped and the run ends."""
    stop_grace_s: float = number(20.0, 0, 86_400, "seconds")
    """Time that ranks have to save after a request to stop, before they are killed."""
    fork: bool | None = None
    """Fork ranks from a process that has already imported torch, which saves each rank the time of its imports. null:
    do so where possible, that is, for untimed runs on CPUs of this machine under Linux."""
    nccl_log: NcclLog = NcclLog.setup
    """Log of NCCL in the attempt's folder on CUDA: none, setup (communicators, registrations), choices (a line for
    every collective as well)."""
    preempt_at: int = number(0, 0, COUNT)
    """After this step, save and end as preempted, once, to rehearse an interruption. 0: never."""


@dataclass
class WandbConfig:
    """The copy of the record in wandb. Never part of the signature."""

    mode: WandbMode = WandbMode.disabled
    """disabled, offline or online."""
    project: str = "sharded-training"
    """Project on the server."""
    entity: str | None = None
    """Team or user on the server."""


@dataclass
class StudyConfig:
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
    replicates: int = number(1, 1, 9_999, "repetitions")
    """Repetitions of every cell (train.replicate 0 .. n-1). Under measure=bench a repetition is a block."""
    margins: dict[str, float] = field(default_factory=dict)
    """Largest mean difference over seeds that does not matter: loss (relative), grad_norm (logarithm of the ratio)."""
    window: int = number(0, 0, COUNT, "steps")
    """Number of last steps to which the margins apply. 0: the later half of the run."""
    objective: str = "loss"
    """Number that Hydra's sweepers such as Optuna are given: loss, grad_norm, or another of the last step's record."""
    order_seed: int = number(0, 0, SEED)
    """Seed of the order in which the arms of a block run; each block has a new order (bench)."""


@dataclass
class Config:
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
    notes: str = ""
    """Free text; never part of the signature."""
