"""Trainings of the routed and the odd family that tests share: real data, plain torch, and any engine on ranks."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from harness.config.compose import composed, plain
from harness.config.schema import Config, Dtype, EngineName, Strategy
from harness.config.typed import load_config
from harness.engines import optim
from harness.engines.protocol import Microbatch
from harness.models.registry import workload_for
from harness.models.workload import TokenWorkload
from tests.fsdp import trial

Tensors = dict[str, Tensor]
STEPS = 3


torch.set_num_threads(1)


@cache
def _composed(overrides: tuple[str, ...]) -> Config:
    return load_config(plain(composed([*overrides])))


def option(*overrides: str, **changes: Any) -> Config:
    """A composed configuration; `changes` are settings of the group `model`."""
    config = copy.deepcopy(_composed(overrides))
    for key, value in changes.items():
        assert hasattr(config.model, key), key
        setattr(config.model, key, value)
    return config


def filled(workload: TokenWorkload, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model with its initial weights."""
    model = workload.build("cpu", dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(workload.initial_weight(name, parameter.shape))
    return model


def rows(config: Config, count: int, seed: int = 0, length: int = 9) -> list[Microbatch]:
    """Sequences of random bytes, one a microbatch."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, min(256, config.model.vocab_size), (count, 1, length + 1), generator=generator)
    return [Microbatch(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn]


def joined(parts: list[Microbatch], size: int) -> list[Microbatch]:
    """The same sequences in microbatches of `size`."""
    groups = [parts[start : start + size] for start in range(0, len(parts), size)]
    return [Microbatch(*(torch.cat(each) for each in zip(*group, strict=True))) for group in groups]


def mean_gradient(workload: TokenWorkload, model: nn.Module, parts: list[Microbatch]) -> tuple[float, Tensors]:
    """Loss and gradient of the mean over microbatches; zeros for what none of them used."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    model.zero_grad(set_to_none=True)
    losses = [workload.loss(model, part) / len(parts) for part in parts]
    for loss in losses:
        loss.backward()
    gradients = {n: torch.zeros_like(w) if w.grad is None else w.grad.clone() for n, w in trained.items()}
    return sum(loss.item() for loss in losses), gradients


@dataclass(frozen=True)
class Case(trial.Case):
    """Some steps of one model on any engine: microbatches of one sequence, M = world_size * k of them a step."""

    steps: int = STEPS

    def config(self) -> Config:
        config = option(f"model={self.model}", max_seq_len=16)
        config.engine.name, config.sharding.strategy = EngineName[self.engine], Strategy[self.strategy]
        config.mesh.world_size, config.data.seq_len = self.world_size, 9
        config.train.microbatch_size, config.train.global_batch_size = 1, self.num_microbatches
        for role in ("compute", "main_params", "main_grads", "grad_comm", "grad_accum"):
            setattr(config.dtype, role, Dtype[self.dtype])
        config.optimizer.lr, config.optimizer.eps, config.optimizer.clip_norm = 1e-2, 1e-4, 0.5
        return config

    def step(self, number: int) -> list[Microbatch]:
        """All microbatches of a step, in global order."""
        return rows(self.config(), self.num_microbatches, 100 * number)

    def batches(self, rank: int, step: int) -> list[Microbatch]:
        return self.step(step)[rank * self.k : (rank + 1) * self.k]


def plain_run(case: Case, dtype: torch.dtype = torch.float64) -> trial.Record:
    """The same in plain torch on one process: what must come out."""
    config = case.config()
    workload = workload_for(config)
    model = filled(workload, dtype)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, weight in trained.items():
        groups[workload.decays(name, weight.shape)].append(weight)
    optimizer = optim.make_optimizer(config.optimizer, [optim.Group(each, decays) for decays, each in groups.items()])
    record = trial.Record(case)
    for number in range(1, STEPS + 1):
        _, gradients = mean_gradient(workload, model, case.step(number))
        record.gradients = record.gradients or gradients
        record.norms.append(optim.global_norm(gradients.values()))
        scale = optim.clip_coefficient(record.norms[-1], config.optimizer.clip_norm)
        for name, weight in trained.items():
            weight.grad = gradients[name] * scale
        optimizer.step()
    record.weights[STEPS] = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return record
