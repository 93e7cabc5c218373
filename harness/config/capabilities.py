"""Every engine and what it can do, as a table without torch: what rules refuse before an engine is ever built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from harness.fsdp.options import EngineOptions, declared_in
from harness.fsdp.vocabulary import Choice, Dtype, Numerics, OuterStrategy, Registration, Strategy

RERUNS = (Numerics.fast, Numerics.deterministic)
EQUAL_GRADIENTS = (("main_grads", "main_params"), ("grad_comm", "main_grads"))
HALF_OR_SINGLE = (Dtype.fp32, Dtype.bf16, Dtype.fp16)


@dataclass(frozen=True)
class Capabilities:
    """One engine's reach. Whatever the table allows, the engine's adapter honours."""

    strategies: tuple[Strategy, ...]
    """Strategies the engine can run."""
    hybrid: tuple[tuple[Strategy, OuterStrategy], ...] = ()
    """Pairs of inner and outer strategy it can run with mesh.dp_outer > 1."""
    numerics: tuple[Numerics, ...] = RERUNS
    """Promises it keeps about the order of arithmetic."""
    max_data_ranks: int | None = None
    """Most ranks with data of their own; None is any number."""
    formats: tuple[Dtype, ...] = tuple(Dtype)
    """Dtypes it takes in any role."""
    main_formats: tuple[Dtype, ...] | None = None
    """Dtypes main weights and main gradients can have, where these are fewer."""
    uncast: tuple[Strategy, ...] = ()
    """Strategies under which it computes in the dtype of the main weights alone."""
    equal_dtypes: tuple[tuple[str, str], ...] = EQUAL_GRADIENTS
    """Fields of the group `dtype` that must agree: the engine has one dtype for both roles."""
    compressed_wires: tuple[Dtype, ...] = ()
    """Dtypes gradients can travel in although `equal_dtypes` ties the wire to another role."""
    outer_sums_in_wire: bool = False
    """Whether sums over microbatches wait for the outer axis in dtype.grad_comm, where it is reduced once a step."""
    waiting_sums_in_compute: bool = False
    """Whether sums over microbatches wait for no_shard's one reduction a step in dtype.compute."""
    idle_parameters: bool = True
    """Whether a microbatch may leave trained parameters without a gradient on some ranks and not on others."""
    keeps_idle_gradients: tuple[Strategy, ...] = ()
    """Strategies under which a parameter that no microbatch needs is updated by its last step's gradient again."""
    lone_gradient_shards: bool = True
    """Whether strategies that split gradients are right where the group they split over is one rank."""
    sums_itself: bool = False
    """Whether sums inside a reduction are the engine's own, in dtype.grad_accum; else the backend's, in the wire's."""
    user_buffers: tuple[Registration, ...] = ()
    """When the engine can register its buffers with NCCL (nccl_ub.mode); empty: it never does."""
    idle_parameters_torch: tuple[int, int] | None = None
    """The least torch with which it has `idle_parameters`; None: any."""
    orders_communicators: bool = False
    """Whether the engine creates the communicators of both data-parallel axes itself, the owner of SHARP first."""
    tensor_parallel: bool = False
    """Whether the engine shards what a plan of tensor parallelism left (mesh.tp)."""
    fp8: bool = False
    """Whether linear layers may multiply 8-bit numbers (dtype.fp8): the engine ends the steps of delayed scaling, and
    saves what that knows."""
    loss_scale: bool = False
    """Whether the engine scales the loss and leaves out updates whose gradients overflowed (dtype.loss_scale)."""
    own_optimizers: tuple[Strategy, ...] = ()
    """Strategies under which it steps an optimizer of the user's own (optimizer=ext)."""
    adapter: str | None = None
    """The class that runs it, as `module:Class`; None: the one that `engine.adapter` names (ext)."""
    package: str | None = None
    """Distribution it needs beyond this project's own dependencies, as `name==version`."""
    build_isolation: bool = True
    """Whether the distribution `package` installs like any other; if not, its build needs what is installed already."""
    settings: tuple[str, ...] = ()
    """Settings of the group `engine`, beyond the name, that it takes."""

    @property
    def install(self) -> str:
        """The command that installs `package`."""
        flags = "" if self.build_isolation else "--no-deps --no-build-isolation "
        return f"pip install {flags}{self.package}"


_GROUP = declared_in(EngineOptions)

SAME_BITS = tuple(f"engine.{name}" for name, option in _GROUP.items() if option.facts.same_bits)
"""Settings of the group `engine` that change no bit of any result."""

_ALL_PAIRS = tuple((inner, outer) for inner in Strategy for outer in OuterStrategy)
_HYBRID = tuple((inner, OuterStrategy.no_shard) for inner in Strategy if inner is not Strategy.no_shard)


class EngineName(Choice):
    """What shards the model and steps its optimizer.

    This is the one list of engines: each with its sentence and what it can do, its adapter and its package among that.
    What choosing an engine chooses of other groups stands in its file of conf/engine; an engine without one has none.
    """

    declared: Capabilities
    """What the engine can do, as it stands here; readers ask `ENGINES`."""

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
            own_optimizers=tuple(Strategy),
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
            idle_parameters_torch=(2, 13),
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
            waiting_sums_in_compute=True,
        ),
    )
    ddp = (
        "ddp",
        "torch DistributedDataParallel, with ZeroRedundancyOptimizer under sharding=optim. Selects sharding=no_shard.",
        Capabilities(
            adapter="harness.engines.adapters.ddp:DdpEngine",
            strategies=(Strategy.no_shard, Strategy.optim),
            compressed_wires=(Dtype.bf16, Dtype.fp16),
            tensor_parallel=True,
            fp8=True,
            own_optimizers=(Strategy.no_shard,),
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
        "DeepSpeed ZeRO 0-3 with a torch optimizer and fp32 main weights and gradients; no_shard in fp32 only.",
        Capabilities(
            adapter="harness.engines.adapters.deepspeed:DeepspeedEngine",
            strategies=tuple(Strategy),
            formats=(Dtype.fp32, Dtype.bf16),
            main_formats=(Dtype.fp32,),
            uncast=(Strategy.no_shard,),
            equal_dtypes=(),
            idle_parameters=False,
            keeps_idle_gradients=(Strategy.optim_grads_params,),
            package="deepspeed==0.19.8",
            build_isolation=False,
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
            tensor_parallel=True,
            fp8=True,
            own_optimizers=(Strategy.no_shard,),
        ),
    )
    ext = (
        "ext",
        "An engine of your own: engine.adapter=package.module:Class (docs/adapter.md).",
        Capabilities(
            strategies=tuple(Strategy),
            equal_dtypes=(),
            own_optimizers=tuple(Strategy),
            settings=("engine.adapter",),
        ),
    )

    def __new__(cls, name: str, sentence: str, declared: Capabilities) -> Self:
        """A member from its name, its sentence and its row."""
        member = object.__new__(cls)
        member._value_, member.sentence, member.declared = name, sentence, declared
        return member


ENGINES: dict[EngineName, Capabilities] = {engine: engine.declared for engine in EngineName}
"""What every engine can do. What an `ext` adapter can do, it says itself."""

PACKAGES = tuple(can.package.partition("==")[0] for can in ENGINES.values() if can.package)
"""Distributions that some engine needs, by name."""
