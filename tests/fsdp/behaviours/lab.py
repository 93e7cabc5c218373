"""What a check gets to work with, and how behaviours, their checks and their mutants are declared."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.fsdp import ShardedModel
from harness.fsdp.storage.parameter_access import grad_of
from harness.probe.collectives import CollectiveMeter, by_kind
from tests.fsdp.behaviours.models import DIM, Batch, Make, batch, loss_of, plain_gradients
from tests.fsdp.behaviours.subject import NotOffered, Optimize, Setup, Subject, sgd

ALL = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SHARDED = ALL[1:]
FP32 = 1e-5
"""Relative distance that rounding in fp32 stays below here."""
BF16 = 1e-2
"""The same with a wire of bf16: one rounding of each contribution, in fp32 sums."""
MOST = 3
"""Claims of one check that are told."""

Patch = Callable[[], AbstractContextManager[Any]]


class Broken(AssertionError):
    """The behaviour does not hold; the message is what was measured."""


@dataclass(frozen=True)
class Mutant:
    """Our engine with one mistake. says: the mistake in a sentence. patch: makes it, while it is entered."""

    says: str
    patch: Patch


@dataclass(frozen=True)
class Behaviour:
    """A number of the list (with a suffix where a part of it needs something else), and what shows it.

    check: gives what was measured. shortened: it tries a part of its values where `Lab.whole` does not ask for all.
    """

    key: str
    says: str
    ranks: int
    check: Callable[[Lab], str]
    mutants: tuple[Mutant, ...]
    shortened: bool = False

    @property
    def number(self) -> int:
        """Its place in the list."""
        return int(self.key.split("-")[0])


CATALOG: dict[str, Behaviour] = {}


def behaviour(
    key: str, says: str, *mutants: Mutant, ranks: int = 2, shortened: bool = False
) -> Callable[[Callable[[Lab], str]], Behaviour]:
    """Declare a check and the mistakes it has to find."""

    def declare(check: Callable[[Lab], str]) -> Behaviour:
        CATALOG[key] = Behaviour(key, says, ranks, check, mutants, shortened)
        return CATALOG[key]

    return declare


class Traffic(CollectiveMeter):
    """What this rank issued, in order; once it is over, by kind, but for what tells which parameters were used."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.kinds: dict[str, dict[str, int]] = {}
        super().__init__()

    def add(self, kind: str, bucket: str, count: int, num_bytes: int) -> None:
        if count:
            self.order.append(f"{kind} {bucket or num_bytes}")
        super().add(kind, bucket, count, num_bytes)

    def count(self, kind: str, what: str = "count") -> int:
        """Collectives of a kind, or the "bytes" this rank sent by them."""
        return self.kinds.get(kind, {}).get(what, 0)


class Lab:
    """One rank's workbench for one check.

    A claim that does not hold is remembered, not raised, so that all ranks go through the same collectives; `close`
    raises them.

    Args:
        subject: the engine.
        whole: the values of `each` that cost most are all tried.
        hasty: the first value of `each` that breaks a claim is the last: it is a mutant, and found.
    """

    def __init__(self, subject: type[Subject], *, whole: bool = False, hasty: bool = False) -> None:
        self.subject, self.whole, self.hasty = subject, whole, hasty
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.dim = DIM
        """Width of the microbatches; a check that builds a wider model says so."""
        self.worst = 0.0
        """The largest error that `within` was given."""
        self._built: list[Subject] = []
        self._broken: list[str] = []
        self._refused: list[str] = []
        self._tried = 0

    def build(self, make: Make, setup: Setup, optimize: Optimize | None = None) -> Subject:
        """Shard a model."""
        made = self.subject(make, optimize or sgd(), setup)
        self._built.append(made)
        return made

    # -- claims --------------------------------------------------------------------------------------------------

    def must(self, holds: bool, measured: str) -> None:
        """Raise at once: for what every rank knows of all ranks, so that none goes on alone."""
        if not holds:
            raise Broken(measured)

    def claim(self, holds: bool, measured: str) -> None:
        """Remember what was measured if it is not as it should be."""
        if not holds:
            self._broken.append(measured)

    def within(self, bound: float, error: float, told: str) -> None:
        """Claim that an error is below its bound."""
        self.worst = max(self.worst, error)
        self.claim(error < bound, f"{told} off by {error:.1e}")

    def each(self, values: Sequence[Any]) -> Iterator[Any]:
        """The values the engine can be asked for; at least one, or the behaviour is not offered.

        A check asks inside `asking`, which notes what was refused.
        """
        for value in values:
            self._tried += 1
            yield value
            if self.hasty and any(self.everywhere(bool(self._broken))):
                raise Broken(self._told() or "told by another rank")
        if len(self._refused) == self._tried:
            raise NotOffered(self._refused[0])

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A body that asks for one of several values; a refusal ends the body alone."""
        try:
            yield
        except NotOffered as refusal:
            self._refused.append(str(refusal))

    def off(self, what: str) -> str:
        """What `within` found, in words."""
        return f"{what} off by at most {self.worst:.0e}{self.without}"

    @property
    def without(self) -> str:
        """What the engine could not be asked for."""
        return f"; {', '.join(dict.fromkeys(self._refused))}" if self._refused else ""

    def close(self) -> None:
        """End the engines; raise the claims that did not hold."""
        for each in self._built:
            each.close()
        if self._broken:
            raise Broken(self._told())

    def _told(self) -> str:
        return "; ".join(list(dict.fromkeys(self._broken))[:MOST])

    def drop(self, subject: Subject) -> None:
        """End one engine now."""
        self._built.remove(subject)
        subject.close()

    # -- training ------------------------------------------------------------------------------------------------

    def batches(self, k: int, step: int = 0, rank: int | None = None) -> list[Batch]:
        """The microbatches of a rank in a step, distinct on every rank."""
        start = 1_000 * step + (self.rank if rank is None else rank) * k
        return [batch(start + index, self.dim) for index in range(k)]

    def all_batches(self, k: int, step: int = 0) -> list[Batch]:
        """The microbatches of all ranks in a step."""
        return [each for rank in range(self.world) for each in self.batches(k, step, rank)]

    def accumulate(self, subject: Subject, k: int = 1, step: int = 0) -> list[float]:
        """Forward and backward of a step's microbatches, each loss divided by their number; losses."""
        todo = self.batches(k, step)
        return [
            subject.microbatch(lambda model, data=data: loss_of(model, data) / k, last=index == k - 1).item()
            for index, data in enumerate(todo)
        ]

    def train(self, subject: Subject, steps: int, k: int = 1) -> list[list[float]]:
        """Whole steps; losses of each."""
        losses = []
        for step in range(steps):
            losses.append(self.accumulate(subject, k, step))
            subject.step()
        return losses

    def plain(self, make: Make, k: int = 1, step: int = 0) -> dict[str, Tensor]:
        """Gradients of the same step by one process in fp64."""
        return plain_gradients(make, self.all_batches(k, step))

    def trained(self, make: Make, optimize: Optimize, steps: int, k: int = 1) -> dict[str, Tensor]:
        """Weights after the same steps by one process in fp64."""
        model = make().double()
        optimizer = optimize(model)
        for step in range(steps):
            optimizer.zero_grad()
            data = self.all_batches(k, step)
            for each in data:
                (loss_of(model, each) / len(data)).backward()
            optimizer.step()
        return {name: p.detach() for name, p in model.named_parameters()}

    def gradients(
        self, make: Make, setup: Setup, k: int = 1, *, bound: float = FP32, like: Make | None = None
    ) -> Subject:
        """Claim that a step's gradients are those of one process, which trains `like` if that is another model."""
        subject = self.build(make, setup)
        self.accumulate(subject, k)
        error = self.error(subject.gradients(), self.plain(like or make, k))
        outer = f", outer {setup.outer_strategy}" if setup.outer > 1 else ""
        self.within(bound, error, f"{setup.strategy}{outer}, {setup.comm} wire, k = {k}: gradients")
        return subject

    def weights(self, make: Make, setup: Setup, optimize: Optimize | None = None, steps: int = 3) -> Subject:
        """Claim that weights after some steps are those of one process."""
        optimize = optimize or sgd()
        subject = self.build(make, setup, optimize)
        self.train(subject, steps)
        error = self.error(subject.weights(), self.trained(make, optimize, steps))
        self.within(FP32, error, f"{setup.strategy}: weights after {steps} steps")
        return subject

    # -- looking -------------------------------------------------------------------------------------------------

    def error(self, have: dict[str, Tensor], want: dict[str, Tensor]) -> float:
        """Largest relative distance of one tensor to the one it should be; infinite where names differ."""
        if have.keys() != want.keys():
            return float("inf")
        return max(relative(have[name], want[name]) for name in want)

    def everywhere(self, value: Any) -> list[Any]:
        """Every rank's value. *Collective.*"""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    @contextmanager
    def counting(self) -> Iterator[Traffic]:
        """Count this rank's collectives in the body."""
        traffic = Traffic()
        try:
            yield traffic
        finally:
            traffic.kinds = by_kind([row for row in traffic.take() if row.bucket != "used parameters"])
            traffic.close()

    def traffic(self, subject: Subject, k: int) -> Traffic:
        """Of a step's forwards and backwards, after a whole step that is not counted."""
        self.train(subject, 1, k)
        with self.counting() as traffic:
            self.accumulate(subject, k)
            subject.finish()
        return traffic


def first_line(error: BaseException) -> str:
    """What an exception says first, without the place in torch's sources that gloo puts before it."""
    lines = str(error).strip().splitlines()
    return re.sub(r"^\[/\S+\] ", "", lines[0])[:200] if lines else ""


def relative(have: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of what should be; infinite for NaN."""
    if have.shape != want.shape:
        return float("inf")
    distance = (have.double() - want.double()).norm().item()
    if distance != distance:
        return float("inf")
    norm = want.double().norm().item()
    return distance / norm if norm else (float("inf") if distance else 0.0)


def not_installed(model: ShardedModel) -> None:
    """Let forwards compute with the weights from before main weights were written."""
    for bucket in model.buckets:
        bucket.installed_version = bucket.main_version


def live_bytes() -> int:
    """Bytes of tensor storage that Python objects of this process hold on the CPU."""
    gc.collect()
    held: dict[int, int] = {}
    # A gradient that autograd put in place is no Python object until somebody asks for it.
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    tensors += [found for each in tensors if each.is_leaf and (found := grad_of(each)) is not None]
    with torch._C.DisableTorchFunctionSubclass():  # a parameter that was kept lets nobody look
        for tensor in tensors:
            plain = type(tensor) is Tensor or isinstance(tensor, nn.Parameter)
            if plain and not isinstance(tensor, DTensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                held[storage._cdata] = storage.nbytes()  # of released weights there is no address
    return sum(held.values())
