"""Models of the routed and the odd family that tests share: initial weights, random sequences, mean gradients."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from harness.config.compose import composed, plain
from harness.config.schema import Config
from harness.config.typed import load_config
from harness.engines.protocol import Microbatch
from harness.models.workload import TokenWorkload

Tensors = dict[str, Tensor]


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
