"""The words of the engine: every closed list of choices, each choice with its sentence, and how a value is read.

Nothing here imports torch, so that a command line, a rule or a page can use the same words as the engine.
"""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any, Self


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
