"""Trains the decoder of `models` on a mesh of data-parallel by tensor-parallel ranks, and plainly in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from harness.fsdp import MegatronModel, MixedPrecisionPolicy, fully_shard
from tests.fsdp.tensor_parallel.models import Block, Shape, built, cut, loss_of, tokens_of

PLAIN = Shape()
SEQUENCES = 2
"""Sequences of a microbatch."""


@dataclass(frozen=True)
class Case:
    """One training. inner, outer, tp: sizes of the axes. k: microbatches a step."""

    inner: int
    tp: int
    outer: int = 1
    strategy: str = "optim_grads_params"
    outer_strategy: str = "no_shard"
    k: int = 1
    shape: Shape = PLAIN
    optimizer: str = "adamw"
    clip: float | None = None
    steps: int = 3
    dtype: torch.dtype = torch.float64
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def data_parallel(self) -> int:
        """Ranks with data of their own."""
        return self.inner * self.outer

    @property
    def world(self) -> int:
        """All ranks."""
        return self.data_parallel * self.tp


@dataclass
class Record:
    """What a training was: of each step the loss of this rank's data and the norm; whole tensors by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step, before clipping."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """After the last step."""


def optimizer_of(name: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Settings that leave a mark: decay and momentum."""
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def rows_of(case: Case, step: int, microbatch: int, place: int) -> Tensor:
    """Sequences that a data-parallel rank sees."""
    first = (microbatch * case.data_parallel + place) * SEQUENCES
    return torch.stack([tokens_of(step, first + number, case.shape) for number in range(SEQUENCES)])


def mesh_of(case: Case) -> DeviceMesh:
    """Three axes, the tensor-parallel one last; one mesh of its sizes in a visit, as in a program: to connect its
    groups takes longer than a step."""
    return _mesh(case.outer, case.inner, case.tp)


@cache
def _mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner", "tp"))


def sharded(case: Case, mesh: DeviceMesh) -> tuple[MegatronModel, torch.optim.Optimizer]:
    """The decoder, cut and then sharded."""
    model = built(case.shape, case.dtype)
    if case.tp > 1:
        cut(model, case.shape, mesh["tp"])
    optimizer = optimizer_of(case.optimizer, [param for param in model.parameters() if param.requires_grad])
    outer = {"dp_outer_dim": "outer"} if case.outer > 1 else {}
    return fully_shard(
        model,
        optimizer,
        device_mesh=mesh,
        dp_shard_dim="inner",
        tp_dim="tp",
        fsdp_unit_modules=[Block],
        zero_dp_strategy=case.strategy,
        outer_dp_sharding_strategy=case.outer_strategy if case.outer > 1 else "no_shard",
        **{"mixed_precision_policy": MixedPrecisionPolicy(main_params_dtype=None), **outer, **dict(case.options)},
    )


def whole_of(tensor: Tensor) -> Tensor:
    """Put together from all ranks where it is cut. *Collective* there."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(rank: int, case: Case) -> Record:
    """Train on this rank."""
    mesh = mesh_of(case)
    model, optimizer = sharded(case, mesh)
    place = mesh.get_local_rank("outer") * case.inner + mesh.get_local_rank("inner")
    found = Record()
    for step in range(case.steps):
        total = 0.0
        for microbatch in range(case.k):
            model.set_model_auto_sync(microbatch == case.k - 1)
            loss = loss_of(model, rows_of(case, step, microbatch, place))
            (loss / case.k).backward()
            total += loss.item() / case.k
        if step == 0:
            found.gradients = dict(model.full_gradients())
        norm = float(model.grad_norm() if case.clip is None else model.clip_grad_norm_(case.clip))
        found.losses.append(total)
        found.norms.append(norm)
        optimizer.step()
        optimizer.zero_grad()
    found.weights = dict(model.full_weights())
    model.close()
    return found


def train_all(rank: int, cases: list[Case]) -> list[Record]:
    """One after the other."""
    return [train(rank, case) for case in cases]


def alone(case: Case) -> Record:
    """The same in one process, whole, in plain torch and fp64. Losses are means over the data-parallel ranks."""
    model = built(case.shape)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = optimizer_of(case.optimizer, params)
    found = Record()
    for step in range(case.steps):
        parts = [
            loss_of(model, rows_of(case, step, microbatch, place))
            for microbatch in range(case.k)
            for place in range(case.data_parallel)
        ]
        loss = torch.stack(parts).mean()
        loss.backward()
        found.losses.append(loss.item())
        if step == 0:
            found.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(params, case.clip if case.clip is not None else float("inf"))
        found.norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    found.weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return found
