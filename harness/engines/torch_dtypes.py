"""Torch's name of each configured dtype."""

from __future__ import annotations

import torch

from harness.config.schema import Dtype

TORCH_DTYPES = {
    Dtype.fp32: torch.float32,
    Dtype.bf16: torch.bfloat16,
    Dtype.fp16: torch.float16,
    Dtype.fp64: torch.float64,
}
"""Torch's name of each configured dtype."""
