"""Rules of the loss scale: a power of two, for engines that have one; fp16 gradients need it."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.adapter import capabilities_of
from harness.config.capabilities import ENGINES
from harness.config.derived import LARGEST_LOSS_SCALE, loss_scale
from harness.config.errors import Violation
from harness.config.rules.request import Request, Rule, rule
from harness.config.schema import Dtype


@rule()
def loss_scale_is_one(request: Request) -> Iterator[Violation]:
    try:
        loss_scale(request.config)
    except ValueError:
        yield Violation(
            request.show("dtype.loss_scale"),
            "is not a loss scale: only powers of two scale gradients without rounding them",
            f"none, dynamic, or a power of two from 1 to {LARGEST_LOSS_SCALE:.0f}",
            "dtype.loss_scale=dynamic, or dtype.loss_scale=65536",
        )


@rule()
def loss_scale_is_honoured(request: Request) -> Iterator[Violation]:
    engine = request.config.engine.name
    if request.config.dtype.loss_scale != "none" and not capabilities_of(request.config).loss_scale:
        takers = ", or ".join(f"engine={e.name}" for e, can in ENGINES.items() if can.loss_scale)
        yield Violation(
            request.show("dtype.loss_scale"),
            f"engine={engine.name} has no loss scale",
            "none",
            f"{takers}, or dtype.loss_scale=none",
        )


@rule()
def half_gradients_do_not_vanish(request: Request) -> Iterator[Violation]:
    """Gradients of fp16 activations below 2^-24 are zero; no loss scale needs consent."""
    d = request.config.dtype
    if d.compute is not Dtype.fp16 or d.loss_scale != "none" or d.allow_low_precision_grads:
        return
    yield Violation(
        request.show("dtype.compute", "dtype.loss_scale"),
        "computes gradients in fp16, where those below 6e-8 become zero, and nothing scales them up",
        "dynamic, or a power of two; or another dtype.compute (bf16 needs no scale)",
        "dtype=fp16, or dtype.loss_scale=dynamic (engine=native), or dtype.allow_low_precision_grads=true to accept it",
    )


@rule()
def scaled_gradients_are_stored_wide(request: Request) -> Iterator[Violation]:
    """Unscaling would round 16-bit gradients."""
    d = request.config.dtype
    if d.loss_scale != "none" and d.main_grads in (Dtype.bf16, Dtype.fp16):
        yield Violation(
            request.show("dtype.main_grads", "dtype.loss_scale"),
            "stores scaled gradients in 16 bits, where scaling them back is not exact",
            "fp32, fp64",
            "dtype.main_grads=fp32, or dtype.loss_scale=none",
        )


@rule()
def overflows_are_skipped_or_reported(request: Request) -> Iterator[Violation]:
    """A dynamic scale skips overflowing updates; the check for NaN ends the run at the first."""
    config = request.config
    if config.dtype.loss_scale == "dynamic" and config.engine.report_nan_in_param_grad:
        yield Violation(
            request.show("engine.report_nan_in_param_grad", "dtype.loss_scale"),
            "ends the run at the first overflow, which a dynamic loss scale provokes and skips",
            "false, where dtype.loss_scale=dynamic",
            "engine.report_nan_in_param_grad=false, or dtype.loss_scale=none",
        )


RULES: tuple[Rule, ...] = (
    loss_scale_is_one,
    loss_scale_is_honoured,
    half_gradients_do_not_vanish,
    scaled_gradients_are_stored_wide,
    overflows_are_skipped_or_reported,
)
