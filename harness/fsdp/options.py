"""What an engineer can choose beside the strategy and the dtypes: one frozen, validated record."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from harness.fsdp.comm.communicator import EAGER_LIMIT_BYTES
from harness.fsdp.comm.fixed_point import BITS, FixedPoint
from harness.fsdp.knobs import knob
from harness.fsdp.storage.placement import Placements
from harness.fsdp.vocabulary import Fallback, GradBuffer, Numerics, Registration, Strategy


@dataclass(frozen=True)
class Options:
    """Choices that change what a step costs and, but for numerics, none of its results.

    Raises:
        ValueError: a value, with what would be valid.
    """

    numerics: Numerics = knob(
        Numerics.fast,
        costs=(
            "deterministic: nothing on a CPU. ordered: sums by the engine itself, in rank order, on NCCL from an "
            "all-to-all. exact: 8 bytes an element on the wire and in sums, and unfused optimizer steps."
        ),
        use=(
            "To tell a fault from rounding: ordered across strategies on one mesh, exact across everything "
            "(docs/engine.md)."
        ),
        setting="numerics.mode",
    )
    """Promise about the order of sums."""
    prefetch: int = knob(
        1,
        costs="The gathered weights of so many units more.",
        use="2 or more where gathers are exposed because units differ much in size; 0 for the least memory.",
        setting="engine.prefetch",
    )
    """Units gathered ahead of the one in use."""
    prefetch_limit_bytes: int | None = knob(
        None,
        costs="Gathers that would exceed it start late, and are exposed.",
        use="A large `prefetch` over units of very different sizes.",
        setting="engine.prefetch_limit_bytes",
    )
    """Most bytes of weights gathered ahead of the unit in use; None is no limit but `prefetch`."""
    double_buffer: bool = knob(
        False,
        costs="Two buffers of weights as large as their largest units, and two of gradients, kept all the time.",
        use="Fragmented device memory, or user buffers, which need fixed addresses.",
        setting="engine.double_buffer",
        peer="fsdp_double_buffer",
        plain="fsdp_double_buffer",
    )
    """Two fixed buffers for gathered weights and two for unreduced gradients; see [Note: Double buffer]."""
    unit_min_elements: int = knob(
        0,
        costs="Larger units: more transient memory.",
        use="Many small units, whose collectives cost latency.",
        setting="engine.unit_min_elements",
    )
    """Neighbouring units are joined until they have so many elements."""
    accumulate_unsharded: bool = knob(
        False,
        costs="A whole unreduced gradient of every unit in memory between microbatches; not with exact.",
        use="Many microbatches a step and memory to spare: one reduction a step in place of one a microbatch.",
        setting="engine.accumulate_unsharded",
    )
    """Under ZeRO-2 and 3, microbatches inside `no_sync` wait unreduced, for one reduction a step."""
    grad_buffer: GradBuffer = knob(
        GradBuffer.flat,
        costs="concat: gradients exist twice while they are copied, and no `get_main_grad`.",
        use="concat only to show what that costs.",
        setting="engine.grad_buffer",
    )
    """Whether autograd writes gradients into flat storage, or they are copied together."""
    offload_optimizer: bool = knob(
        False,
        costs="Gradients and weights cross to the host and back every step, and the update runs on the CPU.",
        use="Optimizer state that fits nowhere else.",
        setting="engine.offload_optimizer",
    )
    """Main weights, main gradients and optimizer state lie in host memory and are stepped there."""
    use_decoupled_grad: bool = knob(
        False,
        costs="Nothing.",
        use="With an optimizer that reads `decoupled_grad` (FusedAdam of TransformerEngine), main weights in 16 bits.",
        peer="use_decoupled_grad",
    )
    """Main gradients are given to the optimizer as `decoupled_grad`, in their own dtype, and `grad` stays None."""
    separate_gather_group: bool | None = knob(
        None,
        costs="A second communicator's buffers in device memory.",
        use="False where communicators are scarce; true changes nothing on gloo.",
        setting="engine.separate_gather_group",
    )
    """A communicator for gathers alone; None: on CUDA."""
    report_nan_in_param_grad: bool = knob(
        False,
        costs=(
            "One pass over every gradient, one small all-reduce a step; on a device a wait of the host for every "
            "bucket."
        ),
        use="While a run diverges, or always where its share of a step is small (docs/engine.md).",
        setting="engine.report_nan_in_param_grad",
        peer="report_nan_in_param_grad",
    )
    """Look for NaN and infinity before every reduction; see `harness.fsdp.guards.nonfinite`."""
    watchdog_timeout_s: float | None = knob(
        None,
        costs="A thread that looks twice a second, and a connection to the store.",
        use="Always on a cluster: some seconds above the longest wait that is normal.",
        setting="engine.watchdog_timeout_s",
    )
    """Seconds a wait for a collective may last before every rank raises one error that names ranks, units and
    collectives (see `harness.fsdp.guards.watchdog`); None waits as long as the backend does."""
    check_collectives: bool = knob(
        False,
        costs="Every collective waits for all ranks at the store before it starts: no overlap between ranks is left.",
        use="To find the first collective in which ranks differ.",
        setting="engine.check_collectives",
    )
    """Compare every collective over all ranks before its data moves; slow."""
    check_replicas_every: int = knob(
        0,
        costs="One pass over what several ranks hold, and one number a rank all-reduced, in each checked step.",
        use="Hundreds of steps apart on long runs; 1 to find the step in which replicas part.",
        setting="engine.check_replicas_every",
    )
    """Steps after which ranks compare a hash of the weights that several of them hold; 0 never."""
    eager_limit_bytes: int | None = knob(
        EAGER_LIMIT_BYTES,
        costs="None: long messages on one host are copied twice, where a read copies once.",
        use="None where reading another process is forbidden and the attempt itself is unwanted.",
        setting="engine.eager_limit_bytes",
    )
    """On gloo, bytes a peer up to which data is sent; longer data is read from the sender. None always sends."""
    exact_bits: int = knob(
        BITS,
        costs="A bit more resolution halves the largest gradient that can be held.",
        use="Lower when a step is refused as beyond the range; higher where gradients are tiny throughout.",
        setting="numerics.exact_bits",
    )
    """Resolution under numerics=exact; see `harness.fsdp.comm.fixed_point`."""
    exact_terms: int = knob(
        4096,
        costs="Twice the terms halve the largest gradient of a microbatch.",
        use="Exactly the microbatches of a step over all ranks, as the harness sets it.",
    )
    """Most microbatches of a step over all ranks, under numerics=exact."""

    nccl_ub: Registration = knob(
        Registration.none,
        costs=(
            "Fixed buffers in memory of NCCL's allocator, which stay there; registrations are meetings of all ranks."
        ),
        use="NCCL on NVLink or with SHARP, where its copies or thread blocks slow the compute (docs/network.md).",
        setting="nccl_ub.mode",
        peer="nccl_ub",
    )
    """NCCL user buffers, see `harness.fsdp.comm.user_buffers`: none, auto (or True): when the model is built, manual:
    after the first step. They turn on `double_buffer`. Without NCCL, `user_buffers()` says that there are none."""
    disable_symmetric_registration: bool = knob(
        False,
        costs="Without symmetric windows NCCL has fewer kernels to choose from.",
        use="Symmetric registration fails, or NVLink SHARP is wanted in its place.",
        setting="not nccl_ub.symmetric",
        peer="disable_symmetric_registration",
    )
    """Register them for zero copy alone, not as symmetric windows."""
    registration_fallback: Fallback = knob(
        Fallback.error,
        costs="record: a run that is slower than asked for, and says so only in its record.",
        use="record in studies over machines of different kinds.",
        setting="nccl_ub.fallback",
    )
    """What a failed registration does on all ranks: error raises RuntimeError; record goes on without, and
    `user_buffers()` gives the reason."""

    def __post_init__(self) -> None:
        for name, kind in CHOICES.items():
            object.__setattr__(self, name, kind.parse(getattr(self, name), name))
        if self.nccl_ub is not Registration.none:
            object.__setattr__(self, "double_buffer", True)
        for name in ("prefetch", "unit_min_elements"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 or more")
        for name in ("prefetch_limit_bytes", "eager_limit_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name}={value} must be 0 or more, or None")
        if self.double_buffer and self.prefetch > 1:
            raise ValueError(
                f"double_buffer=True (nccl_ub turns it on) has room for one unit ahead of the one in use, and"
                f" prefetch={self.prefetch} wants more; prefetch=1 or 0, or double_buffer=False and nccl_ub=none"
            )

    @property
    def exactly(self) -> FixedPoint | None:
        """How gradients are written as integers, under numerics=exact."""
        return FixedPoint(self.exact_bits, self.exact_terms) if self.numerics is Numerics.exact else None

    def check_against(self, strategy: Strategy) -> None:
        """Raise ValueError where a choice has no meaning under a strategy."""
        if self.accumulate_unsharded and Placements.of(strategy, None).accumulates_locally:
            raise ValueError(
                f"accumulate_unsharded=True says how ZeRO-2 and 3 wait inside no_sync; {strategy.name} always waits"
                " unreduced. Leave it False, or use zero_dp_strategy=2 or 3"
            )
        if self.accumulate_unsharded and self.numerics is Numerics.exact:
            raise ValueError("accumulate_unsharded=True adds microbatches in floating point; numerics=exact never does")

    @classmethod
    def of(cls, chosen: dict[str, Any]) -> Options:
        """From keyword arguments.

        Raises:
            TypeError: one is not known.
        """
        for name in chosen:
            if name not in OPTIONS:
                raise TypeError(f"unexpected argument {name!r}; options are {', '.join(OPTIONS)}")
        return cls(**chosen)


CHOICES = {
    "numerics": Numerics,
    "grad_buffer": GradBuffer,
    "nccl_ub": Registration,
    "registration_fallback": Fallback,
}
"""Options that take a word of the vocabulary."""

OPTIONS = tuple(field.name for field in fields(Options))
"""Names of all options."""
