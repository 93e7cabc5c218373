"""Everything an engineer can choose: closed lists of choices, and options, each declared here and nowhere else.

A field of `EngineOptions` or `Options` is the one declaration of an option: name, type, default and sentence stand in
the class, the rest (range, setting) in `option(...)`. docs/engine_knobs.md says what each costs and when to use it. The
configuration, its rules, the capabilities and the keywords of both entries are made from these fields. Torch is not
imported.
"""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Self, TypeVar


class Word(Enum):
    """A member is written by its name, which is its value too. What else it is made of are its annotated attributes."""

    _value_: str

    def __new__(cls, name: str, *facts: Any) -> Self:
        member = object.__new__(cls)
        member._value_ = name
        annotated = [fact for base in cls.__mro__[::-1] for fact in inspect.get_annotations(base) if fact != "_value_"]
        vars(member).update(zip(annotated, facts, strict=True))
        return member


class Choice(Word):
    """One of a closed list. sentence: the meaning of choosing it."""

    sentence: str

    @classmethod
    def others(cls) -> dict[Any, Self]:
        """Members by what they are written as beside their names."""
        return {}

    @classmethod
    def parse(cls, value: Any, argument: str) -> Self:
        """A member given by itself, by its name or as in `others`; ValueError, which lists them, for any other value of
        `argument`."""
        if isinstance(value, cls):
            return value
        known = {**cls.__members__, **cls.others()}
        for written, member in known.items():
            if type(value) is type(written) and value == written:
                return member
        raise ValueError(f"{argument}={value!r} is not one of {', '.join(map(str, known))}")


class Numbered(Choice):
    """A choice that is also written as its place in the list, counted from 0, as ZeRO stages are."""

    @classmethod
    def others(cls) -> dict[Any, Self]:
        return dict(enumerate(cls))


class Dtype(Word):
    """A floating-point format, by the short name that settings, records and pages use.

    torch_name: attribute of `torch`. bytes: of one number. precision: significant bits, the hidden one included;
    rounding to nearest errs by at most 2**-precision of the number.
    """

    torch_name: str
    bytes: int
    precision: int

    fp32 = "fp32", "float32", 4, 24
    bf16 = "bf16", "bfloat16", 2, 8
    fp16 = "fp16", "float16", 2, 11
    fp64 = "fp64", "float64", 8, 53


class Fp8(Choice):
    """The recipe of 8-bit matrix products: how many values share a scale, and how the scale is chosen.

    multiple: divides both sizes of a weight. gradient_precision: significant bits of quantized gradients, the hidden
    one included: 3 of e5m2, 4 of e4m3, which all else has.
    """

    multiple: int
    gradient_precision: int

    current = "current", "One scale per tensor, from its current largest magnitude.", 16, 3
    block = "block", "One power of two as scale for each 128 values, and for each 128 x 128 of weights.", 128, 4
    mx = "mx", "MXFP8: one 8-bit exponent for each 32 values.", 32, 4
    mx_32x32 = "mx_32x32", "MXFP8 with one exponent for each 32 x 32 of weights, for both directions.", 32, 4


class Strategy(Numbered):
    """ZeRO stage by name: what is split over the ranks of the inner data-parallel axis."""

    no_shard = "no_shard", "ZeRO-0: every rank holds everything."
    optim = "optim", "ZeRO-1: main weights and optimizer state are sharded."
    optim_grads = "optim_grads", "ZeRO-2: main gradients are sharded too, and reduced every microbatch."
    optim_grads_params = "optim_grads_params", "ZeRO-3: compute weights are sharded too, and gathered while in use."


class OuterStrategy(Numbered):
    """Splits of the outer data-parallel axis. hybrid: the name of ZeRO-3 inside with this outside."""

    hybrid: str

    no_shard = "no_shard", "Nothing; the sharded model is replicated (HSDP).", "hsdp"
    optim = "optim", "Main weights and optimizer state (HFSDP).", "hfsdp"


class GradBuffer(Choice):
    """How the gradients of a backward get into the flat buffer that is reduced."""

    flat = "flat", "Autograd writes each gradient into the flat buffer."
    concat = "concat", "Autograd allocates one tensor per parameter; a copy makes the flat buffer of them."


class Numerics(Choice):
    """How much the engine promises about the order of arithmetic."""

    fast = "fast", "No promise."
    deterministic = "deterministic", "The same run twice gives the same bits."
    ordered = (
        "ordered",
        "Gradients are summed in rank order and the norm does not depend on order: strategies that sum microbatches in"
        " the same order agree bit for bit.",
    )
    exact = (
        "exact",
        "Gradients are summed as integers: all strategies, numbers of ranks and hybrid shapes agree bit for bit with"
        " each other and with one process.",
    )

    @property
    def bitwise(self) -> bool:
        """True if bits may not depend on where buckets are cut."""
        return self in (Numerics.ordered, Numerics.exact)


class Transport(Choice):
    """Mover of buckets between ranks over gloo."""

    auto = "auto", "Shared memory where all ranks of a group are on one host and the system allows it; else gloo."
    backend = "backend", "The process group's own backend."


class Registration(Choice):
    """When the engine's buckets are registered with NCCL as user buffers."""

    none = "none", "Never."
    auto = "auto", "When the model is built."
    manual = "manual", "All at once, after the first step."

    @classmethod
    def others(cls) -> dict[Any, Self]:
        """megatron-fsdp's bools."""
        return {False: cls["none"], True: cls["auto"]}


class SharpAxis(Choice):
    """Which communicator may reduce inside the network (SHARP)."""

    default = "default", "The one that NCCL and the environment choose."
    none = "none", "No communicator."
    dp = "dp", "The communicator of the inner data-parallel axis."
    dp_outer = "dp_outer", "The communicator of the outer data-parallel axis."

    @property
    def is_asked(self) -> bool:
        return self in (SharpAxis.dp, SharpAxis.dp_outer)


T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """Numbers an option takes, both ends included but where `above` or `below` says that one is not.

    unit: as a plural; "" for a ratio or a seed.
    """

    low: float
    high: float
    unit: str = ""
    above: bool = False
    below: bool = False

    def holds(self, value: float) -> bool:
        """True if a number is one of them; NaN and infinity never are."""
        left_out = (self.above and value == self.low) or (self.below and value == self.high)
        return math.isfinite(value) and self.low <= value <= self.high and not left_out

    def nearest(self, value: float) -> float | None:
        """The end that lies nearest to a number beyond it; None where that end is no value, and for NaN."""
        if value < self.low:
            return None if self.above else self.low
        return self.high if value > self.high and not self.below else None

    def __str__(self) -> str:
        if self.above or self.below:
            low = f"above {self.low:,}" if self.above else f"at least {self.low:,}"
            ends = f"{low}, {'below' if self.below else 'up to'} {self.high:,}"
        else:
            ends = f"{self.low:,} to {self.high:,}"
        return f"{ends} {self.unit}".rstrip()


def option(default: T, *, range: Range | None = None, setting: str = "", same_bits: bool = False) -> T:
    """A dataclass field, with fields of `Option`; typed as its default, as `dataclasses.field` is."""
    return field(default=default, metadata={"range": range, "setting": setting, "same_bits": same_bits})


@dataclass(frozen=True)
class Option:
    """One option with all that is known of it but its sentence.

    kind: bool, int, float, or a `Choice`. range: numbers it takes. setting: path in a cell's configuration; "not
    group.key" where that is its opposite; "" where there is none. same_bits: every value of it leads to the same bits.
    """

    name: str
    kind: type
    optional: bool
    default: Any
    range: Range | None
    setting: str
    same_bits: bool

    @property
    def takes(self) -> str:
        if issubclass(self.kind, Choice):
            words = ", ".join(self.kind.__members__)
        elif self.range is not None:
            words = str(self.range)
        else:
            words = "True, False" if self.kind is bool else self.kind.__name__
        return f"{words}, or None" if self.optional else words

    def read(self, value: Any) -> Any:
        """A value as the engine keeps it: a choice's member by itself, all else as it is. ValueError: what is valid."""
        if issubclass(self.kind, Choice):
            return self.kind.parse(value, self.name)
        if value is None and self.optional:
            return None
        if not isinstance(value, _ACCEPTS[self.kind]) or (isinstance(value, bool) and self.kind is not bool):
            raise ValueError(f"{self.name}={value!r} is of another type; valid are {self.takes}")
        if self.range is not None and not self.range.holds(value):
            raise ValueError(f"{self.name}={value!r} is out of range; valid are {self.takes}")
        return value


_ACCEPTS: dict[type, Any] = {bool: bool, int: numbers.Integral, float: numbers.Real}


def declared_in(declaring: type, group: str = "") -> dict[str, Option]:
    """The options that a dataclass, whose fields are made by `option`, has by name.

    group: of the configuration, in which each has the setting of its own name; "" where each says its setting.
    """
    hints = typing.get_type_hints(declaring)
    found = {}
    for each in fields(declaring):
        kinds = typing.get_args(hints[each.name])  # of an option that may be None: its own, and that
        more = {**each.metadata, "setting": f"{group}.{each.name}"} if group else each.metadata
        found[each.name] = Option(each.name, (*kinds, hints[each.name])[0], bool(kinds), each.default, **more)
    return found


@dataclass(frozen=True)
class EngineOptions:
    """Options that a cell sets in its group `engine`, under the same names."""

    prefetch: int = option(1, range=Range(0, 1_024, "units"), same_bits=True)
    """Number of units gathered ahead of the unit in use."""
    double_buffer: bool = option(False, same_bits=True)
    """Use two fixed buffers for gathered weights and two for unreduced gradients. Nothing is allocated after the first
    step; more than two gathered units at a time are an error."""
    grad_buffer: GradBuffer = option(GradBuffer.flat, same_bits=True)
    """How gradients get into the flat buffer that is reduced."""
    offload_optimizer: bool = option(False)
    """Keep main weights, main gradients and optimizer state in host memory, and run the update on the CPU."""
    separate_gather_group: bool | None = option(None, same_bits=True)
    """Gathers have a communicator of their own. None: they do."""
    transport: Transport = option(Transport.auto, same_bits=True)
    """Mover of buckets between ranks over gloo. auto: shared memory, where ranks share a host; backend: gloo."""
    report_nan_in_param_grad: bool = option(False, same_bits=True)
    """Check every gradient for NaN and infinity before it is reduced; the error names tensor, rank and microbatch."""
    watchdog_timeout_s: float | None = option(None, range=Range(0, 10_000_000, "seconds", above=True), same_bits=True)
    """Seconds that a wait for a collective may last. Then every rank raises one error that names ranks, units and
    collectives. None is the timeout of the model's process groups (init_process_group: 1800 s with gloo, 600 s with
    NCCL), less a tenth and at most 30 s; under the harness it is four fifths of launch.hang_timeout_s."""
    check_collectives: bool = option(False, same_bits=True)
    """Before each collective, check that all ranks are about to run the same one."""
    check_replicas_every: int = option(0, range=Range(0, 2**31 - 1, "steps"), same_bits=True)
    """Steps between comparisons of a hash of the weights that several ranks hold; 0: never."""


@dataclass(frozen=True)
class Options(EngineOptions):
    """Options of the engine, each with a default. They change the cost of a step; only `numerics` changes its results.

    Raises:
        ValueError: a value out of its range or of another type, or two that contradict each other, with what is valid.
    """

    numerics: Numerics = option(Numerics.fast, setting="numerics.mode")
    """The promise about the order of sums."""
    exact_bits: int = option(44, range=Range(0, 60, "bits"), setting="numerics.exact_bits")
    """Under numerics=exact, gradients are rounded to multiples of 2^-exact_bits. Each gradient element of a microbatch
    must stay below 2^(62 - exact_bits) / (number of global microbatches)."""
    exact_terms: int = option(4096, range=Range(1, (1 << 62) - 1, "microbatches"))
    """Under numerics=exact, the largest number of microbatches in a step, over all ranks."""
    nccl_ub: Registration = option(Registration.none, setting="nccl_ub.mode")
    """When buckets are registered as NCCL user buffers. Any value except none turns on `double_buffer`. Without NCCL
    nothing is registered, and the record says so; a registration that fails is a RuntimeError on all ranks."""
    disable_symmetric_registration: bool = option(False, setting="not nccl_ub.symmetric")
    """Register user buffers only for zero copy, not as symmetric windows."""

    def __post_init__(self) -> None:
        for each in OPTIONS.values():
            object.__setattr__(self, each.name, each.read(getattr(self, each.name)))
        object.__setattr__(self, "double_buffer", fixed_buffers(vars(self)))
        if self.double_buffer and self.prefetch > 1:
            raise ValueError(
                f"prefetch={self.prefetch} {TOO_FAR_AHEAD}; valid are 0 or 1. Set prefetch=1, or double_buffer=False"
                " nccl_ub='none'"
            )


OPTIONS = {**declared_in(Options), **declared_in(EngineOptions, group="engine")}  # every option by name
TOO_FAR_AHEAD = (  # words that follow the option `prefetch`, where fixed buffers have no room for it
    "wants more units ahead than double_buffer (which nccl_ub turns on) has room for: one beside that in use"
)


def fixed_buffers(chosen: Mapping[str, Any]) -> bool:
    """True if gathered weights and unreduced gradients live in buffers that stay: asked for, or forced by user buffers,
    whose addresses are registered."""
    return bool(chosen["double_buffer"]) or chosen["nccl_ub"] is not Registration.none


def refuse_unknown(given: Iterable[str], owner: str, known: Iterable[str]) -> None:
    """Raise TypeError, with the nearest names, where a keyword of `owner` is neither an option nor `known`."""
    names = list(dict.fromkeys((*OPTIONS, *known)))
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3) or names
            raise TypeError(f"{owner} got an unexpected argument {name!r}; nearest are {', '.join(near)}")
