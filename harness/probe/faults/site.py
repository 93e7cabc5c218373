"""Where a fault is put: the parts of one built engine, and how a method of one of them is wrapped."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ParamSpec

import torch
from torch import Tensor

from harness.config.faults import AMOUNTS, BITS, Fault
from harness.config.schema import Config
from harness.fsdp.comm import reduction
from harness.fsdp.storage.bucket import Bucket

Injector = Callable[["Site"], None]
Said = ParamSpec("Said")

INJECTORS: dict[str, Injector] = {}
"""What does each fault, by the fault's name."""


def _decorator(declare: Callable[Said, Fault]) -> Callable[Said, Callable[[Injector], Injector]]:
    """A decorator that takes what `declare` takes, and registers the function it stands on under the fault's name."""

    def declaring(*args: Said.args, **kwargs: Said.kwargs) -> Callable[[Injector], Injector]:
        name = declare(*args, **kwargs).name

        def register(injector: Injector) -> Injector:
            INJECTORS[name] = injector
            return injector

        return register

    return declaring


fault = _decorator(Fault)
"""Declares a fault on the function that does it: the only place that names it. The desk reads the declaration too."""


@dataclass
class Site:
    """One rank's engine, about to be spoiled.

    Args:
        config: of the run.
        engine: the harness's adapter of our engine.
        rank, size: of this process.
    """

    config: Config
    engine: Any
    rank: int
    size: int
    random: random.Random = field(default_factory=lambda: random.Random(2_026))
    """Generator with the same seed on every rank."""

    @property
    def amount(self) -> float:
        """Share of the fault."""
        return AMOUNTS[self.config.fault.strength.name]

    @property
    def bits(self) -> int:
        """Significant bits that a fault of precision keeps."""
        return BITS[self.config.fault.strength.name]

    @property
    def model(self) -> Any:
        """The sharded model."""
        return self.engine.model

    @property
    def reduce(self) -> Any:
        """The pipeline of reductions."""
        return self.model._parts.reduce

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Trained buckets, in model order."""
        return [bucket for bucket in self.model.buckets if bucket.trainable]

    @property
    def k(self) -> int:
        """Microbatches a rank and step."""
        return self.config.train.global_batch_size // self.config.train.microbatch_size // self.size

    def around(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a method of one object, or a function of a module, by what `wrap` makes of it."""
        setattr(owner, name, wrap(getattr(owner, name)))

    def after(self, owner: Any, name: str, then: Callable[[], None]) -> None:
        """Do something each time a method has returned."""

        def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                result = method(*args, **kwargs)
                with torch.no_grad():
                    then()
                return result

            return wrapped

        self.around(owner, name, wrap)

    def before(self, owner: Any, name: str, first: Callable[[], None]) -> None:
        """Do something each time a method is called."""

        def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                with torch.no_grad():
                    first()
                return method(*args, **kwargs)

            return wrapped

        self.around(owner, name, wrap)

    def each_microbatch(self, then: Callable[[int], None]) -> None:
        """Do something before each microbatch of a step; it is given the microbatch's number, from 1."""
        number = [0]

        def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(batch: Any, *, last: bool) -> Any:
                number[0] += 1
                with torch.no_grad():
                    then(number[0])
                if last:
                    number[0] = 0
                return method(batch, last=last)

            return wrapped

        self.around(self.engine, "forward_backward", wrap)

    def on_contributions(self, change: Callable[[list[Tensor]], list[Tensor]]) -> None:
        """Change what the ranks contribute to every sum, just before it is made."""

        def wrap(add_up: Callable[..., None]) -> Callable[..., None]:
            def wrapped(contributions: list[Tensor], target: Tensor, accum: torch.dtype, **options: Any) -> None:
                add_up(change(list(contributions)), target, accum, **options)

            return wrapped

        self.around(reduction, "_sum_in_order", wrap)

    def on_reduced(self, change: Callable[[list[Bucket]], None]) -> None:
        """Change the step's gradients, when all of them are summed and scaled and before anybody looks at them."""
        self.after(self.reduce, "finish", lambda: change(self.buckets))


def blend(target: Tensor, wrong: Tensor | float, amount: float) -> None:
    """target += amount * (wrong - target), in place."""
    if isinstance(wrong, Tensor):
        target.copy_(torch.lerp(target.double(), wrong.double(), amount))
    else:
        target.mul_(1.0 - amount).add_(wrong * amount)


def share(tensor: Tensor, amount: float) -> Tensor:
    """The last elements of a flat tensor: this share of them, and one at least where there is any."""
    count = min(tensor.numel(), max(1, round(amount * tensor.numel())))
    return tensor[tensor.numel() - count :]


def rounded(tensor: Tensor, bits: int) -> Tensor:
    """Rounded to so many significant bits, to nearest even; a new tensor of the same dtype."""
    mantissa, exponent = torch.frexp(tensor.double())
    return torch.ldexp(torch.round(mantissa * 2.0**bits), exponent - bits).to(tensor.dtype)
