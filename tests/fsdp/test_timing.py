"""Delays, another order of readiness and poisoned memory change no bit; engines that rely on luck are caught."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from harness.fsdp import Observer, fully_shard
from harness.fsdp.options import Transport
from harness.fsdp.storage.memory import BucketMemory
from harness.shm.transfer import Transport as Shared, Work
from tests.engines.conformance.trial import Evidence
from tests.fsdp.pairs import STRATEGIES, Pair, arguments_of
from tests.fsdp.trial import TRANSPORTS, differences
from tests.support.covering import Cover, once
from tests.support.mutants import each, slips
from tests.support.spawn import run_ranks

LONGEST_S = 0.004


@contextmanager
def delayed(rank: int, seed: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Short sleeps before some collectives and updates, and after some forwards of parts of a module."""
    source = random.Random(1_000 * seed + rank)

    def sleep(*_: Any) -> None:
        if source.random() < 0.3:
            time.sleep(source.random() * LONGEST_S)

    observer = Observer()
    observer.begin = sleep
    observer.attach()
    handles = [each.register_forward_hook(sleep) for each in module.modules()]
    handles.append(optimizer.register_step_pre_hook(sleep))
    try:
        yield
    finally:
        observer.detach()
        for handle in handles:
            handle.remove()


def _poison(tensor: Tensor | None) -> None:
    if tensor is None or not tensor.untyped_storage().nbytes():
        return
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    raw.fill_(0xFF)  # NaN in every float format, -1 in integers


@contextmanager
def poisoned_buffers() -> Iterator[None]:
    """What is freed, given back, or about to be reused, holds NaN: nobody may read it, nor count on what it held."""

    def poisoning(name: str) -> Any:
        original = getattr(BucketMemory, name)

        def call(self: BucketMemory, *args: Any) -> Any:
            if name in ("free", "give_back"):
                _poison(args[0])
            found = original(self, *args)
            if name in ("take", "refill"):
                _poison(found if name == "take" else args[0])
            return found

        return call

    with mock.patch.multiple(
        BucketMemory, **{name: poisoning(name) for name in ("free", "give_back", "take", "refill")}
    ):
        yield


class Branches(nn.Module):
    """A unit of three branches over disjoint parts of its input, run in the order `order`.

    Autograd reaches the parameters in the reverse of that order. No bit depends on it: every branch has an input of its
    own, and outputs are added in one fixed order.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(3))
        self.order: list[int] = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        parts = x.chunk(3, dim=-1)
        outputs = {place: torch.tanh(self.branches[place](parts[place])) for place in self.order}
        return x + (outputs[0] + outputs[1] + outputs[2])


class Branching(nn.Module):
    """A few such units in a row, with parameters of the root before and behind them."""

    def __init__(self, width: int = 4, num_units: int = 3) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.stem = nn.Linear(3 * width, 3 * width)
        self.units = nn.ModuleList(Branches(width) for _ in range(num_units))
        self.head = nn.Linear(3 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for unit in self.units:
            x = unit(x)
        head: Tensor = self.head(x)
        return head


STEPS = 3


@dataclass(frozen=True)
class Case:
    strategy: str
    numerics: str
    k: int
    transport: Transport
    outer: str = ""
    double_buffer: bool = False


@dataclass(frozen=True)
class Disturbance:
    """delays: seed of sleeps before collectives and updates and after forwards. late: ranks they are for."""

    delays: int | None = None
    late: tuple[int, ...] | None = None
    shuffled: bool = False
    poisoned: bool = False


NONE = Disturbance()
ALL = Disturbance(delays=1, shuffled=True, poisoned=True)
DISTURBANCES = (
    Disturbance(delays=2),
    Disturbance(delays=3, late=(1,)),
    Disturbance(shuffled=True),
    Disturbance(poisoned=True),
    ALL,
)

SUMS = [("ordered", 1), ("ordered", 2), ("fast", 1), ("fast", 2), ("exact", 2)]
CASES = [
    Case(strategy, numerics, k, TRANSPORTS[place % 2], outer, double_buffer)
    for place, ((numerics, k), strategy, outer, double_buffer) in enumerate(
        product(SUMS, STRATEGIES, ("", "no_shard", "optim"), (False, True))
    )
    if not double_buffer or k == 2
]
Trial = tuple[int, Case, Disturbance]
"""Ranks, what they train, and what disturbs them."""


def values_of(trial: Trial) -> tuple[Any, ...]:
    size, case, disturbance = trial
    return size, case.strategy, case.numerics, case.k, case.transport, case.outer, case.double_buffer, disturbance


TRIALS = Cover(
    (
        (size, case, disturbance)
        for case, disturbance in product(CASES, DISTURBANCES)
        for size in ((4,) if case.outer else (2, 3))
        if not case.outer or disturbance in (DISTURBANCES[1], ALL)
    ),
    values=values_of,
    key=lambda trial: trial[0],
)


def run_one(rank: int, size: int, case: Case, disturbance: Disturbance) -> Evidence:
    model = Branching()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)
    with ExitStack() as stack:
        if disturbance.poisoned:
            stack.enter_context(poisoned_buffers())
        wrapped, optimizer = fully_shard(
            model,
            optimizer,
            fsdp_unit_modules=[Branches],
            **arguments_of(Pair(case.strategy, case.outer), size),
            numerics=case.numerics,
            exact_terms=size * case.k,
            double_buffer=case.double_buffer,
            transport=case.transport,
            grad_divisor=size * case.k,
        )
        if disturbance.delays is not None and rank in (disturbance.late or range(size)):
            stack.enter_context(delayed(rank, disturbance.delays, model, optimizer))
        order = random.Random(100 + rank)
        bits = Evidence()
        for step in range(STEPS):
            bits.losses.append([])
            for index in range(case.k):
                for unit in model.units if disturbance.shuffled else ():
                    order.shuffle(unit.order)  # type: ignore[arg-type] # which every unit has
                generator = torch.Generator().manual_seed(100 * step + 10 * index + rank)
                wrapped.set_model_auto_sync(index == case.k - 1)
                loss = wrapped(torch.randn(2, 12, generator=generator)).square().mean()
                bits.losses[-1].append(loss.item())
                loss.backward()
            bits.norms.append(float(wrapped.clip_grad_norm_(0.5)))
            optimizer.step()
            optimizer.zero_grad()
        bits.weights[STEPS] = dict(wrapped.full_weights())
        wrapped.close()
    return bits


def disturbed(rank: int, size: int, trials: list[Trial]) -> list[list[str]]:
    """Of each trial what differs from the same training without a disturbance."""
    calm = {case: run_one(rank, size, case, NONE) for case in dict.fromkeys(case for _, case, _ in trials)}
    return [differences(run_one(rank, size, case, disturbance), calm[case]) for _, case, disturbance in trials]


@once
def found(trials: tuple[Trial, ...]) -> dict[Trial, tuple[list[str], ...]]:
    """Trial -> what each rank found, of trials of one number of ranks."""
    size = trials[0][0]
    return dict(zip(trials, zip(*run_ranks(disturbed, size, size, list(trials)), strict=True), strict=True))


@pytest.mark.parametrize("trial", TRIALS.params())
def test_disturbances_change_no_bit(trial: Trial) -> None:
    assert found(TRIALS.batch(trial))[trial] == ([],) * trial[0]


# -- engines that rely on luck -----------------------------------------------------------------------------------------


@contextmanager
def reads_without_being_told() -> Iterator[None]:
    known: dict[tuple[int, int, int], list[int]] = {}
    advance = Shared._advance

    def hasty(self: Shared, work: Work) -> None:
        for peer in work.missing:
            key = peer, work.kind, sum(each.nbytes for each in work.like[peer])
            offer = self._offers.setdefault((work.number, peer), known.get(key, []))
            if offer:
                known[key] = offer
            else:
                del self._offers[work.number, peer]
        advance(self, work)

    with mock.patch.object(Shared, "_advance", hasty):
        yield


SHARED, MESSAGES = TRANSPORTS
ZERO2 = Case("optim_grads", "fast", 1, MESSAGES)
SLIPS = slips(
    """
    poison: frees before others have taken; shown by poison
        shm.transfer.Work.is_done: property(lambda self: not self.missing)
    delays of collectives: sums before all has come; shown by delays of collectives
        fsdp.comm.reduction.Reduction.fold: exchange.pending.wait()
            => vars(self).setdefault("kept", []).append(exchange)
    delays between replicas: sums before all has come; shown by delays between replicas
        fsdp.comm.reduction.Reduction.fold: exchange.pending.wait()
            => vars(self).setdefault("kept", []).append(exchange)
    readiness: is over at the last parameter; shown by readiness
        fsdp.runtime.units.Readiness.is_over: property(lambda self: id(self.params[0]) in self._arrived)
    """
)
MUTANTS: dict[str, tuple[str, Callable[[], Any], Case, Disturbance]] = {
    "delays of updates": (
        "reads without being told; shown by delays of updates",
        reads_without_being_told,
        Case("optim", "fast", 1, SHARED),
        Disturbance(delays=6, late=(1,)),
    )
} | {
    name: (SLIPS[name].breaks, SLIPS[name].patched, case, by)
    for name, case, by in (
        ("poison", Case("optim_grads", "fast", 2, SHARED), Disturbance(delays=4, late=(1,), poisoned=True)),
        ("delays of collectives", ZERO2, Disturbance(delays=5, late=(1,))),
        # of two ranks each is a replica: only the outer axis sends
        ("delays between replicas", replace(ZERO2, outer="optim"), Disturbance(delays=5, late=(1,))),
        ("readiness", ZERO2, Disturbance(shuffled=True)),
    )
}


def mutated(rank: int, size: int, name: str, is_disturbed: bool = True) -> list[str]:
    _, patch, case, by = MUTANTS[name]
    calm = run_one(rank, size, case, NONE)
    with patch():
        return differences(run_one(rank, size, case, by if is_disturbed else NONE), calm)


@pytest.mark.parametrize("name", each("The engine, by other timing", ((n, m[0]) for n, m in MUTANTS.items())))
def test_an_engine_that_relies_on_luck_is_caught(name: str) -> None:
    try:
        told = run_ranks(mutated, 2, 2, name)
    except Exception as error:  # a crash or a refusal catches it as well
        print(name, str(error)[-300:])
        return
    print(name, told)
    assert any(told)


def test_without_the_disturbance_luck_holds() -> None:
    """The others race undisturbed as well, and win or lose."""
    assert run_ranks(mutated, 2, 2, "readiness", False) == [[], []]
