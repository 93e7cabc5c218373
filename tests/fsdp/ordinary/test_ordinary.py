"""Programs drawn at random end right or in a refusal by name: never silently wrong, never hanging, ranks never part.

A few that hold every value of every axis run in `make test`, 500 in `make test-all`. A failure
prints its program. ORDINARY=17:18 runs number 17 alone, ORDINARY=2000 so many; both with `-m 'full or not full'`.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from tests.fsdp.checked import BROKEN, areas_of
from tests.fsdp.ordinary.judging import Verdict, judge
from tests.fsdp.ordinary.program import AXES, COUNT, FOUND, Program, covering_seeds, draw
from tests.fsdp.ordinary.running import Outcome, Trained, attempt, reference, run
from tests.fsdp.ordinary.source import text_of
from tests.fsdp.pairs import STRATEGIES
from tests.support.covering import BATCH, once
from tests.support.mutants import slips

ASKED = os.environ.get("ORDINARY", str(COUNT))
SEEDS = range(*map(int, ASKED.split(":"))) if ":" in ASKED else range(int(ASKED))
FEW = [seed for seed in covering_seeds() if seed in SEEDS]
PARAMS = [pytest.param(seed, marks=() if seed in FEW else pytest.mark.full) for seed in SEEDS]


def attempt_and_reference(rank: int, program: Program) -> Any:
    """A rank's outcome; and on the rank whose turn it is, one process's, which the other rank does not wait for."""
    outcome = attempt(rank, program)
    return outcome, reference(program) if isinstance(outcome, Trained) and rank == program.seed % 2 else None


@once
def verdicts(seeds: tuple[int, ...]) -> dict[int, Verdict]:
    programs = [draw(seed) for seed in seeds]
    return {p.seed: _verdict(p, ranks) for p, ranks in zip(programs, run(attempt_and_reference, programs), strict=True)}


def _verdict(program: Program, ranks: list[Any]) -> Verdict:
    outcomes: list[Outcome] = [each[0] if isinstance(each, tuple) else each for each in ranks]
    right = [each[1] for each in ranks if isinstance(each, tuple) and each[1]]
    return judge(program, outcomes, lambda: right[0])


@cache
def alike(seed: int) -> tuple[int, ...]:
    """Seeds that run in one go with this one: all covering ones, or some of the others."""
    seeds = FEW if seed in FEW else [each for each in SEEDS if each not in FEW]
    begin = seeds.index(seed) // BATCH * BATCH
    return tuple(seeds[begin : begin + BATCH])


@pytest.mark.parametrize("seed", PARAMS)
def test_a_program_ends_right_or_is_refused_by_name(seed: int) -> None:
    found = verdicts(alike(seed))[seed]
    repeat = f"ORDINARY={seed}:{seed + 1} python -m pytest {__file__} -m 'full or not full' -k ends_right"
    assert found.kind in ("right", "refused"), f"{found.sentence}\n{text_of(draw(seed))}# {repeat}"


# -- the programs are worth running ------------------------------------------------------------------------------------


def test_few_programs_hold_every_value() -> None:
    held = {value for program in map(draw, covering_seeds()) for value in program.values}
    assert not {(axis, value) for axis, values in AXES.items() for value in values} - held
    loops = {(p.strategy, p.loop) for p in map(draw, covering_seeds())}
    assert loops == set(itertools.product(STRATEGIES, AXES["loop"]))


def test_many_programs_are_right() -> None:
    """Else the generator would show little; what covers rare values is refused more often than what is drawn."""
    found = Counter(verdicts(alike(seed))[seed].kind for seed in FEW)
    if len(SEEDS) == COUNT:
        assert found["right"] > 0.4 * sum(found.values()), found


# -- what was found ----------------------------------------------------------------------------------------------------


@once
def found_again() -> dict[str, Verdict]:
    ran = run(attempt_and_reference, list(FOUND.values()))
    return {name: _verdict(program, ranks) for (name, program), ranks in zip(FOUND.items(), ran, strict=True)}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_wrong_once_is_right(name: str) -> None:
    assert found_again()[name] == Verdict("right"), text_of(FOUND[name])


# -- mutants -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """breaks: the mistake. patch: makes it. programs: of which one is to find it. area: in the ledger."""

    breaks: str
    patch: Callable[[], Any]
    programs: list[Program]
    area: str = "Ordinary programs"


def few(shows: Callable[[Program], bool], most: int = 3) -> list[Program]:
    """Some of the programs that always run."""
    return [p for p in map(draw, covering_seeds()) if shows(p)][:most]


def _trains_all(program: Program) -> bool:
    return program.freezing == "nothing" and program.clip in ("nothing", "ours")


PROGRAMS = {name: [program] for name, program in FOUND.items()} | {
    "tied": few(lambda p: p.tied and _trains_all(p)),
    "unused": few(lambda p: "DroppedTogether" in p.pieces or "InTurns" in p.pieces),
}
MUTANTS = {
    name: Mutant(slip.breaks, slip.patched, PROGRAMS[programs], *area)
    for name, (slip, programs, *area) in slips(
        r"""
    tied counts twice: The gradient of a weight with two names counts twice
        fsdp.storage.gradients.Gradients.copy_in: self._unwritten.discard(index)
            => self._unwritten -= {index}\n    self._views[index].mul_(1 + ("embed.w" in str(self.layout.slots[index])))
        tied
    unused is stepped: Decay and momentum move a parameter that got no gradient
        fsdp.runtime.gradient_sync.Usage.find: lambda *_: 0
        unused
    the root comes last: A backward gathers the root after the units, where a forward in between has resharded it
        fsdp.runtime.gather.GatherPipeline.pre_backward: self._begin(
            => order = [*reversed(self.order)]\n    self._begin(
        a forward between forward and backward, where ranks use different units
    order is not asked: A unit whose inputs no hook sees is released when its last gradient has come
        fsdp.runtime.units.Readiness.is_over: self.due or self.inside or => self.due or
        weights of a unit whose inputs no hook sees
        Hidden tensors
    unseen units are released: A unit of which neither inputs nor outputs can be seen is taken for one that is passed
        fsdp.runtime.backward_hooks.BackwardHooks._post_backward: not unit.readiness.is_blind => True
        a unit that takes and gives objects
        Hidden tensors
    resting units stay: A unit between two of its calls in one backward keeps the buffer that another one needs
        fsdp.runtime.backward_hooks.BackwardHooks._call_passed: if not (unit => if not (unit.name or unit
        two calls of each unit in a double buffer
        Hidden tensors
        """
    ).items()
}


def attempt_mutant(rank: int, case: tuple[str, Program]) -> Any:
    with MUTANTS[case[0]].patch():
        return attempt_and_reference(rank, case[1])


@once
def mutated() -> dict[str, list[Verdict]]:
    cases = [(name, program) for name, mutant in MUTANTS.items() for program in mutant.programs]
    ran = list(zip(cases, run(attempt_mutant, cases, patience=5), strict=True))
    return {name: [_verdict(p, ranks) for (n, p), ranks in ran if n == name] for name in MUTANTS}


@pytest.mark.parametrize("name", areas_of(MUTANTS))
def test_a_planted_fault_is_found(name: str) -> None:
    wrong = [verdict.sentence for verdict in mutated()[name] if verdict.kind == "wrong"]
    assert wrong
    assert not [told for told in wrong if any(broken in told for broken in BROKEN)], "no mutant"
