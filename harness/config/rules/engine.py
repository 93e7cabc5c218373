"""What the chosen engine can do, and which dtypes go together."""

from __future__ import annotations

from collections.abc import Iterator

from harness.config.capabilities import ENGINES
from harness.config.derived import DTYPE_BYTES
from harness.config.errors import Violation
from harness.config.rules.request import Request, Rule, rule
from harness.config.schema import EngineName


@rule()
def strategy_is_built(request: Request) -> Iterator[Violation]:
    """The engine splits what is asked."""
    engine, strategy = request.config.engine.name, request.config.sharding.strategy
    valid = ENGINES[engine].strategies
    if strategy not in valid:
        others = [e.name for e in EngineName if strategy in ENGINES[e].strategies]
        yield Violation(
            request.show("sharding.strategy"),
            f"engine={engine.name} does not shard this way",
            ", ".join(s.name for s in valid),
            f"sharding={valid[0].name}, or engine={others[0]}",
        )


@rule()
def numerics_are_promised(request: Request) -> Iterator[Violation]:
    """The engine keeps the promise about the order of arithmetic."""
    engine, mode = request.config.engine.name, request.config.numerics.mode
    valid = ENGINES[engine].numerics
    if mode not in valid:
        yield Violation(
            request.show("numerics.mode"),
            f"engine={engine.name} cannot promise this order of arithmetic",
            ", ".join(m.name for m in valid),
            "engine=native, or numerics=deterministic",
        )


@rule("mesh.world_size")
def ranks_are_possible(request: Request) -> Iterator[Violation]:
    """The engine runs on that many ranks."""
    engine, most = request.config.engine.name, ENGINES[request.config.engine.name].max_world_size
    if most is not None and request.config.mesh.world_size > most:
        yield Violation(
            request.show("mesh.world_size"),
            f"engine={engine.name} runs in {most} process",
            f"1 to {most}",
            f"mesh.world_size={most}, or engine=native",
        )


@rule()
def gradient_dtypes_are_possible(request: Request) -> Iterator[Violation]:
    """Engines on plain torch keep, send and sum gradients in the main weights' dtype."""
    engine, d = request.config.engine.name, request.config.dtype
    if ENGINES[engine].free_gradient_dtypes:
        return
    for role in ("main_grads", "grad_comm", "grad_accum"):
        if getattr(d, role) is not d.main_params:
            yield Violation(
                request.show(f"dtype.{role}"),
                f"engine={engine.name} keeps, sends and sums gradients in the dtype of dtype.main_params",
                d.main_params.name,
                f"dtype.{role}={d.main_params.name}, or engine=native",
            )


@rule()
def gradients_keep_their_precision(request: Request) -> Iterator[Violation]:
    """Sums in 16 bits lose small contributions; that needs a word of consent."""
    d = request.config.dtype
    if DTYPE_BYTES[d.main_grads] < 4 and not d.allow_low_precision_grads:
        yield Violation(
            request.show("dtype.main_grads"),
            "stores gradients in 16 bits, where sums over microbatches lose small contributions",
            "fp32, fp64",
            "dtype.main_grads=fp32, or dtype.allow_low_precision_grads=true to accept it",
        )
    if DTYPE_BYTES[d.grad_accum] < max(4, DTYPE_BYTES[d.grad_comm]):
        yield Violation(
            request.show("dtype.grad_accum"),
            f"sums in fewer bits than fp32 or than what arrives (dtype.grad_comm={d.grad_comm.name})",
            "fp32 or wider, and as wide as dtype.grad_comm",
            "dtype.grad_accum=fp64" if d.grad_comm.name == "fp64" else "dtype.grad_accum=fp32",
        )


@rule()
def main_weights_are_no_narrower(request: Request) -> Iterator[Violation]:
    """Updates of weights kept in fewer bits than they are computed with would be lost at once."""
    d = request.config.dtype
    if DTYPE_BYTES[d.main_params] < DTYPE_BYTES[d.compute]:
        yield Violation(
            request.show("dtype.main_params"),
            f"is narrower than dtype.compute={d.compute.name}",
            f"{d.compute.name} or wider",
            f"dtype.main_params={d.compute.name}",
        )


RULES: tuple[Rule, ...] = (
    strategy_is_built,
    numerics_are_promised,
    ranks_are_possible,
    gradient_dtypes_are_possible,
    gradients_keep_their_precision,
    main_weights_are_no_narrower,
)
