"""Where a fault is put: the parts of one built engine, and how a method of one of them is wrapped.

[Note: Late] What is wrapped is as it was up to `fault.begins_at`. A fault that must know what happened before wraps
`always`, and asks `acts` where it does harm. What is changed for good rather than in passing is changed `once`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from harness.config.schema import Config
from harness.fsdp.comm import reduction
from harness.fsdp.storage.param_group import ParamGroup
from harness.shm import transfer
from harness.train import Session
from harness.train.faults import AMOUNTS, Build
from tests.faults.corpus import BITS, DECLARED, Fault

Injector = Callable[["Site"], None]


def fault(stage: str, *cell: str, **limits: Any) -> Callable[[Injector], Callable[[Config, Build], Session]]:
    """Declare a fault on the function that puts it into a site, and whose first sentence says what it does; what is
    declared beside is `Fault`'s."""

    def declare(injector: Injector) -> Callable[[Config, Build], Session]:
        name, does = injector.__name__, " ".join(str(injector.__doc__).split()).partition(". ")[0].rstrip(".")
        does = does if does.startswith(("Adam", "ZeRO")) else does[0].lower() + does[1:]
        declared = Fault(name, f"{injector.__module__}:{name}", does, stage, cell, **limits)
        DECLARED.append(declared)
        return spoiling(declared, injector)

    return declare


fault_2 = partial(fault, edition=2)


def spoiling(declared: Fault, injector: Injector, *, only: bool = False) -> Callable[[Config, Build], Session]:
    """What builds a session with the fault in it. only: in the step at which it begins, and in no other."""

    def spoiled(config: Config, build: Build) -> Session:
        declared.check(config)
        session = build()
        site = Site(config, session.engine, session.ranks.rank, session.ranks.world_size, session.loader, only)
        injector(site)

        def progress(record: Mapping[str, Any]) -> None:
            site.end(record["step"])
            session.progress(record)

        return replace(session, begins=site.begin, progress=progress)

    spoiled.__module__, _, name = declared.target.partition(":")
    spoiled.__name__ = spoiled.__qualname__ = name + ("_once" if only else "")
    spoiled.__doc__ = declared.does
    return spoiled


@dataclass
class Site:
    """One rank's engine, about to be spoiled.

    Args:
        config: of the run.
        engine: the harness's adapter of our engine.
        rank, size: of this process.
        loader: of this rank's batches.
    """

    config: Config
    engine: Any
    rank: int
    size: int
    loader: Any = None
    only: bool = False
    """Whether the fault acts in one step, and as before after it."""
    random: random.Random = field(default_factory=lambda: random.Random(2_026))
    """Generator with the same seed on every rank."""
    step: int = 0
    """The step that is being made, counted from 1; 0 before the first."""
    first: int = 0
    """The first step of this session: beyond 1 where it goes on from a checkpoint; 0 before it."""
    _due: list[tuple[int, Callable[[], object]]] = field(default_factory=list)
    _last: list[Callable[[], None]] = field(default_factory=list)

    @property
    def acts(self) -> bool:
        begins = self.config.fault.begins_at
        return self.step == begins if self.only else self.step >= begins or begins == 1

    @property
    def amount(self) -> float:
        return AMOUNTS[self.config.fault.strength.name]

    @property
    def bits(self) -> int:
        return BITS[self.config.fault.strength.name]

    @property
    def model(self) -> Any:
        return self.engine.model

    @property
    def reduce(self) -> Any:
        return self.model.engine.reduce

    @cached_property
    def buckets(self) -> list[ParamGroup]:
        """Trained buckets, in model order."""
        return [bucket for bucket in self.model.engine.buckets if bucket.trainable]

    @property
    def k(self) -> int:
        return self.config.train.global_batch_size // self.config.train.microbatch_size // self.size

    def begin(self, step: int) -> None:
        self.first = self.first or step
        self.step = step
        changes = [change for earliest, change in self._due if step >= earliest]
        self._due = [each for each in self._due if step < each[0]]
        with torch.no_grad():
            for change in changes:
                change()

    def end(self, step: int) -> None:
        """A step is done, and its record made."""
        if step == self.config.train.steps:
            with torch.no_grad():
                for change in self._last:
                    change()

    def once(self, change: Callable[[], object], earliest: int = 1) -> None:
        """Change something for good: now, or between two steps, just before the fault's first one.

        Args:
            change: what to do.
            earliest: the first step before which there is something to change.
        """
        first = max(self.config.fault.begins_at, earliest)
        if first > 1:
            self._due.append((first, change))
        else:
            with torch.no_grad():
                change()

    def on_weights(self, change: Callable[[Tensor], object]) -> None:
        """Change the pieces of main weights of all buckets, and compute with them from now on."""
        for bucket in self.buckets:
            for piece in bucket.main_shards:
                change(piece)
        self.model.install_weights()

    def at_the_end(self, change: Callable[[], None]) -> None:
        """Change something when the last step is done, before anybody looks at the weights it left."""
        self._last.append(change)

    def around(self, owner: Any, name: str, change: Callable[..., Any], *, always: bool = False) -> None:
        """Call `change(method, *arguments)` in place of a method of an object, or of a function of a module; from the
        first step at which the fault acts, or `always`."""
        method = getattr(owner, name)
        whole = always or (self.config.fault.begins_at == 1 and not self.only)

        def changed(*args: Any, **kwargs: Any) -> Any:
            return change(method, *args, **kwargs) if whole or self.acts else method(*args, **kwargs)

        setattr(owner, name, changed)

    def after(self, owner: Any, name: str, then: Callable[[], None], *, always: bool = False) -> None:

        def wrapped(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            with torch.no_grad():
                then()
            return result

        self.around(owner, name, wrapped, always=always)

    def before(self, owner: Any, name: str, first: Callable[[], None]) -> None:

        def wrapped(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                first()
            return method(*args, **kwargs)

        self.around(owner, name, wrapped)

    def each_microbatch(self, then: Callable[[int], None]) -> None:
        """Do something before each microbatch of a step; it is given the microbatch's number, from 1."""
        number = [0]

        def wrapped(method: Callable[..., Any], batch: Any, *, last: bool) -> Any:
            number[0] += 1
            with torch.no_grad():
                then(number[0])
            if last:
                number[0] = 0
            return method(batch, last=last)

        self.around(self.engine, "forward_backward", wrapped)

    def on_contributions(self, change: Callable[[list[Tensor]], list[Tensor]]) -> None:
        """Change what the ranks contribute to every sum, just before it is made."""

        def wrapped(
            add_up: Callable[..., None], contributions: list[Tensor], target: Tensor, accum: torch.dtype, **options: Any
        ) -> None:
            add_up(change(list(contributions)), target, accum, **options)

        self.around(reduction, "sum_in_order", wrapped)
        self.around(transfer, "sum_in_order", wrapped)  # of what lies in shared memory

    def on_reduced(self, change: Callable[[list[ParamGroup]], object], *, always: bool = False) -> None:
        """Change the step's gradients, when all of them are summed and scaled and before anybody looks at them."""
        self.after(self.reduce, "finish", lambda: change(self.buckets), always=always)


def blend(target: Tensor, wrong: Tensor | float, amount: float) -> None:
    """target += amount * (wrong - target), in place."""
    if isinstance(wrong, Tensor):
        target.copy_(torch.lerp(target.double(), wrong.double(), amount))
    else:
        target.mul_(1.0 - amount).add_(wrong * amount)


def exchange(first: Tensor, second: Tensor, amount: float) -> None:
    """Blend each of two flat tensors with the other one, in place, as far as they have one length."""
    length = min(first.numel(), second.numel())
    kept = first[:length].clone()
    blend(first[:length], second[:length], amount)
    blend(second[:length], kept, amount)


def share(tensor: Tensor, amount: float) -> Tensor:
    """The last elements of a flat tensor: this share of them, and one at least where there is any."""
    count = min(tensor.numel(), max(1, round(amount * tensor.numel())))
    return tensor[tensor.numel() - count :]


def rounded(tensor: Tensor, bits: int) -> Tensor:
    """Rounded to so many significant bits, to nearest even; a new tensor of the same dtype."""
    mantissa, exponent = torch.frexp(tensor.double())
    return torch.ldexp(torch.round(mantissa * 2.0**bits), exponent - bits).to(tensor.dtype)
