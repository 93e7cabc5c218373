"""Where each buffer lies on each axis of ranks, and the operation of each change of placement. Torch-free.

[Note: Placement] Everything that differs between strategies is read from the two tables here: allocation, collectives
and their order, bytes sent and kept, and the tables of docs/engine.md. Words are those of `torch.distributed.tensor`:
*Replicate*: every rank of the axis has all elements. *Shard*: each has its own. *Partial*: each has a term of a sum.
*Gathered* is Shard between uses, and Replicate while a unit is in use ("unshard" and "reshard").

[Note: Outer once] Ranks form a grid, inner x outer (outer may be 1), and the outer axis is the slow one. Where inner
ranks have the same elements, each sends its inner share over the outer axis, and shares are gathered on the inner axis.
So each element goes over the outer axis once, 1/inner of a bucket a rank. An all-reduce is therefore a reduce-scatter
and an all-gather, with the outer axis in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cache, cached_property
from typing import NamedTuple

from harness.fsdp.options import OuterStrategy, Strategy


class Placement(Enum):
    REPLICATE = "Replicate"
    SHARD = "Shard"
    PARTIAL = "Partial"
    GATHERED = "Gathered"

    __hash__ = object.__hash__  # Enum's own is written in Python, and the tables are asked for every bucket of a step

    @property
    def at_rest(self) -> Placement:
        return Placement.SHARD if self is Placement.GATHERED else self


REPLICATE, SHARD, PARTIAL, GATHERED = Placement


class Axis(Enum):
    """Inner: the ranks that share one sharded copy of a model. Outer: the ranks at one place of different copies."""

    inner = "inner"
    outer = "outer"

    __hash__ = object.__hash__


class Operation(Enum):
    all_gather = "all_gather"
    reduce_scatter = "reduce_scatter"
    all_reduce = "all_reduce"
    chunk = "chunk"


ON_INNER: Mapping[Strategy, tuple[Placement, ...]] = {
    #                             compute    main       unreduced accumulated main       optimizer
    #                             weights    weights    gradients gradients   gradients  state
    Strategy.no_shard: (REPLICATE, REPLICATE, PARTIAL, PARTIAL, REPLICATE, REPLICATE),
    Strategy.optim: (REPLICATE, SHARD, PARTIAL, PARTIAL, SHARD, SHARD),
    Strategy.optim_grads: (REPLICATE, SHARD, PARTIAL, SHARD, SHARD, SHARD),
    Strategy.optim_grads_params: (GATHERED, SHARD, PARTIAL, SHARD, SHARD, SHARD),
}

ON_OUTER: Mapping[OuterStrategy | None, tuple[Placement, ...]] = {
    None: (REPLICATE, REPLICATE, REPLICATE, REPLICATE, REPLICATE, REPLICATE),
    OuterStrategy.no_shard: (REPLICATE, REPLICATE, PARTIAL, PARTIAL, REPLICATE, REPLICATE),
    OuterStrategy.optim: (REPLICATE, SHARD, PARTIAL, PARTIAL, SHARD, SHARD),
}
"""Placement of each buffer (in the order of `Placements`) on the outer axis; None: no such axis, or one rank on it."""

OPERATIONS: Mapping[tuple[Placement, Placement], Operation] = {
    (SHARD, REPLICATE): Operation.all_gather,
    (PARTIAL, SHARD): Operation.reduce_scatter,
    (PARTIAL, REPLICATE): Operation.all_reduce,
    (REPLICATE, SHARD): Operation.chunk,
}


class On(NamedTuple):
    inner: Placement
    outer: Placement

    def share(self, inner_size: int, outer_size: int) -> Fraction:
        inner = inner_size if self.inner.at_rest is SHARD else 1
        return Fraction(1, inner * (outer_size if self.outer.at_rest is SHARD else 1))


WHOLE = On(REPLICATE, REPLICATE)


@dataclass(frozen=True)
class Step:
    axis: Axis
    operation: Operation
    before: On
    after: On

    def share(self, inner_size: int, outer_size: int) -> Fraction:
        other, size = (self.after.outer, outer_size) if self.axis is Axis.inner else (self.after.inner, inner_size)
        return Fraction(1, size if other is SHARD else 1)


@cache
def route(start: On, end: On) -> tuple[Step, ...]:
    """Operations from `start` to `end`, in order; see [Note: Outer once]. Chunks are left out. Raises KeyError where
    none leads there."""
    steps: list[Step] = []
    now = start

    def go(axis: Axis, target: Placement) -> None:
        nonlocal now
        before, now = now, now._replace(**{axis.value: target})
        if (held := getattr(before, axis.value)) is not target and OPERATIONS[held, target] is not Operation.chunk:
            steps.append(Step(axis, OPERATIONS[held, target], before, now))

    if now.inner is PARTIAL and end.inner is not PARTIAL:
        go(Axis.inner, SHARD)
    if now.outer is not end.outer:
        if now.inner is REPLICATE:
            go(Axis.inner, SHARD)
        if now.outer is PARTIAL:
            go(Axis.outer, SHARD)
        go(Axis.outer, end.outer)
    go(Axis.inner, end.inner)
    return tuple(steps)


@dataclass(frozen=True)
class Placements:
    compute_weights: On
    main_weights: On
    unreduced_grads: On
    accumulated_grads: On
    main_grads: On
    optimizer_state: On

    @classmethod
    def of(cls, strategy: Strategy, outer: OuterStrategy | None) -> Placements:
        """Placements of a trained bucket. outer: None where there is no outer axis of more than one rank."""
        return cls(*(On(*each) for each in zip(ON_INNER[strategy], ON_OUTER[outer], strict=True)))

    @cached_property
    def resting_weights(self) -> On:
        return On(self.compute_weights.inner.at_rest, self.compute_weights.outer.at_rest)

    @property
    def resting_weights_are_kept(self) -> bool:
        return self.compute_weights.inner is not GATHERED or self.resting_weights != self.main_weights

    @property
    def accumulates_locally(self) -> bool:
        return self.unreduced_grads == self.accumulated_grads

    @property
    def unshard(self) -> tuple[Step, ...]:
        return route(self.resting_weights, WHOLE)

    @cached_property
    def install(self) -> tuple[Step, ...]:
        return route(self.main_weights, self.resting_weights)

    @cached_property
    def reductions(self) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """Operations of a backward inside `no_sync`, and of the one that ends a step."""
        each = route(self.unreduced_grads, self.accumulated_grads)
        return each, each + route(self.accumulated_grads, self.main_grads)

    @cached_property
    def reduces_once(self) -> bool:
        return bool(route(self.accumulated_grads, self.main_grads))
