"""Rules of the loss scale and of matrix products in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.errors import Violation
from harness.config.rules.request import Request, refusal, rule
from harness.config.schema import Dtype, ModelFamily

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
overflows_are_skipped_or_reported = refusal(
    lambda c: c.dtype.loss_scale == "dynamic" and c.engine.report_nan_in_param_grad,
    "engine.report_nan_in_param_grad dtype.loss_scale",
    "ends the run at the first overflow, which a dynamic loss scale provokes and skips",
    "engine.report_nan_in_param_grad=false, or dtype.loss_scale=none",
)

QUANTIZED = (Dtype.fp32, Dtype.bf16, Dtype.fp16)
"""Dtypes that are quantized to 8 bits: fp32 holds each of their numbers."""

FAMILIES = (ModelFamily.llama, ModelFamily.moe)
"""Model families whose projections may be multiplied in 8 bits."""

eight_bits_have_projections = refusal(
    lambda c: c.dtype.fp8 is not None and c.model.family not in FAMILIES,
    "dtype.fp8",
    "model.family={model.family.name} has no projections to multiply in 8 bits",
    "model=tiny, or dtype=bf16",
    choices="null; families that do: " + ", ".join(each.name for each in FAMILIES),
)
eight_bits_have_no_switch = refusal(
    lambda c: c.dtype.fp8 is not None and c.sharp.group.is_asked,
    "dtype.fp8 sharp.group",
    "is not implemented: no switch was observed to compute the largest amax",
    "sharp=none, or dtype=bf16",
)
eight_bits_are_not_cut = refusal(
    lambda c: c.dtype.fp8 is not None and c.mesh.tp > 1,
    "dtype.fp8 mesh.tp",
    "multiplies whole weights in 8 bits, which tensor parallelism cuts",
    "mesh.tp=1, or dtype=bf16",
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


@rule("model.dim", "model.num_heads", "model.num_kv_heads", "model.ffn_dim", "model.num_layers")
def tiles_cover_the_weights(request: Request) -> Iterator[Violation]:
    recipe, m = request.config.dtype.fp8, request.config.model
    sizes = {m.dim, m.ffn_dim, m.dim // max(1, m.num_heads) * m.num_kv_heads}
    if recipe is not None and m.family in FAMILIES and any(size % recipe.multiple for size in sizes):
        of_16 = "dtype=fp8_current (whose multiple is 16), " if recipe.multiple > 16 else ""
        yield request.wrong(
            "dtype.fp8",
            f"takes multiples of {recipe.multiple}, and projections have sizes {sorted(sizes)}",
            f"sizes of attention and feed-forward that {recipe.multiple} divides",
            f"model=tiny_wide{' (which every recipe takes)' * bool(of_16)}, {of_16}or dtype=bf16",
        )
