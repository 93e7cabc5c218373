"""Rules of the loss scale and of matrix products in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.errors import Violation
from harness.config.rules.request import Request, refusal, rule
from harness.config.schema import Dtype

half_gradients_do_not_vanish = refusal(
    lambda c: c.dtype.compute is Dtype.fp16 and c.dtype.loss_scale == "none" and not c.dtype.allow_low_precision_grads,
    "dtype.compute dtype.loss_scale",
    "computes gradients in fp16, where those below 6e-8 become zero, and nothing scales them up",
    "dtype=fp16, or dtype.loss_scale=dynamic (engine=native), or dtype.allow_low_precision_grads=true to accept it",
)
scaled_gradients_are_stored_wide = refusal(
    lambda c: c.dtype.loss_scale != "none" and c.dtype.main_grads in (Dtype.bf16, Dtype.fp16),
    "dtype.main_grads dtype.loss_scale",
    "stores scaled gradients in 16 bits, where scaling them back is not exact",
    "dtype.main_grads=fp32, or dtype.loss_scale=none",
)

QUANTIZED = (Dtype.fp32, Dtype.bf16, Dtype.fp16)
"""Dtypes that are quantized to 8 bits: fp32 holds each of their numbers."""

eight_bits_have_no_switch = refusal(
    lambda c: c.dtype.fp8 is not None and c.sharp.group.is_asked,
    "dtype.fp8 sharp.group",
    "is not implemented: no switch was observed to compute the largest amax",
    "sharp=none, or dtype=bf16",
)


@rule()
def eight_bits_are_made_of_fp32_or_less(request: Request) -> Iterator[Violation]:
    """Weights and activations are rounded once to 8 bits, because fp32, where scales are applied, holds them
    exactly."""
    for role in ("compute", "main_params"):
        dtype = getattr(request.config.dtype, role)
        if request.config.dtype.fp8 is not None and dtype not in QUANTIZED:
            yield request.wrong(
                f"dtype.{role} dtype.fp8",
                "cannot be quantized to 8 bits: scales are applied in fp32, which would round it first",
                ", ".join(each.name for each in QUANTIZED),
                f"dtype.{role}={'bf16' if role == 'compute' else 'fp32'}, or dtype.fp8=null",
            )
