"""Models of a user's own, to be planned as they are: convolutions with tied weights, and one that looks at its data."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.models.workload import TokenWorkload


class Convolution(nn.Module):
    def __init__(self, dim: int, **where: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, **where)
        self.mix = nn.Conv1d(dim, dim, 3, **where)

    def forward(self, x_BSD: Tensor) -> Tensor:
        padded_BDS = F.pad(self.norm(x_BSD).transpose(1, 2), (2, 0))
        return x_BSD + F.gelu(self.mix(padded_BDS).transpose(1, 2))


class Skipped(Convolution):
    """Runs where its input is not small, which only data tell."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        return super().forward(x_BSD) if x_BSD.abs().max() > 1e-6 else x_BSD


class ConvolutionWorkload(TokenWorkload):
    unit_classes: tuple[type[nn.Module], ...] = (Convolution,)

    def build(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        config, where = self.model_config, dict[str, Any](device=device, dtype=dtype)
        embedding = nn.Embedding(config.vocab_size, config.dim, **where)
        blocks = nn.Sequential(*(self.unit_classes[0](config.dim, **where) for _ in range(config.num_layers)))
        head = nn.Linear(config.dim, config.vocab_size, bias=False, **where)
        head.weight = embedding.weight
        return nn.Sequential(OrderedDict(embedding=embedding, blocks=blocks, head=head))

    def materialise_buffers(self, model: nn.Module, device: torch.device) -> None:
        """There are none. A rank is here: oneDNN's kernels take memory of their own, by the processor's kind."""
        if device.type != "meta":
            torch.backends.mkldnn.set_flags(_enabled=False)


class SkippedWorkload(ConvolutionWorkload):
    unit_classes = (Skipped,)
