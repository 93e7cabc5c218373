"""Rules of the engine's capabilities, of dtypes, loss scale, products in 8 bits, NCCL user buffers and SHARP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.config.capabilities import ENGINES
from harness.config.derived import accumulate_dtype, data_ranks, fixed_buffers, global_microbatches, may_leave_unused
from harness.config.doc import as_typed
from harness.config.errors import Violation
from harness.config.own import capabilities_of
from harness.config.rules.request import Request, refusal, rule
from harness.config.schema import (
    DTYPE_ROLES,
    Config,
    Dtype,
    EngineName,
    ModelFamily,
    Numerics,
    OptimizerName,
    OuterStrategy,
    Registration,
    SharpAxis,
    Strategy,
)
from harness.fsdp import Placements
from harness.fsdp.options import TOO_FAR_AHEAD
from harness.store.screen import counted

_BITWISE = (Numerics.ordered, Numerics.exact)

MAIN = ("main_params", "main_grads")


@rule()
def the_engine_has_these_choices(request: Request) -> Iterator[Violation]:
    config, can = request.config, request.can
    main = can.formats if can.main_formats is None else can.main_formats
    buffers = (*can.user_buffers, Registration.none)
    listed: list[tuple[str, tuple[Any, ...], str]] = [
        ("sharding.strategy", can.strategies, "does not shard this way"),
        ("numerics.mode", can.numerics, "cannot promise this order of arithmetic"),
        *((f"dtype.{role}", (*can.formats, None), "does not take this dtype") for role in DTYPE_ROLES),
        *((f"dtype.{role}", main, "does not keep main weights and gradients in this dtype") for role in MAIN),
        ("nccl_ub.mode", buffers, f"does not register its buffers with NCCL{' in this way' * (len(buffers) > 1)}"),
    ]
    for path, valid, problem in listed:
        if request.value(path) not in valid:
            names = ", ".join(each.name for each in valid if each is not None)
            nearest = valid[-1 if path == "numerics.mode" else 0]
            group, _, field = path.partition(".")
            fix = f"{group if field in ('mode', 'strategy') else path}={as_typed(nearest)}, or engine=native"
            yield request.wrong(path, f"engine={config.engine.name.name} {problem}", names, fix)


@rule("mesh.tp")
def the_engine_is_able(request: Request) -> Iterator[Violation]:
    engine = request.config.engine.name
    wanted = (
        ("dtype.loss_scale", "none", "loss_scale", "has no loss scale"),
        ("dtype.fp8", None, "fp8", "has no layers that multiply 8-bit numbers"),
        ("mesh.tp", 1, "tensor_parallel", "does not support tensor parallelism"),
    )
    for path, off, ability, problem in wanted:
        if request.value(path) != off and not getattr(request.can, ability):
            able = [each.name for each in EngineName if getattr(ENGINES[each], ability)]
            without = f"{path}={as_typed(off)}"
            choices, fix = f"{without}; engines that do: {', '.join(able)}", f"engine={able[0]}, or {without}"
            yield request.wrong(path, f"engine={engine.name} {problem}", choices, fix)


@rule("mesh.world_size", "mesh.tp")
def ranks_are_possible(request: Request) -> Iterator[Violation]:
    engine, tp = request.config.engine.name, request.config.mesh.tp
    most = request.can.max_data_ranks
    if most is not None and data_ranks(request.config) > most:
        problem = f"engine={engine.name} runs in {most} process" + (f" of mesh.tp={tp} ranks" if tp > 1 else "")
        fix = f"mesh.world_size={most * tp}, or engine=native"
        yield request.wrong("mesh.world_size", problem, f"1 to {most * tp}", fix)


@rule("mesh.world_size", "mesh.dp_outer", "mesh.tp")
def outer_axis_divides_the_ranks(request: Request) -> Iterator[Violation]:
    mesh, ranks, outer = request.config.mesh, data_ranks(request.config), request.config.mesh.dp_outer
    if ranks % outer:
        of = (
            f"mesh.world_size={ranks}"
            if mesh.tp == 1
            else f"the {counted(ranks, 'rank')} that mesh.tp={mesh.tp} leaves"
        )
        choices = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        fix = f"mesh.world_size={max(ranks // outer, 1) * outer * mesh.tp}"
        yield request.wrong("mesh.dp_outer", f"does not divide {of}", choices, fix)
    named = request.named.get("sharding", "")
    if outer == 1 and (
        request.config.sharding.outer is not OuterStrategy.no_shard or named in [each.hybrid for each in OuterStrategy]
    ):
        yield Violation(
            f"sharding={named}" if named else request.show("sharding.outer"),
            "has no outer axis to act on: mesh.dp_outer=1",
            "mesh.dp_outer of 2 or more, a divisor of mesh.world_size",
            "mesh=two_by_two, or mesh.world_size=4 mesh.dp_outer=2",
        )


@rule("mesh.dp_outer")
def hybrid_is_built(request: Request) -> Iterator[Violation]:
    sharding, engine = request.config.sharding, request.config.engine.name
    valid = request.can.hybrid
    if request.config.mesh.dp_outer == 1 or (sharding.strategy, sharding.outer) in valid:
        return
    others = [e.name for e in EngineName if (sharding.strategy, sharding.outer) in ENGINES[e].hybrid]
    yield request.wrong(
        "sharding.strategy sharding.outer mesh.dp_outer",
        f"engine={engine.name} does not run this hybrid",
        "; ".join(f"{inner.name} inside, {outer.name} outside" for inner, outer in valid) or "mesh.dp_outer=1",
        "mesh.dp_outer=1" + (f", or engine={others[0]}" if others else ""),
    )


@rule()
def gradient_dtypes_are_possible(request: Request) -> Iterator[Violation]:
    engine, d, can = request.config.engine.name, request.config.dtype, request.can
    for role, other in can.equal_dtypes:
        want, wires = getattr(d, other), can.compressed_wires if role == "grad_comm" else ()
        if getattr(d, role) is not want and getattr(d, role) not in wires:
            yield request.wrong(
                f"dtype.{role}",
                f"engine={engine.name} has one dtype for this and for dtype.{other}",
                ", ".join(dict.fromkeys(x.name for x in (want, *wires))),
                f"dtype.{role}={want.name}, or engine=native",
            )
    backend_sums = not can.sums_itself and d.grad_accum not in (None, d.grad_comm)
    if backend_sums or (engine is EngineName.single and d.grad_accum not in (None, d.main_grads)):
        problem = f"engine={engine.name} leaves sums to the backend, which sums in the dtype that is sent"
        fix = "dtype.grad_accum=null, or engine=native"
        yield request.wrong("dtype.grad_accum", problem, f"null, {d.grad_comm.name}", fix)


def _holds(dtype: Dtype, other: Dtype) -> bool:
    return dtype is other or dtype.bytes > max(2, other.bytes)


@rule()
def gradients_keep_their_precision(request: Request) -> Iterator[Violation]:
    """Sums in 16 bits, or in fewer than arrive, lose small contributions, and need consent."""
    d = request.config.dtype
    if d.allow_low_precision_grads:
        return
    if d.main_grads.bytes < 4:
        problem = "stores gradients in 16 bits, where sums over microbatches lose small contributions"
        fix = "dtype.main_grads=fp32, or dtype.allow_low_precision_grads=true to accept it"
        yield request.wrong("dtype.main_grads", problem, "fp32, fp64", fix)
    total = accumulate_dtype(request.config)
    asked = d.grad_accum is not None or request.can.sums_itself
    if asked and not (total.bytes >= 4 and _holds(total, d.grad_comm)):
        best = "fp64" if d.grad_comm is Dtype.fp64 else "fp32"
        yield request.wrong(
            "dtype.grad_accum",
            f"sums in fewer bits than fp32 or than what arrives (dtype.grad_comm={d.grad_comm.name})",
            "null, fp32 or wider, and as wide as dtype.grad_comm",
            f"dtype.grad_accum={best}, or dtype.allow_low_precision_grads=true to accept it",
        )


def narrow_waits(config: Config) -> Iterator[tuple[str, str]]:
    d, can = config.dtype, capabilities_of(config)
    if global_microbatches(config) <= config.mesh.world_size:
        return
    if (
        config.sharding.strategy is Strategy.no_shard
        and can.waiting_sums_in_compute
        and not _holds(d.compute, d.main_grads)
    ):
        yield "compute", "until the step's one reduction"
    if config.mesh.dp_outer > 1 and can.outer_sums_in_wire and not _holds(d.grad_comm, d.main_grads):
        yield "grad_comm", "until the outer axis reduces"


@rule("mesh.world_size", "mesh.dp_outer", "train.global_batch_size", "train.microbatch_size")
def microbatches_are_summed_wide(request: Request) -> Iterator[Violation]:
    config = request.config
    d, engine = config.dtype, config.engine.name
    for role, until in () if d.allow_low_precision_grads else narrow_waits(config):
        yield request.wrong(
            f"dtype.{role}",
            f"engine={engine.name} keeps sums over microbatches in this dtype {until}, "
            f"narrower than dtype.main_grads={d.main_grads.name}",
            ", ".join(x.name for x in Dtype if _holds(x, d.main_grads)),
            f"dtype.{role}={d.main_grads.name}, one microbatch a step, engine=native, "
            "or dtype.allow_low_precision_grads=true to accept it",
        )


@rule()
def main_weights_are_no_narrower(request: Request) -> Iterator[Violation]:
    """Main weights narrower than the compute dtype would lose updates at once."""
    d = request.config.dtype
    if not _holds(d.main_params, d.compute):
        problem = f"cannot hold the numbers of dtype.compute={d.compute.name}"
        choices = ", ".join(x.name for x in Dtype if _holds(x, d.compute))
        yield request.wrong("dtype.main_params", problem, choices, f"dtype.main_params={d.compute.name}")


bits_do_not_depend_on_cuts = refusal(
    lambda c: (
        c.dtype.main_params.bytes < 4
        and c.optimizer.name is not OptimizerName.adamw
        and c.engine.name is EngineName.native
        and c.numerics.mode in _BITWISE
    ),
    "optimizer.name dtype.main_params",
    "rounding depends on where shards are cut, which numerics={numerics.mode.name} rules out",
    "optimizer=adamw, dtype.main_params=fp32, or numerics=fast",
)
"""torch's 16-bit add with a factor rounds differently at the end of a tensor: only AdamW steps without it."""


prefetched_units_have_room = refusal(
    lambda c: c.engine.prefetch > 1 and fixed_buffers(c),
    "engine.prefetch",
    TOO_FAR_AHEAD,
    "engine.prefetch=1, or engine.double_buffer=false nccl_ub=none",
    reads="engine.double_buffer engine.prefetch",
)


@rule("model.skip_idle")
def idle_parameters_are_taken(request: Request) -> Iterator[Violation]:
    config, can = request.config, request.can
    if not may_leave_unused(config):
        return
    if config.mesh.world_size > 1 and not can.idle_parameters:
        where, then = " on some ranks only", "reduces its units in different orders and hangs"
    elif config.sharding.strategy in can.keeps_idle_gradients:
        where, then = "", "updates them by their last step's gradient again"
    else:
        return
    yield request.wrong(
        "model.skip_idle",
        f"lets a microbatch leave parameters of model.family={config.model.family.name} without a gradient{where}; "
        f"engine={config.engine.name.name} then {then}",
        "false",
        "model.skip_idle=false, or engine=native",
    )


@rule("mesh.world_size", "mesh.dp_outer", "mesh.tp")
def lone_shards_are_right(request: Request) -> Iterator[Violation]:
    """Some engines scale or sum gradients wrongly over a shard group of one rank."""
    config = request.config
    engine, strategy = config.engine.name, config.sharding.strategy
    splits = not Placements.of(strategy, None).accumulates_locally
    inner = data_ranks(config) // config.mesh.dp_outer
    if request.can.lone_gradient_shards or not splits or inner != 1:
        return
    yield request.wrong(
        "mesh.world_size mesh.dp_outer",
        f"splits gradients over groups of one rank, where engine={engine.name} scales or sums them wrongly",
        "mesh.world_size of at least twice mesh.dp_outer",
        f"mesh.world_size={2 * config.mesh.dp_outer}, or engine=native",
    )


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


@rule()
def registered_buffers_are_fixed(request: Request) -> Iterator[Violation]:
    if request.config.nccl_ub.mode is Registration.none or request.config.engine.double_buffer:
        return
    if "engine.double_buffer" in request.named:
        problem = f"contradicts {request.show('nccl_ub.mode')}: buffers that come and go would be registered each time"
        fix = "leave it out (nccl_ub implies it), or nccl_ub=none"
        yield request.wrong("engine.double_buffer", problem, "true", fix)


sharp_gives_up_order = refusal(
    lambda c: c.sharp.group.is_asked and c.numerics.mode is not Numerics.fast,
    "sharp.group",
    "leaves the order of sums to the network, which numerics={numerics.mode.name} promises",
    "sharp=none, or numerics=fast",
)
sharp_has_its_axis = refusal(
    lambda c: c.sharp.group is SharpAxis.dp_outer and c.mesh.dp_outer == 1,
    "sharp.group",
    "has no outer axis to act on: mesh.dp_outer=1",
    "sharp=dp, or mesh=two_by_two",
    reads="mesh.dp_outer",
)
sharp_has_one_owner = refusal(
    lambda c: c.sharp.group.is_asked and c.mesh.dp_outer > 1 and not capabilities_of(c).orders_communicators,
    "sharp.group mesh.dp_outer",
    "engine={engine.name.name} creates the communicators of its two axes in an order of its own, and the first one to"
    " ask takes InfiniBand SHARP",
    "engine=native, or sharp=none",
    reads="mesh.dp_outer",
)
