"""One small training on any of torch's engines, recorded; on the decoder, or on a model made of awkward cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.config.schema import Config, Dtype, EngineName, ModelFamily, Numerics, OptimizerName, Strategy
from harness.engines.protocol import Engine, Microbatch, Ranks
from harness.engines.registry import engine_class
from harness.models.workload import LlamaWorkload, seed_of
from harness.probe.collectives import CollectiveMeter, by_kind

VOCAB, DIM, LENGTH = 13, 7, 5
ROLES = ("compute", "main_params", "main_grads", "grad_comm")
DTYPES = {
    "fp64": ("fp64", "fp64", "fp64", "fp64"),
    "fp32": ("fp32", "fp32", "fp32", "fp32"),
    "bf16": ("bf16", "fp32", "fp32", "fp32"),
    "bf16_comm": ("bf16", "fp32", "fp32", "bf16"),
    "fp16_comm": ("fp32", "fp32", "fp32", "fp16"),
    "wide": ("fp32", "fp64", "fp64", "fp32"),
}
"""Of each policy: the roles' dtypes."""
PEERS = (
    ("fsdp2", "optim_grads"),
    ("fsdp2", "optim_grads_params"),
    ("fsdp1", "no_shard"),
    ("fsdp1", "optim_grads"),
    ("fsdp1", "optim_grads_params"),
    ("ddp", "no_shard"),
    ("ddp", "optim"),
)
"""Torch's own engines, each with the strategies it has."""
SHARDED = tuple(peer for peer in PEERS if peer[1].startswith("optim_grads"))


def outers(world_size: int) -> list[int]:
    """Sizes of an outer axis: the inner group keeps several ranks, or one."""
    return [outer for outer in (2, 4) if world_size % outer == 0]


class Part(nn.Module):
    """A unit of prime sizes: a matrix with fewer rows than there are ranks, a frozen one, one used at times only."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()

        def weight(*shape: int, trained: bool = True) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=trained)

        self.up, self.bias, self.down = weight(11, DIM), weight(11), weight(DIM, 11)
        self.flat = weight(2, DIM)
        self.frozen = weight(DIM, DIM, trained=False)
        self.at_times = weight(DIM)
        self.register_buffer("shift", torch.empty(DIM, device=device, dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        mixed = x @ self.frozen + self.shift.to(x.dtype) + self.flat.sum(0)
        out = F.linear(torch.tanh(F.linear(mixed, self.up, self.bias)), self.down)
        return x + (out * self.at_times if use else out)


class Awkward(nn.Module):
    """Tied weights, parameters of the root, a unit that runs twice, one never run, and a parameter never used."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, device=device, dtype=dtype)
        self.twice, self.once, self.never = Part(device, dtype), Part(device, dtype), Part(device, dtype)
        self.head = nn.Linear(DIM, VOCAB, bias=False, device=device, dtype=dtype)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.unused = nn.Parameter(torch.empty(3, device=device, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        use = bool(tokens[0, 0] % 2)
        x = self.embed(tokens)
        for part in (self.twice, self.once, self.twice):
            x = part(x, use)
        logits: Tensor = self.head(x) * self.temperature
        return logits


class AwkwardWorkload:
    """Implements `harness.engines.protocol.Workload`. Embedding and head are units too, were they not tied."""

    unit_classes: tuple[type[nn.Module], ...] = (Part, nn.Embedding, nn.Linear)
    may_leave_unused = True

    def __init__(self, config: Config) -> None:
        self.seed = config.train.seed

    def build(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        model = Awkward(device, dtype)
        if torch.device(device).type != "meta":
            self.materialise_buffers(model, torch.device(device))
        return model

    def quantize(self, model: nn.Module, device: torch.device) -> None:
        """Nothing is asked to."""

    def initial_weight(self, name: str, shape: torch.Size) -> Tensor:
        generator = torch.Generator().manual_seed(seed_of(self.seed, name))
        return torch.empty(shape).normal_(0.0 if len(shape) > 1 else 1.0, 0.3, generator=generator)

    def materialise_buffers(self, model: nn.Module, device: torch.device) -> None:
        for part in model.modules():
            if isinstance(part, Part):
                part.shift = torch.linspace(-0.1, 0.1, DIM, device=device)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        logits = model(tokens)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide.flatten(0, 1), targets.flatten())

    def decays(self, name: str, shape: torch.Size) -> bool:
        return len(shape) > 1


@dataclass(frozen=True)
class Case:
    """What is trained and how; equal cases on different engines see the same microbatches in the same global order."""

    engine: str
    strategy: str = "no_shard"
    world_size: int = 1
    k: int = 1
    optimizer: str = "adamw"
    clip: float | None = None
    dtype: str = "fp64"
    outer: int = 1
    awkward: bool = False
    steps: int = 3
    numerics: str = "fast"
    scale: float = 1.0
    """A fault: every loss is multiplied by this."""

    @property
    def num_microbatches(self) -> int:
        return self.world_size * self.k

    def reference(self, dtype: str = "fp64") -> Case:
        """The same training on one process in this dtype."""
        return replace(
            self,
            engine="single",
            strategy="no_shard",
            world_size=1,
            outer=1,
            k=self.num_microbatches,
            numerics="fast",
            dtype=dtype,
            scale=1,
        )

    def config(self) -> Config:
        config = Config()
        model = config.model
        model.vocab_size, model.dim, model.num_layers, model.num_heads = VOCAB, 24, 2, 2
        model.num_kv_heads, model.ffn_dim, model.max_seq_len = 1, 20, 16
        model.family = ModelFamily.odd if self.awkward else ModelFamily.llama
        config.data.seq_len = LENGTH
        config.engine.name, config.sharding.strategy = EngineName[self.engine], Strategy[self.strategy]
        config.mesh.world_size, config.mesh.dp_outer = self.world_size, self.outer
        config.numerics.mode = Numerics[self.numerics]
        config.train.microbatch_size, config.train.global_batch_size = 1, self.num_microbatches
        for role, dtype in zip(ROLES, DTYPES[self.dtype], strict=True):
            setattr(config.dtype, role, Dtype[dtype])
        optimizer = config.optimizer
        optimizer.name, optimizer.clip_norm = OptimizerName[self.optimizer], self.clip
        optimizer.lr, optimizer.momentum, optimizer.eps = (
            (0.1, 0.9, 1e-8) if self.optimizer == "sgd" else (3e-3, 0, 1e-5)
        )
        return config

    def build(self, rank: int, seed: int = 0) -> Engine:
        config = self.config()
        config.train.seed = seed
        workload: Any = AwkwardWorkload(config) if self.awkward else LlamaWorkload(config)
        if self.scale != 1.0:
            right = workload.loss
            workload.loss = lambda model, batch: right(model, batch) * self.scale
        return engine_class(config.engine.name)(
            workload, config, Ranks(rank, self.world_size, rank, torch.device("cpu"))
        )

    def batches(self, rank: int, step: int) -> list[Microbatch]:
        """This rank's microbatches: a function of the global microbatch index, so distinct on every rank."""
        found = []
        for index in range(rank * self.k, (rank + 1) * self.k):
            tokens = torch.randint(
                0, VOCAB, (1, LENGTH + 1), generator=torch.Generator().manual_seed(999 * step + index)
            )
            found.append(Microbatch(tokens[:, :-1], tokens[:, 1:]))
        return found


@dataclass
class Record:
    """gradients: of step 1. weights: at step 0 and after each update. traffic: of each step, by kind."""

    case: Case
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    losses: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weight_norms: list[float] = field(default_factory=list)
    traffic: list[dict[str, dict[str, int]]] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def accumulate(engine: Engine, case: Case, rank: int, step: int) -> list[float]:
    """One step's microbatches on this rank; their losses."""
    todo = case.batches(rank, step)
    return [engine.forward_backward(batch, last=batch is todo[-1]).item() for batch in todo]


def run_case(rank: int, case: Case, look: Callable[[Engine, Record], None] | None = None) -> Record:
    """Train one case on this rank; tensors are kept on rank 0 only."""
    engine = case.build(rank)
    record = Record(case)
    record.weights[0] = _keep(rank, engine.named_weights())
    meter = CollectiveMeter()
    try:
        for step in range(1, case.steps + 1):
            record.losses.append(accumulate(engine, case, rank, step))
            with meter.paused():
                if step == 1:
                    record.gradients = _keep(rank, engine.named_gradients())
            record.norms.append(engine.step(case.config().optimizer.lr))
            record.traffic.append(by_kind(meter.take()))
            with meter.paused():
                record.weights[step] = _keep(rank, engine.named_weights())
                record.weight_norms.append(engine.weight_norm())
    finally:
        meter.close()
    record.bytes = engine.accounted_bytes()
    if look is not None:
        look(engine, record)
    engine.close()
    return record


def run_cases(rank: int, cases: Iterable[Case]) -> list[Record]:
    """Several cases in one process group."""
    return [run_case(rank, case) for case in cases]


def _keep(rank: int, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: value for name, value in named if rank == 0}
