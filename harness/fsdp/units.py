"""Modules to units, parameters to buckets: who is gathered, reduced and released together.

A unit is the outermost module of a listed class. Everything that lies in no unit, or in several (tied weights), belongs
to the root unit, which is gathered before the forward begins and stays until the backward ends. Within a unit,
parameters are apart by compute dtype and by whether they are trained: each such set is one bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from harness.fsdp.buffer import Bucket, BucketKey
from harness.fsdp.labels import Label
from harness.fsdp.readiness import Readiness

ROOT = "(root)"
"""Name of the root unit; no module path looks like it."""


@dataclass(eq=False)
class UnitPlan:
    """One unit before it has storage: its module, and its parameters by bucket under their first names in the model."""

    name: str
    module: nn.Module
    buckets: dict[BucketKey, list[tuple[str, nn.Parameter]]] = field(default_factory=dict)


@dataclass(eq=False)
class Unit:
    """A unit at work. Its place in the list of units is its place in every order of collectives."""

    name: str
    module: nn.Module
    buckets: list[Bucket]
    readiness: Readiness = field(init=False)

    def __post_init__(self) -> None:
        self.readiness = Readiness([param for bucket in self.trainable for _, param in bucket.params])

    @property
    def is_root(self) -> bool:
        """Whether this is the unit of everything that lies in no other."""
        return self.name == ROOT

    def labels(self, kind: str) -> list[Label]:
        """Of the collectives of this kind that move it."""
        return [Label(kind, bucket.name) for bucket in self.buckets]

    @property
    def trainable(self) -> list[Bucket]:
        """Buckets that get gradients."""
        return [bucket for bucket in self.buckets if bucket.trainable]


def plan_units(module: nn.Module, unit_classes: Sequence[type[nn.Module]]) -> list[UnitPlan]:
    """Assign every parameter to a unit: the root first, then units in definition order; empty ones are left out.

    Raises:
        ValueError: a module holds no parameter at all, or a parameter is not floating point.
    """
    plans = {id(module): UnitPlan(ROOT, module)}
    homes: dict[nn.Parameter, tuple[str, set[int]]] = {}
    _visit(module, "", id(module), tuple(unit_classes), plans, homes, set())
    for param, (name, units) in homes.items():
        if not param.dtype.is_floating_point:
            raise ValueError(f"parameter {name} has dtype {param.dtype}; only floating-point parameters can be sharded")
        home = next(iter(units)) if len(units) == 1 else id(module)
        key = BucketKey(param.dtype, param.requires_grad)
        plans[home].buckets.setdefault(key, []).append((name, param))
    if not homes:
        raise ValueError(f"{type(module).__name__} has no parameters to shard")
    return [plan for plan in plans.values() if plan.name == ROOT or plan.buckets]


def _visit(
    module: nn.Module,
    path: str,
    unit: int,
    classes: tuple[type[nn.Module], ...],
    plans: dict[int, UnitPlan],
    homes: dict[nn.Parameter, tuple[str, set[int]]],
    seen: set[tuple[int, int]],
) -> None:
    """Walk the module tree and note for each parameter the units it is reached through; `unit` is the enclosing one."""
    root = next(iter(plans))
    if path and unit == root and isinstance(module, classes):
        unit = id(module)
        plans.setdefault(unit, UnitPlan(path, module))
    if (id(module), unit) in seen:
        return
    seen.add((id(module), unit))
    prefix = f"{path}." if path else ""
    for name, param in module.named_parameters(recurse=False):
        homes.setdefault(param, (prefix + name, set()))[1].add(unit)
    for name, child in module.named_children():
        _visit(child, prefix + name, unit, classes, plans, homes, seen)
