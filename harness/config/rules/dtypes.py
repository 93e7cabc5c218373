"""Rules of the loss scale and of matrix products in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.derived import FAMILIES, projections, tp_shard
from harness.config.errors import Violation
from harness.config.rules.request import Request, rule
from harness.config.schema import DTYPE_ROLES, Dtype


@rule()
def half_gradients_do_not_vanish(request: Request) -> Iterator[Violation]:
    """Gradients of fp16 activations below 2^-24 are zero; no loss scale needs consent."""
    d = request.config.dtype
    if d.compute is not Dtype.fp16 or d.loss_scale != "none" or d.allow_low_precision_grads:
        return
    yield request.wrong(
        "dtype.compute dtype.loss_scale",
        "computes gradients in fp16, where those below 6e-8 become zero, and nothing scales them up",
        "dynamic; or another dtype.compute (bf16 needs no scale)",
        "dtype=fp16, or dtype.loss_scale=dynamic (engine=native), or dtype.allow_low_precision_grads=true to accept it",
    )


@rule()
def scaled_gradients_are_stored_wide(request: Request) -> Iterator[Violation]:
    """Unscaling would round 16-bit gradients."""
    d = request.config.dtype
    if d.loss_scale != "none" and d.main_grads in (Dtype.bf16, Dtype.fp16):
        problem = "stores scaled gradients in 16 bits, where scaling them back is not exact"
        fix = "dtype.main_grads=fp32, or dtype.loss_scale=none"
        yield request.wrong("dtype.main_grads dtype.loss_scale", problem, "fp32, fp64", fix)


@rule()
def overflows_are_skipped_or_reported(request: Request) -> Iterator[Violation]:
    """A loss scale skips overflowing updates; the check for NaN ends the run at the first."""
    config = request.config
    if config.dtype.loss_scale == "dynamic" and config.engine.report_nan_in_param_grad:
        yield request.wrong(
            "engine.report_nan_in_param_grad dtype.loss_scale",
            "ends the run at the first overflow, which a dynamic loss scale provokes and skips",
            "false, where dtype.loss_scale=dynamic",
            "engine.report_nan_in_param_grad=false, or dtype.loss_scale=none",
        )


QUANTIZED = (Dtype.fp32, Dtype.bf16, Dtype.fp16)
"""Dtypes that are quantized to 8 bits: fp32 holds each of their numbers."""


@rule()
def eight_bits_are_built(request: Request) -> Iterator[Violation]:
    config = request.config
    if config.dtype.fp8 is None:
        return
    if config.model.family not in FAMILIES:
        problem = f"model.family={config.model.family.name} has no projections to multiply in 8 bits"
        choices = "null; families that do: " + ", ".join(each.name for each in FAMILIES)
        yield request.wrong("dtype.fp8", problem, choices, "model=tiny, or dtype=bf16")
    if config.sharp.group.is_asked:
        problem = "is not implemented: no switch was observed to compute the largest amax"
        yield request.wrong("dtype.fp8 sharp.group", problem, "sharp=none", "sharp=none, or dtype=bf16")


@rule()
def eight_bits_are_made_of_fp32_or_less(request: Request) -> Iterator[Violation]:
    """Weights and activations are rounded once to 8 bits, because fp32, where scales are applied, holds them
    exactly."""
    for role in ("compute", "main_params"):
        assert role in DTYPE_ROLES
        dtype = getattr(request.config.dtype, role)
        if request.config.dtype.fp8 is not None and dtype not in QUANTIZED:
            yield request.wrong(
                f"dtype.{role} dtype.fp8",
                "cannot be quantized to 8 bits: scales are applied in fp32, which would round it first",
                ", ".join(each.name for each in QUANTIZED),
                f"dtype.{role}={'bf16' if role == 'compute' else 'fp32'}, or dtype.fp8=null",
            )


@rule("model.dim", "model.num_heads", "model.num_kv_heads", "model.ffn_dim", "model.num_layers", "mesh.tp")
def tiles_cover_the_weights(request: Request) -> Iterator[Violation]:
    config, recipe = request.config, request.config.dtype.fp8
    if recipe is None:
        return
    of_16 = "dtype=fp8_current (whose multiple is 16), " if recipe.multiple > 16 else ""
    for each in projections(config.model):
        rows, columns = tp_shard(each, max(1, config.mesh.tp))
        shape = f"{each.name} has shape [{each.rows}, {each.columns}]"
        takes = f"fp8={recipe.name} takes multiples of {recipe.multiple}"
        fitting = f"sizes of attention and feed-forward that {recipe.multiple} divides"
        if each.rows % recipe.multiple or each.columns % recipe.multiple:
            every = " (which every recipe takes)" if of_16 else ""
            subject = request.show("dtype.fp8", *each.settings)
            yield Violation(subject, f"{shape}: {takes}", fitting, f"model=tiny_wide{every}, {of_16}or dtype=bf16")
            return  # the first one: the others have the same settings and the same way out
        if rows % recipe.multiple or columns % recipe.multiple:
            subject = request.show("dtype.fp8", *each.settings, "mesh.tp")
            problem = f"{shape}, of which a rank multiplies [{rows}, {columns}]: {takes}"
            yield Violation(subject, problem, f"{fitting} on every rank", f"mesh.tp=1, {of_16}or dtype=bf16")
            return
