"""Table of engines and their capabilities, without torch; rules refuse requests by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from harness.fsdp.options import (
    Choice,
    Dtype,
    EngineOptions,
    Numerics,
    OuterStrategy,
    Registration,
    Strategy,
    declared_in,
)
from harness.store.commands import page

RERUNS = (Numerics.fast, Numerics.deterministic)
EQUAL_GRADIENTS = (("main_grads", "main_params"), ("grad_comm", "main_grads"))
HALF_OR_SINGLE = (Dtype.fp32, Dtype.bf16, Dtype.fp16)


@dataclass(frozen=True)
class Capabilities:
    strategies: tuple[Strategy, ...]
    hybrid: tuple[tuple[Strategy, OuterStrategy], ...] = ()
    """Pairs of inner and outer strategy that run with mesh.dp_outer > 1."""
    numerics: tuple[Numerics, ...] = RERUNS
    max_data_ranks: int | None = None
    """Most ranks with data of their own; None is any number."""
    formats: tuple[Dtype, ...] = tuple(Dtype)
    main_formats: tuple[Dtype, ...] | None = None
    """Dtypes of main weights and main gradients, if fewer than `formats`."""
    equal_dtypes: tuple[tuple[str, str], ...] = EQUAL_GRADIENTS
    """Fields of the group `dtype` that must agree, because the engine has one dtype for both roles."""
    compressed_wires: tuple[Dtype, ...] = ()
    """Dtypes of gradients on the wire, exempt from `equal_dtypes`."""
    outer_sums_in_wire: bool = False
    """True if sums over microbatches wait for the outer axis in dtype.grad_comm, where it is reduced once a step."""
    waiting_sums_in_compute: bool = False
    """True if sums over microbatches wait for no_shard's one reduction a step in dtype.compute."""
    idle_parameters: bool = True
    """True if a microbatch may leave trained parameters without a gradient on some ranks and not on others."""
    keeps_idle_gradients: tuple[Strategy, ...] = ()
    """Strategies that update a parameter unused in a step by its last step's gradient again."""
    lone_gradient_shards: bool = True
    """True if strategies that split gradients are right over a group of one rank."""
    sums_itself: bool = False
    """True if the engine sums reductions itself, in dtype.grad_accum; else the backend sums in the wire's dtype."""
    user_buffers: tuple[Registration, ...] = ()
    orders_communicators: bool = False
    """True if the engine creates the communicators of both data-parallel axes itself, the owner of SHARP first."""
    tensor_parallel: bool = False
    fp8: bool = False
    """True if linear layers may multiply in FP8 (dtype.fp8)."""
    loss_scale: bool = False
    own_optimizers: bool = False
    adapter: str | None = None
    """Adapter class, as `module:Class`; None: `engine.adapter` names it (ext)."""
    package: str | None = None
    """Distribution needed beyond this project's own dependencies, as `name==version`."""
    settings: tuple[str, ...] = ()


_GROUP = declared_in(EngineOptions)

SAME_BITS = tuple(f"engine.{name}" for name, option in _GROUP.items() if option.same_bits)

_ALL_PAIRS = tuple((inner, outer) for inner in Strategy for outer in OuterStrategy)
_HYBRID = tuple((inner, OuterStrategy.no_shard) for inner in Strategy if inner is not Strategy.no_shard)


class EngineName(Choice):
    """Engines, each with its sentence and capabilities, among them its adapter and package.

    Choices that an engine implies in other groups stand in its file of conf/engine, if any.
    """

    declared: Capabilities

    native = (
        "native",
        "This project's FSDP engine, with all four strategies.",
        Capabilities(
            adapter="harness.engines.adapters.native:NativeEngine",
            strategies=tuple(Strategy),
            hybrid=_ALL_PAIRS,
            numerics=tuple(Numerics),
            equal_dtypes=(),
            sums_itself=True,
            user_buffers=(Registration.auto, Registration.manual),
            orders_communicators=True,
            tensor_parallel=True,
            fp8=True,
            loss_scale=True,
            own_optimizers=True,
            settings=tuple(f"engine.{name}" for name in _GROUP),
        ),
    )
    fsdp2 = (
        "fsdp2",
        "torch FSDP2 (fully_shard). Under optim_grads it keeps gathered weights for the backward.",
        Capabilities(
            adapter="harness.engines.adapters.fsdp2:Fsdp2Engine",
            strategies=(Strategy.optim_grads, Strategy.optim_grads_params),
            hybrid=_HYBRID[1:],
            equal_dtypes=(("main_grads", "main_params"),),
            outer_sums_in_wire=True,
            tensor_parallel=True,
            fp8=True,
        ),
    )
    fsdp1 = (
        "fsdp1",
        "torch FSDP1 (FullyShardedDataParallel): NO_SHARD, SHARD_GRAD_OP, FULL_SHARD and their hybrids.",
        Capabilities(
            adapter="harness.engines.adapters.fsdp1:Fsdp1Engine",
            strategies=(Strategy.no_shard, Strategy.optim_grads, Strategy.optim_grads_params),
            hybrid=_HYBRID[1:],
            equal_dtypes=(("main_grads", "main_params"),),
            lone_gradient_shards=False,
            waiting_sums_in_compute=True,
        ),
    )
    ddp = (
        "ddp",
        "torch DistributedDataParallel. Selects sharding=no_shard.",
        Capabilities(
            adapter="harness.engines.adapters.ddp:DdpEngine",
            strategies=(Strategy.no_shard,),
            compressed_wires=(Dtype.bf16, Dtype.fp16),
            fp8=True,
            own_optimizers=True,
        ),
    )
    megatron_fsdp = (
        "megatron_fsdp",
        "NVIDIA's megatron-fsdp from PyPI. On CPU its CUDA streams are replaced by synchronous calls.",
        Capabilities(
            adapter="harness.engines.adapters.megatron:MegatronEngine",
            strategies=tuple(Strategy),
            hybrid=(*_HYBRID, (Strategy.optim_grads_params, OuterStrategy.optim)),
            formats=HALF_OR_SINGLE,
            equal_dtypes=(),
            idle_parameters=False,
            lone_gradient_shards=False,
            user_buffers=(Registration.auto,),
            package="megatron-fsdp==0.6.1",
            settings=("engine.report_nan_in_param_grad",),
        ),
    )
    deepspeed = (
        "deepspeed",
        "DeepSpeed ZeRO 1-3 with a torch optimizer and fp32 main weights and gradients.",
        Capabilities(
            adapter="harness.engines.adapters.deepspeed:DeepspeedEngine",
            strategies=tuple(Strategy)[1:],
            formats=(Dtype.fp32, Dtype.bf16),
            main_formats=(Dtype.fp32,),
            equal_dtypes=(),
            idle_parameters=False,
            keeps_idle_gradients=(Strategy.optim_grads_params,),
            package="deepspeed==0.19.8",
        ),
    )
    single = (
        "single",
        "One process that computes the whole global batch; in fp64 the reference. Selects no_shard and mesh=one.",
        Capabilities(
            adapter="harness.engines.adapters.single:SingleEngine",
            strategies=(Strategy.no_shard,),
            numerics=tuple(Numerics),
            max_data_ranks=1,
            sums_itself=True,
            fp8=True,
            own_optimizers=True,
        ),
    )
    ext = (
        "ext",
        f"An engine of your own: engine.adapter=package.module:Class ({page('adapter.md')}).",
        Capabilities(strategies=tuple(Strategy), equal_dtypes=(), own_optimizers=True, settings=("engine.adapter",)),
    )

    def __new__(cls, name: str, sentence: str, declared: Capabilities) -> Self:
        member = object.__new__(cls)
        member._value_, member.sentence, member.declared = name, sentence, declared
        return member


ENGINES: dict[EngineName, Capabilities] = {engine: engine.declared for engine in EngineName}

PACKAGES = tuple(can.package.partition("==")[0] for can in ENGINES.values() if can.package)
