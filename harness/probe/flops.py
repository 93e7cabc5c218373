"""Model arithmetic per token, and peak rates of devices."""

from __future__ import annotations

import torch

from harness.config.derived import parameter_count
from harness.config.schema import Config, Dtype, ModelFamily

PEAK_BF16_FLOPS = {"H100": 989e12, "H200": 989e12, "GH200": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bf16 tensor-core operations a second by device name (SXM parts, vendor's data sheets)."""

CARDS = {"PCIE", "NVL"}
"""Words in names of PCIe parts, which are slower and not rated."""


def flops_per_token(config: Config) -> float | None:
    """Floating-point operations of one token's forward and backward, without recomputation.

    Six for each trained weight of a matrix multiplication (an embedding's lookup is none, its use as projection is
    one), of routed experts, those of a token; and 6 * seq_len * dim a block for causal attention: 4 * seq_len * dim in
    the forward, half masked, times three. None for models that are no decoder here.
    """
    model = config.model
    if model.family not in (ModelFamily.llama, ModelFamily.moe):
        return None
    embedding_lookup = 0 if model.tie_embeddings else model.vocab_size * model.dim
    norms = (2 * model.num_layers + 1) * model.dim
    idle = 0
    if model.family is ModelFamily.moe:
        idle = model.num_layers * (model.num_experts - model.experts_per_token) * 3 * model.dim * model.ffn_dim
    weights = parameter_count(config) - embedding_lookup - norms - idle
    return 6.0 * weights + 6.0 * model.num_layers * config.data.seq_len * model.dim


def peak_flops(device: torch.device, compute: Dtype) -> float | None:
    """Operations a second of a device in this dtype; None if unknown."""
    if device.type != "cuda" or compute is not Dtype.bf16:
        return None
    return peak_of_name(torch.cuda.get_device_name(device))


def peak_of_name(name: str) -> float | None:
    """Dense bf16 operations a second by the driver's name ("NVIDIA H100 80GB HBM3"); None if unknown."""
    words = name.upper().replace("-", " ").split()
    rates = (PEAK_BF16_FLOPS[word] for word in words if word in PEAK_BF16_FLOPS)
    return None if CARDS & {*words} else next(rates, None)
