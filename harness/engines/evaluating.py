"""Forwards of an evaluation: without gradients and in `eval` mode, and without a trace in what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from harness.fsdp import Fp8Linear


@contextmanager
def evaluating(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Context in which modules evaluate; modes, random numbers and scales of FP8 are then as before."""
    modes = [(module, module.training) for module in model.modules()]
    scales = [(buffer, buffer.clone()) for buffer in Fp8Linear.delayed_state(model).values()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in scales:
                buffer.copy_(before)
