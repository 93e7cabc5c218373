"""One small training, on any engine, recorded in enough detail to be held against another."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from harness.config.schema import (
    Config,
    Dtype,
    EngineName,
    ModelFamily,
    Numerics,
    OptimizerName,
    OuterStrategy,
    Strategy,
    Transport,
)
from harness.engines.protocol import Microbatch
from tests.engines.conformance.checks import Judgement
from tests.engines.conformance.trial import (
    Evidence,
    batches as batches_of,
    make_engine,
    make_workload,
    train_plainly,
)
from tests.support.covering import once
from tests.support.spawn import run_ranks

DTYPES = {
    # compute, main weights, main gradients, wire, sum
    "fp64": ("fp64",) * 5,
    "fp32": ("fp32",) * 5,
    "bf16": ("bf16", "fp32", "fp32", "fp32", "fp32"),
    "bf16_comm": ("bf16", "fp32", "fp32", "bf16", "fp32"),
}


TRANSPORTS = tuple(Transport)


def transport_of(case: object) -> Transport:
    """Each for half of all cases: no number may depend on it."""
    return TRANSPORTS[zlib.crc32(repr(case).encode()) % 2]


def roles_of(name: str) -> list[Dtype]:
    """The dtypes of a policy: a name of `DTYPES`, or the five of them as "bf16/fp32/fp32/bf16/fp32", all permitted."""
    return [Dtype[each] for each in (DTYPES[name] if name in DTYPES else name.split("/"))]


@dataclass(frozen=True)
class Case:
    """What is trained and how; equal cases on different engines see the same microbatches in the same global order."""

    engine: str = "native"
    strategy: str = "no_shard"
    world_size: int = 1
    k: int = 1
    microbatches: int = 0
    """M; 0 means world_size * k. `single` runs all of them on its one rank."""
    optimizer: str = "adamw"
    clip: float | None = None
    dtype: str = "fp32"
    numerics: str = "fast"
    steps: int = 5
    outer: int = 1
    """Size of the outer axis."""
    outer_strategy: str = "no_shard"
    model: str = "tiny"
    """tiny, or odd: awkward parameters, some of them frozen, tied or unused."""
    options: tuple[tuple[str, Any], ...] = ()
    """Further settings of the group `engine`."""
    in_one_unit: bool = field(default=False, repr=False)
    """All weights are of the root."""
    decay: float = 0.1
    """Of weights with more than one dimension."""

    @property
    def num_microbatches(self) -> int:
        return self.microbatches or self.world_size * self.k

    def reference(self, dtype: str) -> Case:
        """The same training on one process in this dtype."""
        alone = replace(self, engine="single", strategy="no_shard", world_size=1, k=1, outer=1, options=())
        return replace(
            alone, microbatches=self.num_microbatches, dtype=dtype, numerics="fast", outer_strategy="no_shard"
        )

    def config(self) -> Config:
        config = Config()
        model = config.model
        model.vocab_size, model.dim, model.num_layers = 31, 24, 2
        model.num_heads, model.num_kv_heads, model.ffn_dim = 2, 1, 20
        config.data.seq_len = 7
        if self.model == "odd":
            model.family, model.dim, model.ffn_dim = ModelFamily.odd, 13, 17
        config.sharding.outer, config.mesh.dp_outer = OuterStrategy[self.outer_strategy], self.outer
        config.engine.transport = transport_of(self)
        for name, value in self.options:
            setattr(config.engine, name, value)
        config.engine.name, config.sharding.strategy = EngineName[self.engine], Strategy[self.strategy]
        config.mesh.world_size = self.world_size
        config.train.microbatch_size, config.train.global_batch_size = 1, self.num_microbatches
        config.numerics.mode = Numerics[self.numerics]
        dtype = config.dtype
        dtype.compute, dtype.main_params, dtype.main_grads, dtype.grad_comm, dtype.grad_accum = roles_of(self.dtype)
        dtype.allow_low_precision_grads = "/" in self.dtype
        optimizer = config.optimizer
        optimizer.name, optimizer.clip_norm, optimizer.weight_decay = (
            OptimizerName[self.optimizer],
            self.clip,
            self.decay,
        )
        optimizer.lr, optimizer.momentum, optimizer.eps = (
            (0.1, 0.9, 1e-8) if self.optimizer == "sgd" else (3e-3, 0.0, 1e-5)
        )
        return config


def batches(case: Case, rank: int, step: int) -> list[Microbatch]:
    """This rank's microbatches; distinct on every rank, a function of the global microbatch index."""
    return batches_of(case.config(), rank, step)


def run_case(rank: int, case: Case) -> Evidence:
    """Train one case on this rank. Tensors are recorded on rank 0 only."""
    config = case.config()
    workload: Any = make_workload(config)
    if case.in_one_unit:
        workload.unit_classes = ()
    return train_plainly(make_engine(config, workload, rank), config, rank, case.steps, lambda _: config.optimizer.lr)


def run_cases(rank: int, cases: list[Case]) -> list[Evidence]:
    """Several cases in one process group."""
    return [run_case(rank, case) for case in cases]


@once
def alone(case: Case) -> Evidence:
    """The record of a case on one process."""
    return run_ranks(run_cases, 1, [case])[0][0]


@once
def records(cases: tuple[Case, ...]) -> dict[Case, list[Evidence]]:
    """Case -> its record on each rank, of cases of one world size; tensors are on rank 0."""
    per_rank = run_ranks(run_cases, cases[0].world_size, list(cases))
    return {case: [ran[index] for ran in per_rank] for index, case in enumerate(cases)}


def wrong(case: Case, ranks: list[Evidence], reference: Callable[[Case], Evidence] = alone) -> list[str]:
    """How a training differs from one process in fp64, which knows nothing of strategies and ranks."""
    exact, peer = (reference(case.reference(dtype)) for dtype in ("fp64", case.dtype.partition("_")[0]))
    judged = Judgement(case, case.config(), ranks, exact, peer)
    checks = (judged.losses, judged.gradients, judged.norms, judged.updates, judged.frozen)
    return [f"{found.check}: {found.text}" for check in checks for found in check()]


def differences(a: Evidence, b: Evidence) -> list[str]:
    """Everything recorded that does not have the same bits (or is not finite), by name."""
    found = [f"gradient {n}" for n in b.gradients if not torch.equal(a.gradients[n], b.gradients[n])]
    found += [
        f"weight {n} {s}" for s in b.weights for n, w in b.weights[s].items() if not torch.equal(a.weights[s][n], w)
    ]
    found += [f"norm {i}" for i, (x, y) in enumerate(zip(a.norms, b.norms, strict=True)) if x != y]
    found += [f"loss {i}" for i, (x, y) in enumerate(zip(a.losses, b.losses, strict=True)) if x != y]
    return found
