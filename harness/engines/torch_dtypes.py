"""Torch's name of each configured dtype."""

from __future__ import annotations

import torch

from harness.config.schema import Dtype

TORCH_DTYPES: dict[Dtype, torch.dtype] = {each: getattr(torch, each.torch_name) for each in Dtype}
