"""What an engineer can choose beside the strategy and the dtypes: one frozen, validated record."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from harness.fsdp.communicator import EAGER_LIMIT_BYTES
from harness.fsdp.fixed_point import BITS, FixedPoint
from harness.fsdp.policy import GradBuffer, Numerics, Strategy
from harness.fsdp.registration import Registration


@dataclass(frozen=True)
class Options:
    """Choices that change what a step costs and, but for numerics, none of its results.

    Raises:
        ValueError: a value, with what would be valid.
    """

    numerics: Numerics = Numerics.fast
    """Promise about the order of sums."""
    prefetch: int = 1
    """Units gathered ahead of the one in use."""
    prefetch_limit_bytes: int | None = None
    """Most bytes of weights gathered ahead of the unit in use; None is no limit but `prefetch`."""
    double_buffer: bool = False
    """Two fixed buffers for gathered weights and two for unreduced gradients; see [Note: Double buffer]."""
    unit_min_elements: int = 0
    """Neighbouring units are joined until they have so many elements."""
    accumulate_unsharded: bool = False
    """Under ZeRO-2 and 3, microbatches inside `no_sync` wait unreduced, for one reduction a step."""
    grad_buffer: GradBuffer = GradBuffer.flat
    """Whether autograd writes gradients into flat storage, or they are copied together."""
    offload_optimizer: bool = False
    """Main weights, main gradients and optimizer state lie in host memory and are stepped there."""
    use_decoupled_grad: bool = False
    """Main gradients are given to the optimizer as `decoupled_grad`, in their own dtype, and `grad` stays None."""
    separate_gather_group: bool | None = None
    """A communicator for gathers alone; None: on CUDA."""
    report_nan_in_param_grad: bool = False
    """Look for NaN and infinity before every reduction; see `harness.fsdp.guards`."""
    watchdog_timeout_s: float | None = None
    """Seconds a wait for a collective may last before every rank raises one error that names ranks, units and
    collectives (see `harness.fsdp.watchdog`); None waits as long as the backend does."""
    check_collectives: bool = False
    """Compare every collective over all ranks before its data moves; slow."""
    check_replicas_every: int = 0
    """Steps after which ranks compare a hash of the weights that several of them hold; 0 never."""
    eager_limit_bytes: int | None = EAGER_LIMIT_BYTES
    """On gloo, bytes a peer up to which data is sent; longer data is read from the sender. None always sends."""
    exact_bits: int = BITS
    """Resolution under numerics=exact; see `harness.fsdp.fixed_point`."""
    exact_terms: int = 4096
    """Most microbatches of a step over all ranks, under numerics=exact."""

    nccl_ub: Registration = Registration.none
    """NCCL user buffers, see `harness.fsdp.registration`: none, auto (or True): when the model is built, manual: after
    the first step. They turn on `double_buffer`. Without NCCL, `user_buffers()` says that there are none."""
    disable_symmetric_registration: bool = False
    """Register them for zero copy alone, not as symmetric windows."""
    registration_fallback: str = "error"
    """What a failed registration does on all ranks: error raises RuntimeError; record goes on without, and
    `user_buffers()` gives the reason."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "numerics", Numerics(self.numerics))
        object.__setattr__(self, "grad_buffer", GradBuffer(self.grad_buffer))
        object.__setattr__(self, "nccl_ub", Registration.parse(self.nccl_ub))
        if self.nccl_ub is not Registration.none:
            object.__setattr__(self, "double_buffer", True)
        if self.registration_fallback not in ("error", "record"):
            raise ValueError(f"registration_fallback={self.registration_fallback!r} is not one of error, record")
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
        if self.accumulate_unsharded and not strategy.shards_grads:
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


OPTIONS = tuple(field.name for field in fields(Options))
"""Names of all options."""
