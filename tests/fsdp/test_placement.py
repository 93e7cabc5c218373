"""The tables of placements: what follows from them, that nothing else tells strategies apart."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from fractions import Fraction

import pytest

from harness.fsdp import Placements
from harness.fsdp.options import OuterStrategy, Strategy
from harness.fsdp.storage.placement import (
    ON_INNER,
    ON_OUTER,
    OPERATIONS,
    PARTIAL,
    REPLICATE,
    SHARD,
    WHOLE,
    Step,
    route,
)
from tests.support.mutants import each_found_by

ALL = [Placements.of(inner, outer) for inner in Strategy for outer in ON_OUTER]


def told(steps: tuple[Step, ...]) -> str:
    return ", ".join(f"{step.operation.value} {step.axis.name}" for step in steps)


def test_every_strategy_and_buffer_has_a_placement() -> None:
    assert list(ON_INNER) == list(Strategy)
    assert list(ON_OUTER) == [None, *OuterStrategy]
    assert {len(row) for row in (*ON_INNER.values(), *ON_OUTER.values())} == {len(fields(Placements))}
    for placed in ALL:
        assert placed.optimizer_state == placed.main_weights == placed.main_grads, "what the optimizer steps lies alike"


@pytest.mark.parametrize("placed", ALL, ids=str)
def test_a_route_ends_where_it_was_to_end_step_by_step(placed: Placements) -> None:
    for start, end in itertools.permutations(
        {getattr(placed, each.name) for each in fields(placed)} - {placed.compute_weights}, 2
    ):
        try:
            steps = route(start, end)
        except KeyError:
            assert PARTIAL in end, "only the terms of a sum cannot be had again"
            continue
        for before, after in itertools.pairwise(steps):
            taken = [a for a, b in zip(before.after, after.before, strict=True) if a is not b]
            assert all(each is REPLICATE for each in taken), "between two operations at most a chunk is taken"
        assert not steps or steps[-1].after in (end, end._replace(inner=SHARD)), told(steps)
        for step in steps:
            changed = [(a, b) for a, b in zip(step.before, step.after, strict=True) if a is not b]
            assert [OPERATIONS[each] for each in changed] == [step.operation], "one operation changes one axis"


def test_the_outer_axis_carries_an_inner_share_whatever_the_strategy() -> None:
    for placed in map(replace, ALL):  # whose routes nobody has asked for
        for steps in (placed.reductions[True], placed.install, route(placed.main_weights, WHOLE)):
            for step in steps:
                if step.axis.name == "outer":
                    assert step.share(4, 3) == Fraction(1, 4), (placed, told(steps))


test_a_mutant_is_found = each_found_by(
    "The engine, by its table of placements",
    """
    whole buckets outside: Ranks of one inner group each send all elements over the outer axis
        fsdp.storage.placement.route: if now.inner is REPLICATE: => if False:
    terms outside: The outer axis adds up what the inner one has not summed
        fsdp.storage.placement.route: if now.inner is PARTIAL and end.inner is not PARTIAL: => if False:
    from the start: A step forgets what the one before it has done on the other axis
        fsdp.storage.placement.route: now, now._replace => now, start._replace
    the other axis: What a collective carries is read of its own axis
        fsdp.storage.placement.Step.share: self.axis is Axis.inner => self.axis is Axis.outer
    the other size: What the outer axis carries is divided by its own size
        fsdp.storage.placement.Step.share: self.after.inner, inner_size => self.after.inner, outer_size
    """,
    test_a_route_ends_where_it_was_to_end_step_by_step,
    test_the_outer_axis_carries_an_inner_share_whatever_the_strategy,
)
