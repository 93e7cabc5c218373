"""Everything an engineer can choose beside the strategy and the dtypes: each option declared here and nowhere else.

A field of `EngineOptions` or `Options` is the one declaration of an option: name, type, default and sentence stand in
the class, the rest (cost, use, range, names elsewhere) in `option(...)`. The configuration, its rules and pages, the
capabilities and the keywords of both entries are made from these fields. `OptionKeywords` repeats name and type for
editors and type checkers, which see no other way; a test holds the two equal. Torch is not imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from harness.fsdp.facts import Facts, Range, declared_in, option
from harness.fsdp.vocabulary import Choice, Fallback, GradBuffer, Numerics, Registration, Strategy


@dataclass(frozen=True)
class EngineOptions:
    """Options that a cell sets in its group `engine`, under the same names."""

    prefetch: int = option(
        1,
        Facts(
            range=Range(0, 1_024, "units"),
            costs="The gathered weights of so many units more.",
            use="2 or more where gathers are exposed because units differ much in size; 0 for the least memory.",
            same_bits=True,
        ),
    )
    """Units gathered ahead of the one in use."""
    prefetch_limit_bytes: int | None = option(
        None,
        Facts(
            range=Range(0, 1 << 50, "bytes"),
            costs="Gathers that would exceed it start late, and are exposed.",
            use="A large `prefetch` over units of very different sizes.",
            same_bits=True,
        ),
    )
    """Most bytes of weights gathered ahead of the unit in use; None is no limit but `prefetch`."""
    double_buffer: bool = option(
        False,
        Facts(
            costs="Two buffers of weights as large as their largest units, and two of gradients, kept all the time.",
            use="Fragmented device memory, or user buffers, which need fixed addresses.",
            peer="fsdp_double_buffer",
            plain="fsdp_double_buffer",
            same_bits=True,
        ),
    )
    """Two fixed buffers for gathered weights and two for unreduced gradients: nothing is allocated after the first
    step, and more than two units alive are an error."""
    unit_min_elements: int = option(
        0,
        Facts(
            range=Range(0, 1 << 50, "elements"),
            costs="Larger units: more transient memory.",
            use="Many small units, whose collectives cost latency.",
        ),
    )
    """Neighbouring units are joined until they have so many elements; 0 joins none."""
    accumulate_unsharded: bool = option(
        False,
        Facts(
            costs="A whole unreduced gradient of every unit in memory between microbatches; not with exact.",
            use="Many microbatches a step and memory to spare: one reduction a step in place of one a microbatch.",
        ),
    )
    """Under ZeRO-2 and 3, microbatches inside `no_sync` wait unreduced, for one reduction a step."""
    grad_buffer: GradBuffer = option(
        GradBuffer.flat,
        Facts(
            costs="concat: gradients exist twice while they are copied, and no `get_main_grad`.",
            use="concat only to show what that costs.",
            same_bits=True,
        ),
    )
    """Whether autograd writes gradients into flat storage, or they are copied together."""
    offload_optimizer: bool = option(
        False,
        Facts(
            costs="Gradients and weights cross to the host and back every step, and the update runs on the CPU.",
            use="Optimizer state that fits nowhere else.",
        ),
    )
    """Main weights, main gradients and optimizer state lie in host memory and are stepped there."""
    separate_gather_group: bool | None = option(
        None,
        Facts(
            costs="A second communicator's buffers in device memory.",
            use="False where communicators are scarce; true changes nothing on gloo.",
            same_bits=True,
        ),
    )
    """A communicator for gathers alone; None: on CUDA."""
    eager_limit_bytes: int | None = option(
        1 << 18,
        Facts(
            range=Range(0, 1 << 40, "bytes"),
            costs="None: long messages on one host are copied twice, where a read copies once.",
            use="None where reading another process is forbidden and the attempt itself is unwanted.",
            same_bits=True,
        ),
    )
    """On gloo, bytes a peer up to which data is sent; longer data is read from the sender's memory. None always
    sends."""
    report_nan_in_param_grad: bool = option(
        False,
        Facts(
            costs=("One pass over every gradient, one small all-reduce a step; on a device one wait of the host."),
            use="While a run diverges, or always where its share of a step is small (docs/engine.md).",
            peer="report_nan_in_param_grad",
            same_bits=True,
        ),
    )
    """Look for NaN and infinity in every gradient before its reduction; the error names tensor, rank and
    microbatch."""
    watchdog_timeout_s: float | None = option(
        None,
        Facts(
            range=Range(0, 10_000_000, "seconds", above=True),
            costs="A thread that looks twice a second, and a connection to the store.",
            use="Some seconds above the longest wait that is normal; a large number where none is too long.",
            same_bits=True,
        ),
    )
    """Seconds a wait for a collective may last before every rank raises one error that names ranks, units and
    collectives. None is 300 s, or nine tenths of the timeout given to init_process_group; under the harness four
    fifths of launch.hang_timeout_s."""
    check_collectives: bool = option(
        False,
        Facts(
            costs="Every collective waits at the store for all ranks before it starts: ranks overlap no more.",
            use="To find the first collective in which ranks differ.",
            same_bits=True,
        ),
    )
    """Compare every collective over all ranks before its data moves; slow."""
    check_replicas_every: int = option(
        0,
        Facts(
            range=Range(0, 2**31 - 1, "steps"),
            costs="One pass over what several ranks hold, and one number a rank all-reduced, in each checked step.",
            use="Hundreds of steps apart on long runs; 1 to find the step in which replicas part.",
            same_bits=True,
        ),
    )
    """Steps after which ranks compare a hash of the weights that several of them hold; 0 never."""


@dataclass(frozen=True)
class Options(EngineOptions):
    """Choices that change what a step costs and, but for numerics, none of its results.

    Raises:
        ValueError: a value out of its range or of another type, or two that contradict each other, with what is valid.
    """

    numerics: Numerics = option(
        Numerics.fast,
        Facts(
            costs=(
                "deterministic: nothing on a CPU. ordered: sums by the engine itself, in rank order, on NCCL from an "
                "all-to-all. exact: 8 bytes an element on the wire and in sums, and unfused optimizer steps."
            ),
            use=(
                "To tell a fault from rounding: ordered across strategies on one mesh, exact across everything "
                "(docs/engine.md)."
            ),
            setting="numerics.mode",
        ),
    )
    """Promise about the order of sums."""
    exact_bits: int = option(
        44,
        Facts(
            range=Range(0, 60, "bits"),
            costs="A bit more resolution halves the largest gradient that can be held.",
            use="Lower when a step is refused as beyond the range; higher where gradients are tiny throughout.",
            setting="numerics.exact_bits",
        ),
    )
    """Resolution of the integers that gradients become, 2^-exact_bits (exact); one element of a microbatch stays below
    2^(62 - exact_bits) over the number of global microbatches."""
    exact_terms: int = option(
        4096,
        Facts(
            range=Range(1, (1 << 62) - 1, "microbatches"),
            costs="Twice the terms halve the largest gradient of a microbatch.",
            use="Exactly the microbatches of a step over all ranks, as the harness sets it.",
        ),
    )
    """Most microbatches of a step over all ranks, under numerics=exact."""
    use_decoupled_grad: bool = option(
        False,
        Facts(
            costs="Nothing.",
            use="An optimizer that reads `decoupled_grad` (FusedAdam of TransformerEngine), main weights in 16 bits.",
            peer="use_decoupled_grad",
        ),
    )
    """Main gradients are given to the optimizer as `decoupled_grad`, in their own dtype, and `grad` stays None."""
    nccl_ub: Registration = option(
        Registration.none,
        Facts(
            costs=("Fixed buffers in memory of NCCL's allocator, which stay; registrations are meetings of all ranks."),
            use="NCCL on NVLink or with SHARP, where its copies or thread blocks slow the compute (docs/network.md).",
            setting="nccl_ub.mode",
            peer="nccl_ub",
        ),
    )
    """When buckets are registered as NCCL user buffers; other than none turns on the double buffer. Without NCCL, the
    record says that there are none."""
    disable_symmetric_registration: bool = option(
        False,
        Facts(
            costs="Without symmetric windows NCCL has fewer kernels to choose from.",
            use="Symmetric registration fails, or NVLink SHARP is wanted in its place.",
            setting="not nccl_ub.symmetric",
            peer="disable_symmetric_registration",
        ),
    )
    """Register them for zero copy alone, not as symmetric windows."""
    registration_fallback: Fallback = option(
        Fallback.error,
        Facts(
            costs="record: a run that is slower than asked for, and says so only in its record.",
            use="record in studies over machines of different kinds.",
            setting="nccl_ub.fallback",
        ),
    )
    """What a registration that fails leads to, on all ranks alike."""

    def __post_init__(self) -> None:
        for each in OPTIONS.values():
            object.__setattr__(self, each.name, each.read(getattr(self, each.name)))
        object.__setattr__(self, "double_buffer", fixed_buffers(vars(self)))
        _refuse(conflicts(vars(self)), vars(self))

    def check_against(self, *, reduces_each: bool) -> None:
        """Raise ValueError where a choice has no meaning under a strategy.

        Args:
            reduces_each: whether the strategy reduces gradients every microbatch.
        """
        _refuse(conflicts(vars(self), reduces_each=reduces_each), vars(self))

    @classmethod
    def of(cls, chosen: Mapping[str, Any], owner: str, known: Iterable[str] = ()) -> Options:
        """From keyword arguments.

        Args:
            chosen: option by name. owner: whose arguments they are, for the message. known: its other arguments.

        Raises:
            TypeError: one is no option; the message has the nearest names.
            ValueError: as the class.
        """
        refuse_unknown(chosen, owner, known)
        return cls(**chosen)


class OptionKeywords(TypedDict, total=False):
    """The options as keywords of `ShardedModel` and `fully_shard`; a choice is taken by its name too."""

    prefetch: int
    prefetch_limit_bytes: int | None
    double_buffer: bool
    unit_min_elements: int
    accumulate_unsharded: bool
    grad_buffer: GradBuffer | str
    offload_optimizer: bool
    separate_gather_group: bool | None
    eager_limit_bytes: int | None
    report_nan_in_param_grad: bool
    watchdog_timeout_s: float | None
    check_collectives: bool
    check_replicas_every: int
    numerics: Numerics | str
    exact_bits: int
    exact_terms: int
    use_decoupled_grad: bool
    nccl_ub: Registration | str | bool
    disable_symmetric_registration: bool
    registration_fallback: Fallback | str


OPTIONS = {
    **declared_in(Options),
    **declared_in(EngineOptions, group="engine"),
}
"""Every option by name."""


@dataclass(frozen=True)
class Conflict:
    """A value that another choice rules out."""

    option: str
    """Whose value."""
    why: str
    """What is wrong, as what follows `option=value`."""
    valid: str
    """Values it could have."""
    ways_out: tuple[Mapping[str, Any], ...]
    """Choices by name, each of which would do."""


def fixed_buffers(chosen: Mapping[str, Any]) -> bool:
    """Whether gathered weights and unreduced gradients live in buffers that stay: asked for, or forced by user
    buffers, whose addresses are registered."""
    return bool(chosen["double_buffer"]) or chosen["nccl_ub"] is not Registration.none


def conflicts(chosen: Mapping[str, Any], *, reduces_each: bool = True) -> Iterator[Conflict]:
    """Options that contradict each other or the strategy.

    Args:
        chosen: value by name, of every option at least that has a setting. reduces_each: whether the strategy reduces
            gradients every microbatch.
    """
    if chosen["prefetch"] > 1 and fixed_buffers(chosen):
        yield Conflict(
            "prefetch",
            "wants more units ahead than double_buffer (which nccl_ub turns on) has room for: one beside that in use",
            "0 or 1",
            ({"prefetch": 1}, {"double_buffer": False, "nccl_ub": Registration.none}),
        )
    if chosen["accumulate_unsharded"] and not (reduces_each and chosen["numerics"] is not Numerics.exact):
        yield Conflict(
            "accumulate_unsharded",
            "lets microbatches wait unreduced inside no_sync under ZeRO-2 and 3; ZeRO-0 and 1 always do, and"
            " numerics=exact, which never adds in floating point, never does",
            "False",
            ({"accumulate_unsharded": False}, {"strategy": Strategy.optim_grads, "numerics": Numerics.ordered}),
        )


def _refuse(found: Iterable[Conflict], chosen: Mapping[str, Any]) -> None:
    for each in found:
        ways = ", or ".join(" ".join(f"{name}={_shown(value)}" for name, value in way.items()) for way in each.ways_out)
        value = _shown(chosen[each.option])
        raise ValueError(f"{each.option}={value} {each.why}; valid are {each.valid}. Set {ways}")


def _shown(value: Any) -> str:
    return repr(value.name) if isinstance(value, Choice) else repr(value)


def refuse_unknown(given: Iterable[str], owner: str, known: Iterable[str] = ()) -> None:
    """Refuse keywords that are no options.

    Args:
        given: names. owner: whose keywords they are, for the message. known: other names it takes.

    Raises:
        TypeError: one is neither; the message has the nearest names.
    """
    names = [*OPTIONS, *known]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3) or names
            raise TypeError(f"{owner} got an unexpected argument {name!r}; nearest are {', '.join(near)}")
