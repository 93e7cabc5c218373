"""Rules of matrix products in 8 bits (dtype.fp8): engine, ranks, dtypes and sizes."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.adapter import capabilities_of
from harness.config.capabilities import ENGINES
from harness.config.errors import Violation
from harness.config.projections import FAMILIES, projections, tp_shard
from harness.config.rules.request import Request, Rule, rule
from harness.config.schema import DTYPE_ROLES, Dtype, EngineName

QUANTIZED = (Dtype.fp32, Dtype.bf16, Dtype.fp16)
"""Dtypes that are quantized to 8 bits: fp32 holds each of their numbers."""


@rule()
def eight_bits_are_built(request: Request) -> Iterator[Violation]:
    config = request.config
    if config.dtype.fp8 is None:
        return
    if not capabilities_of(config).fp8:
        able = [each.name for each in EngineName if ENGINES[each].fp8]
        yield Violation(
            request.show("dtype.fp8"),
            f"engine={config.engine.name.name} has no layers that multiply 8-bit numbers",
            "null; engines that do: " + ", ".join(able),
            f"engine={able[0]}, or dtype=bf16",
        )
    if config.model.family not in FAMILIES:
        yield Violation(
            request.show("dtype.fp8"),
            f"model.family={config.model.family.name} has no projections to multiply in 8 bits",
            "null; families that do: " + ", ".join(each.name for each in FAMILIES),
            "model=tiny, or dtype=bf16",
        )
    if config.sharp.group.is_asked:
        yield Violation(
            request.show("dtype.fp8", "sharp.group"),
            "is not implemented: no switch was observed to compute the largest amax",
            "sharp=none",
            "sharp=none, or dtype=bf16",
        )


@rule()
def eight_bits_are_made_of_fp32_or_less(request: Request) -> Iterator[Violation]:
    """Weights and activations are rounded once to 8 bits, because fp32, where scales are applied, holds them
    exactly."""
    for role in ("compute", "main_params"):
        assert role in DTYPE_ROLES
        dtype = getattr(request.config.dtype, role)
        if request.config.dtype.fp8 is not None and dtype not in QUANTIZED:
            yield Violation(
                request.show(f"dtype.{role}", "dtype.fp8"),
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
            yield Violation(
                request.show("dtype.fp8", *each.settings),
                f"{shape}: {takes}",
                fitting,
                f"model=tiny_wide{every}, {of_16}or dtype=bf16",
            )
            return  # the first one: the others have the same settings and the same way out
        if rows % recipe.multiple or columns % recipe.multiple:
            yield Violation(
                request.show("dtype.fp8", *each.settings, "mesh.tp"),
                f"{shape}, of which a rank multiplies [{rows}, {columns}]: {takes}",
                f"{fitting} on every rank",
                f"mesh.tp=1, {of_16}or dtype=bf16",
            )
            return


RULES: tuple[Rule, ...] = (eight_bits_are_built, eight_bits_are_made_of_fp32_or_less, tiles_cover_the_weights)
