"""The typed root of a cell: one dataclass a group, one sentence a field.

YAML under `conf/` holds values, this module holds types, defaults, ranges and units, `harness.config.rules` holds what
must hold between fields. A group, its package and its dataclass field share one name. The sentence under a field is
read by `harness.config.doc` for the generated guide and for error hints. Torch is never imported here.
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
from harness.fsdp.facts import Range
from harness.fsdp.options import Options
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


class FaultStrength(Enum):
    """How much of a fault is put in."""

    full = "full"
    middle = "middle"
    weak = "weak"


class DataKind(Enum):
    """Where tokens come from."""

    stdlib = "stdlib"
    text = "text"
    tokens = "tokens"
    synthetic = "synthetic"
    ext = "ext"


class TokenDtype(Enum):
    """Width of one token in a memory-mapped token file."""

    uint16 = "uint16"
    uint32 = "uint32"


class OptimizerName(Enum):
    """Update rule."""

    sgd = "sgd"
    adam = "adam"
    adamw = "adamw"
    ext = "ext"


class Schedule(Enum):
    """Shape of the learning rate after warm-up."""

    constant = "constant"
    cosine = "cosine"
    linear = "linear"


class CkptPolicy(Enum):
    """Which checkpoints are kept."""

    none = "none"
    last = "last"


class MeasureMode(Enum):
    """What a run is for: its record, or its cost."""

    record = "record"
    bench = "bench"


class Rerun(Enum):
    """Which finished cells are run again when asked for: none, those whose sources changed since, or every one."""

    never = "never"
    stale = "stale"
    always = "always"


class WandbMode(Enum):
    """Where the mirror goes."""

    disabled = "disabled"
    offline = "offline"
    online = "online"


@dataclass
class DataConfig:
    """Real or synthetic tokens in a fixed global order."""

    kind: DataKind = DataKind.stdlib
    """Source of tokens."""
    target: str | None = None
    """A source of one's own, as package.module:Class (ext)."""
    path: str | None = None
    """File or folder for `text`, `tokens` and `ext`; unused otherwise."""
    seq_len: int = number(128, 1, 2**24, "tokens")
    """Tokens a sequence the model is trained on; seq_len + 1 are read."""
    token_dtype: TokenDtype = TokenDtype.uint16
    """Width of a token for `tokens` files."""
    header_bytes: int = number(0, 0, 2**40, "bytes")
    """Bytes to skip at the start of each token file (0 for nanoGPT and Megatron .bin, 1024 for llm.c)."""
    order_seed: int = number(1234, 0, SEED)
    """Seed of the order of sequences; apart from train.seed, so that weights and data vary separately."""
    num_sequences: int = number(4096, 1, 2**40, "sequences")
    """How many distinct sequences `synthetic` holds."""


@dataclass
class OptimizerConfig:
    """Update rule and its constants."""

    name: OptimizerName = OptimizerName.adamw
    """Update rule."""
    target: str | None = None
    """An optimizer of one's own, as package.module:Class (ext)."""
    options: dict[str, float] = field(default_factory=dict)
    """What an optimizer of one's own is given beside the learning rate (ext)."""
    lr: float = number(1.0e-3, 0, 10**6)
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95], metadata={"range": Range(0, 1, below=True)})
    """Adam's two decay rates."""
    eps: float = number(1.0e-8, 0, 1, above=True)
    """Adam's epsilon."""
    weight_decay: float = number(0.1, 0, 10**6)
    """Decay of matrices; vectors (norm scales, biases) are a second parameter group with none."""
    momentum: float = number(0.0, 0, 1, below=True)
    """SGD's momentum."""
    clip_norm: float | None = number(1.0, 0, 10**9, above=True)
    """Largest global gradient norm; null leaves gradients as they are (the norm is logged all the same)."""


@dataclass
class TrainConfig:
    """Length, batch and seeds of one run."""

    steps: int = number(20, 1, COUNT, "steps")
    """Optimizer updates."""
    seed: int = number(0, 0, SEED)
    """Seed of the initial weights."""
    global_batch_size: int = number(16, 1, COUNT, "sequences")
    """Sequences an optimizer step, over all ranks and microbatches."""
    microbatch_size: int = number(4, 1, COUNT, "sequences")
    """Sequences a rank sees in one forward and backward."""
    replicate: int = number(0, 0, 9_999)
    """Number of this repetition; part of the signature, so that A/A pairs are two runs."""
    schedule: Schedule = Schedule.cosine
    """Shape of the learning rate after warm-up."""
    warmup_steps: int = number(2, 0, COUNT, "steps")
    """Steps of linear warm-up."""
    min_lr_ratio: float = number(0.1, 0, 1)
    """Last learning rate over the peak one."""
    param_norm_every: int = number(10, 0, COUNT, "steps")
    """Steps between records of the weights' norm; 0 never, as always under measure=bench."""


@dataclass
class ShardingConfig:
    """What is split over the data-parallel ranks."""

    strategy: Strategy = Strategy.optim_grads_params
    """ZeRO stage by name: what is split over the inner axis."""
    outer: OuterStrategy = OuterStrategy.no_shard
    """What is split over the outer axis as well, where mesh.dp_outer > 1."""


@dataclass
class DtypeConfig:
    """A dtype for each buffer and for each wire."""

    name: str = "fp32"
    """Label used in run names and reports."""
    compute: Dtype = Dtype.fp32
    """Weights and activations in forward and backward."""
    main_params: Dtype = Dtype.fp32
    """Weights the optimizer updates."""
    main_grads: Dtype = Dtype.fp32
    """Stored and accumulated gradients."""
    grad_comm: Dtype = Dtype.fp32
    """What a gradient reduction sends."""
    grad_accum: Dtype | None = None
    """The sum inside a reduction; null is fp32 or wider where an engine sums itself, else the wire's."""
    allow_low_precision_grads: bool = False
    """Permits main gradients below fp32, sums in fewer bits than fp32 or than what arrives, and fp16 without a loss
    scale."""
    loss_scale: str = "none"
    """Factor on the loss, against fp16 gradients that vanish: none, dynamic, or a fixed power of two (native)."""
    loss_scale_growth_steps: int = number(2000, 1, COUNT, "steps")
    """Steps without overflow after which a dynamic loss scale, which begins at 65536, doubles."""
    fp8: Fp8 | None = None
    """Recipe by which the projections of attention and feed-forward multiply 8-bit numbers; null: they do not."""
    fp8_history: int = number(1024, 1, 2**20, "steps")
    """Steps whose largest magnitudes delayed scaling looks back on."""


DTYPE_ROLES = tuple(each.name for each in fields(DtypeConfig) if each.type in ("Dtype", "Dtype | None"))
"""Settings of `dtype` that are a format: what a number is for between a forward and an update."""


@dataclass
class NumericsConfig:
    """Promise about the order of arithmetic: options of our engine, with their sentences in `harness.fsdp.options`."""

    mode: Numerics = Options.numerics
    exact_bits: int = Options.exact_bits


@dataclass
class MeshConfig:
    """Shape of the ranks."""

    world_size: int = number(2, 1, 2**20, "ranks")
    """Number of ranks."""
    dp_outer: int = number(1, 1, 2**20, "ranks")
    """Size of the outer data-parallel axis; world_size / tp / dp_outer ranks share one sharded copy of the model."""
    tp: int = number(1, 1, 2**10, "ranks")
    """Size of the tensor-parallel axis: neighbouring ranks that share every microbatch, each with a part of the
    matrices."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks share the positions of a sequence between matrices, as norms take them."""


@dataclass
class FaultConfig:
    """A mistake made on purpose, to learn whether a verdict finds it."""

    name: str = "none"
    """Which one; none is a normal run."""
    strength: FaultStrength = FaultStrength.full
    """full, middle or weak: the fault as reported, a tenth or a hundredth of it; 8, 11 or 16 bits kept."""
    begins_at: int = number(1, 1, COUNT)
    """The step from which on it acts; up to it the run is a normal one."""


@dataclass
class CkptConfig:
    """What is saved for resuming."""

    policy: CkptPolicy = CkptPolicy.last
    """none, or the newest one kept."""
    every: int = number(0, 0, COUNT, "steps")
    """Steps between saves; 0 saves only when preempted and at the end."""
    keep: int = number(1, 1, COUNT, "checkpoints")
    """Newest checkpoints that are kept; older ones are what a damaged one falls back to."""
    background: bool = False
    """Copy the state, go on training, and write meanwhile; takes the state's size in CPU memory a second time."""
    load: str | None = None
    """A checkpoint to begin from where this run has none of its own: a run's ckpt/ folder, or one of its step-*; of any
    layout."""
    strict: bool = True
    """Refuse a checkpoint whose names, shapes or position in the data are others; false loads what fits."""


@dataclass
class MeasureConfig:
    """What is recorded beside the loss."""

    mode: MeasureMode = MeasureMode.record
    """record: every step alike. bench: warm-up steps, then timed ones, alone on the machine."""
    warmup_steps: int = number(0, 0, COUNT, "steps")
    """Steps before the timed ones, out of train.steps (bench); declared beforehand, never chosen by looking."""
    capture_steps: list[int] | None = None
    """Steps at which every full gradient is written to `capture/` (before clipping). null: the first, the last, and
    between them 3, 10, 30, 100, ..., as many as fit into capture_limit_mib; with their updates and the last weights."""
    update_steps: list[int] | None = None
    """Steps whose whole update (main weights after minus before) is written to `capture/`: Adam cannot hide in it.
    null: those that capture_steps chooses, where that is null too; else none."""
    rounding_draws: int = number(0, 0, 1_000, "draws")
    """Times the fp64 reference's first step is run again with an error behind every operation, for each dtype: how far
    rounding moves every gradient, which a verdict against this run then knows. 0: bounds are counted."""
    rounding_fp8: bool = False
    """Whether the reference finds that out of every FP8 recipe too that the model has sizes for."""
    capture_limit_mib: int = number(1024, 0, 2**30, "MiB")
    """No gradients are captured where one step of them would take more; where capture_steps is null, all that is
    captured beyond those of step 1 must fit into it together."""
    callbacks: list[str] = field(default_factory=list)
    """Classes of one's own that see every step, as package.module:Class; what they return is recorded as `own`."""
    vouch: bool = True
    """Look at every step beside the engine and write what was found to `vouch/`: local gradients against their sum,
    gathered weights against kept ones, the optimizer's rule on a sample. Never while timing (bench)."""
    vouch_limit_mib: int = number(256, 1, 2**30, "MiB")
    """Beyond the first 512 steps, sketches of every tensor are kept as often as fits into so much."""


@dataclass
class LaunchConfig:
    """How a request is carried out; never part of the signature."""

    root: str = "runs"
    """Where runs are stored."""
    dry_run: bool = False
    """Print what would run, and start nothing; batch scripts are also written, to <root>/<study>/.dry_run/."""
    wait: bool = False
    """Stay until submitted cells end (SLURM); a local launch always stays."""
    inline: bool = False
    """Run the one rank inside this process, so that a debugger works."""
    rerun: Rerun = Rerun.never
    """Which finished cells to run again."""
    fail_fast: bool = False
    """Start nothing more of a request once one of its runs has failed; runs under way go on."""
    hang_timeout_s: float = number(300.0, 1, 10**7, "seconds")
    """Seconds without a step after which every rank's stack is dumped and the run ends."""
    stop_grace_s: float = number(20.0, 0, 86_400, "seconds")
    """Seconds ranks get to save after a request to stop, before they are killed."""
    fork: bool | None = None
    """Fork ranks from a process that has imported torch already, which saves a rank the seconds its imports take; null
    does wherever it can: untimed runs on CPUs of this machine, under Linux."""
    nccl_log: NcclLog = NcclLog.setup
    """What NCCL logs into the attempt's folder on CUDA: none, setup (communicators, registrations), choices (a line for
    every collective as well)."""
    preempt_at: int = number(0, 0, COUNT)
    """Save and end as preempted after this step, once, to rehearse an interruption; 0 does not."""


@dataclass
class WandbConfig:
    """Mirror of the record; never part of the signature."""

    mode: WandbMode = WandbMode.disabled
    """disabled, offline or online."""
    project: str = "sharded-training"
    """Project on the server."""
    entity: str | None = None
    """Team or user on the server."""


@dataclass
class StudyConfig:
    """A question, its arms, its control, and its margins; the body is never part of the signature."""

    name: str = "adhoc"
    """Name of the study; the folder its runs lie in."""
    question: str = ""
    """What the study asks, in a sentence."""
    control: dict[str, str] = field(default_factory=dict)
    """Overrides that pick the arm all others are compared with."""
    base: dict[str, str] = field(default_factory=dict)
    """Overrides every cell gets."""
    grid: dict[str, list[str]] = field(default_factory=dict)
    """Axes whose product is run."""
    zip: dict[str, list[str]] = field(default_factory=dict)
    """Axes that advance together."""
    skip_if: list[str] = field(default_factory=list)
    """Space-separated overrides; a cell that has all of a line is left out."""
    replicates: int = number(1, 1, 9_999, "repetitions")
    """Repetitions of every cell (train.replicate 0 .. n-1); under measure=bench a repetition is a block."""
    margins: dict[str, float] = field(default_factory=dict)
    """Largest mean difference over seeds that does not matter: loss (relative), grad_norm (logarithm of the ratio)."""
    window: int = number(0, 0, COUNT, "steps")
    """Last steps of a run that the margins are about; 0 is its later half."""
    order_seed: int = number(0, 0, SEED)
    """Seed of the order in which the arms of a block run, drawn anew for each block (bench)."""


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
