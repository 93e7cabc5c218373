"""Under numerics=exact a training has one set of bits, whoever runs it: every strategy, mesh, unit size and split.

Twelve microbatches a step, of one sequence each, are dealt to 1, 2, 3, 4 or 6 ranks, on one axis or on two, and run on
`single` too. Losses by global microbatch, norms and all weights must be equal to the last bit; the gradient too.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from tests.fsdp.trial import Case, Record, run_cases
from tests.support.spawn import run_ranks

M = 12
STEPS = 3
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
WORLDS = (1, 2, 3, 4, 6)
OUTER = {4: (2,), 6: (2, 3)}
UNITS = ((), (("unit_min_elements", 1 << 30),))
TRAININGS = tuple(itertools.product(("tiny", "odd"), ("sgd", "adamw"), (None, 0.5)))


def case(training: tuple[str, str, float | None], strategy: str, world: int, **more: object) -> Case:
    model, optimizer, clip = training
    k = M // world
    return Case("native", strategy, world, k, M, optimizer, clip, numerics="exact", steps=STEPS, model=model, **more)  # type: ignore[arg-type]


def cases(world: int) -> list[Case]:
    """Every training, strategy and mesh of a world; unit sizes alternate, so that both are met with everything.

    Six ranks take their time on two cores: every other of their cases, so that every two of the three still meet.
    """
    meshes = [(1, "no_shard"), *itertools.product(OUTER.get(world, ()), ("no_shard", "optim"))]
    found = itertools.product(enumerate(TRAININGS), enumerate(STRATEGIES), enumerate(meshes))
    return [
        case(training, strategy, world, outer=outer, outer_strategy=split, options=UNITS[(i + k) % 2])
        for (i, training), (j, strategy), (k, (outer, split)) in found
        if world < 6 or (i + j + k) % 2
    ]


def alone(training: tuple[str, str, float | None]) -> Case:
    model, optimizer, clip = training
    return Case("single", "no_shard", 1, M, M, optimizer, clip, numerics="exact", steps=STEPS, model=model)


@cache
def references() -> dict[tuple[str, str, float | None], Record]:
    return dict(zip(TRAININGS, run_ranks(run_cases, 1, [alone(each) for each in TRAININGS])[0], strict=True))


@cache
def records(world: int) -> dict[Case, list[Record]]:
    """Case -> its record on each rank."""
    todo = cases(world)
    per_rank = run_ranks(run_cases, world, todo)
    return {case: [ran[index] for ran in per_rank] for index, case in enumerate(todo)}


def difference(ours: list[Record], reference: Record) -> str:
    """What differs first, or nothing."""
    first = ours[0]
    for step in range(STEPS):
        if [loss for rank in ours for loss in rank.losses[step]] != reference.losses[step]:
            return f"losses of step {step + 1}"
        if step == 0:
            for name, gradient in reference.gradients.items():
                if not torch.equal(gradient, first.gradients[name]):
                    return f"gradient of {name}"
        if first.norms[step] != reference.norms[step]:
            return f"norm of step {step + 1}: {first.norms[step]!r}, not {reference.norms[step]!r}"
        for name, weight in reference.weights.get(step + 1, {}).items():
            if not torch.equal(weight, first.weights[step + 1][name]):
                return f"{name} after step {step + 1}"
    return ""


@pytest.mark.parametrize("world", WORLDS)
def test_bits_do_not_depend_on_who_trains(world: int) -> None:
    found = {str(case): difference(each, references()[case.model, case.optimizer, case.clip])
             for case, each in records(world).items()}  # fmt: skip
    wrong = {name: what for name, what in found.items() if what}
    assert not wrong, f"{len(wrong)} of {len(found)} differ: " + "; ".join(
        f"{w}: {n}" for n, w in list(wrong.items())[:5]
    )


def test_other_sums_have_other_bits() -> None:
    """If plain fp32 sums agreed too, the test above could not tell."""
    fast = Case("native", "optim", 3, 4, M, "adamw", 0.5, numerics="fast", steps=STEPS)
    ran = run_ranks(run_cases, 3, [fast])
    assert difference([each[0] for each in ran], references()["tiny", "adamw", 0.5])
