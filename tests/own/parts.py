"""The least that model=ext, data=ext and optimizer=ext need."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from harness.config.schema import DataConfig
from harness.models.workload import TokenWorkload


class Workload(TokenWorkload):
    """An embedding and a projection."""

    unit_classes = (nn.Linear,)

    def build(self, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """The two in a row."""
        sizes = self.model_config
        return nn.Sequential(
            nn.Embedding(sizes.vocab_size, sizes.dim, device=device, dtype=dtype),
            nn.Linear(sizes.dim, sizes.vocab_size, device=device, dtype=dtype),
        )

    def materialise_buffers(self, model: nn.Module, device: torch.device) -> None:
        """There are none."""


class Counting:
    """Sequence i counts from i."""

    num_sequences = 100

    def __init__(self, data: DataConfig) -> None:
        self.seq_len = data.seq_len

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return np.arange(index, index + self.seq_len + 1, dtype=np.int64) % 256


class Plain(torch.optim.SGD):
    """SGD by another name."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
