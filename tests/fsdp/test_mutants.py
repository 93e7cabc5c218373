"""Our engine with one mistake each, held against one process in fp64: the oracle of test_oracle.py finds all of them.

The mistakes are those that a review of the engine would think of first; each is made by a patch that ranks enter for
one training. `tests/fsdp/behaviours` has more, each found by the check of one behaviour.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from harness.fsdp.comm import reduction
from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.storage.gradients import Gradients
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.update import norms
from harness.shm import transfer
from harness.shm.transfer import sum_in_order
from tests.fsdp.test_oracle import CLIP, check
from tests.fsdp.trial import Case, Record, run_case
from tests.support.covering import once
from tests.support.mutants import each
from tests.support.spawn import run_ranks

RANKS = 2
_sum_in_order, _sum_of_squares = reduction._sum_in_order, norms.sum_of_squares
_sum_scalars = Communicator.sum_scalars


@dataclass(frozen=True)
class Mutant:
    """breaks: the mistake. patch: makes it while it is entered. found: what the oracle says of the training `case`."""

    breaks: str
    patch: Callable[[], Any]
    found: str
    case: Case


def summing(change: Callable[..., dict[str, Any]]) -> Callable[[], Any]:
    """Sums over ranks with other arguments: `change` of `contributions`, `add` and `factor`."""

    def wrong(contributions: list[Tensor], target: Tensor, accum: torch.dtype, **given: Any) -> None:
        arguments = {"contributions": contributions, "factor": 1.0, **given}
        arguments |= change(**arguments)
        _sum_in_order(arguments.pop("contributions"), target, accum, **arguments)

    return lambda: mock.patch.object(reduction, "_sum_in_order", wrong)


def summing_in_memory(change: Callable[[list[Tensor]], list[Tensor]]) -> Callable[[], Any]:
    """Sums of other contributions, of those that lie in shared memory."""

    def wrong(terms: list[Tensor], out: Tensor, dtype: torch.dtype, **given: Any) -> None:
        sum_in_order(change(list(terms)), out, dtype, **given)

    return lambda: mock.patch.object(transfer, "sum_in_order", wrong)


def all_but_the_last(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    return _sum_of_squares(list(tensors)[:-1], device)


def own_norm(self: Communicator, values: Tensor, purpose: str) -> Tensor:
    return values if purpose == "norm" else _sum_scalars(self, values, purpose)


def trained(strategy: str, k: int = 1, clip: float | None = None) -> Case:
    """Plain SGD: it shows the scale of a gradient, which Adam hides."""
    return Case("native", strategy, RANKS, k, optimizer="sgd", clip=clip, steps=3)


def _forgotten(self: ParamGroup) -> None:
    self.installed_version = self.main_version


MUTANTS = {
    "adds over the unreduced": Mutant(
        "A reduced gradient is added to the buffer that held the unreduced one",
        summing(lambda **_: {"add": True}),
        "gradient of",
        trained("optim"),
    ),
    "last microbatch alone": Mutant(
        "Each microbatch's sums replace those of the microbatches before",
        summing(lambda **_: {"add": False}),
        "gradient of",
        trained("optim_grads", k=2),
    ),
    "scales twice": Mutant(
        "Gradients are divided by the number of microbatches twice",
        summing(lambda factor, **_: {"factor": factor * factor}),
        "gradient of",
        trained("optim"),
    ),
    "wrong contribution": Mutant(
        "The first rank's contribution stands for every rank's",
        summing_in_memory(lambda terms: terms[:1] * len(terms)),
        "gradient of",
        trained("optim_grads_params"),
    ),
    "one contribution twice": Mutant(
        "The last rank's contribution counts twice",
        summing_in_memory(lambda terms: [*terms, terms[-1]]),
        "gradient of",
        trained("no_shard"),
    ),
    "weights are not installed": Mutant(
        "The next forward computes with the weights from before the update",
        lambda: mock.patch.object(ParamGroup, "install", _forgotten),
        "gradient norm at step 2|update of",
        trained("optim"),  # no_shard in one dtype computes with its main weights
    ),
    "norm misses a piece": Mutant(
        "The gradient norm leaves out a rank's last piece",
        lambda: mock.patch.object(norms, "sum_of_squares", all_but_the_last),
        "gradient norm at step 1|update of",
        trained("optim", clip=CLIP),
    ),
    "local norm": Mutant(
        "Each rank clips by the norm of what it holds itself",
        lambda: mock.patch.object(Communicator, "sum_scalars", own_norm),
        "gradient norm at step 1|update of",
        trained("optim_grads", clip=CLIP),
    ),
    "gradients are kept": Mutant(
        "Gradients are not forgotten after the update: the next step adds to them",
        lambda: mock.patch.object(Gradients, "forget"),
        "gradient norm at step 2|update of",
        trained("no_shard"),
    ),
}


def visit(rank: int) -> dict[str, tuple[Record | str, float]]:
    """Every mutant's training, or what it raised, and its seconds; and under "" those of the engine as it is."""
    found: dict[str, tuple[Record | str, float]] = {}
    for name, mutant in MUTANTS.items():
        began = time.perf_counter()
        with mutant.patch():
            try:
                answer: Record | str = run_case(rank, mutant.case)
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
        found[name] = answer, time.perf_counter() - began
    return found


def visit_right(rank: int) -> list[Record]:
    return [run_case(rank, case) for case in dict.fromkeys(mutant.case for mutant in MUTANTS.values())]


@once
def mutated() -> dict[str, tuple[Record | str, float]]:
    return run_ranks(visit, RANKS)[0]


@pytest.mark.parametrize("name", each("The engine, by its oracle", ((n, m.breaks) for n, m in MUTANTS.items())))
def test_a_wrong_engine_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    record, seconds = mutated()[name]
    assert not isinstance(record, str), f"it broke off before it was wrong: {record}"
    with pytest.raises(AssertionError, match=MUTANTS[name].found):
        check(record)
    killed_in(seconds)


def test_the_right_one_is_not() -> None:
    for record in run_ranks(visit_right, RANKS)[0]:
        check(record)
