"""Modules to units with storage: who is gathered, reduced and released together, and who gets which values.

A unit is the outermost module of a listed class. Everything that lies in no unit, or in several (tied weights), belongs
to the root unit, which is gathered before the forward begins and stays until the backward ends. Within a unit,
parameters are apart by compute dtype, by whether they are trained and by whether they are experts': each such set is
one bucket.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from harness.fsdp.runtime.readiness import Readiness
from harness.fsdp.storage.codec import is_marked
from harness.fsdp.storage.memory import BucketMemory
from harness.fsdp.storage.param_group import GroupKey, ParamGroup

ROOT = "(root)"
Members = list[tuple[str, nn.Parameter]]


@dataclass(eq=False)
class UnitPlan:
    name: str
    module: nn.Module
    buckets: dict[GroupKey, Members] = field(default_factory=dict)


class Unit:
    """One unit; its index is its place in every order of collectives."""

    kept_by_engine = True

    def __init__(self, name: str, module: nn.Module, buckets: list[ParamGroup]) -> None:
        self.name, self.is_root, self.is_held = name, name == ROOT, False
        self.buckets = buckets
        self._module = weakref.ref(module)  # see [Note: Who keeps whom]
        # under double_buffer
        self.shares_buffers = not self.is_root and any(bucket.memory.fixed for bucket in buckets)
        self.trainable = [bucket for bucket in self.buckets if bucket.trainable]
        self.gradients = [bucket.gradients for bucket in self.trainable if bucket.gradients is not None]
        self.readiness = Readiness([param for bucket in self.trainable for _, param in bucket.params])

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "an engine does not outlive the module it shards"
        return module

    def receive(self) -> None:
        """Wait for the gather after an update, and show unsharded parameters."""
        for bucket in self.buckets:
            if bucket.awaited:
                bucket.receive()
            bucket.use()


def buckets_of(units: Iterable[Unit]) -> list[ParamGroup]:
    return [bucket for unit in units for bucket in unit.buckets]


def rest(units: Iterable[Unit]) -> None:
    for bucket in buckets_of([unit for unit in units if not unit.is_held]):
        bucket.rest()


def is_expert(param: Tensor) -> bool:
    """Megatron's mark: `param.allreduce` is False; its gradient is reduced over the expert's ranks only."""
    return getattr(param, "allreduce", True) is False


def compiled(module: nn.Module) -> nn.Module:
    """Module inside `torch.compile(module)`. The wrapper is the unit: its hooks run outside compiled code."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # slow to import, and nothing is compiled without it
    if dynamo is None or not isinstance(module, dynamo.OptimizedModule):
        return module
    inside: nn.Module = next(module.children())
    return inside


def build_units(
    plans: Sequence[UnitPlan], make_group: Callable[[str, GroupKey, Members], ParamGroup], memory: BucketMemory
) -> list[Unit]:
    units = []
    for plan in plans:
        with memory.unit(shares=plan.name != ROOT):
            buckets = [make_group(f"{plan.name}/{key.label}", key, members) for key, members in plan.buckets.items()]
        units.append(Unit(plan.name, plan.module, buckets))
    return units


def plan_units(
    module: nn.Module, unit_classes: Sequence[type[nn.Module]], compute: torch.dtype | None = None
) -> list[UnitPlan]:
    """Assign every parameter to a unit: the root, then units in definition order, without empty ones.

    compute: dtype of weights that are not kept in 8 bits; None: the module's.
    """
    plans, classes = {id(module): UnitPlan(ROOT, module)}, tuple(unit_classes)
    homes: dict[nn.Parameter, tuple[str, set[int]]] = {}
    seen: set[tuple[int, int]] = set()

    stack = [(module, "", id(module))]  # no function that calls itself, which would keep the module
    while stack:
        part, path, unit = stack.pop()
        if path and unit == id(module) and isinstance(compiled(part), classes):
            unit = id(part)
            plans.setdefault(unit, UnitPlan(path, part))
        if (id(part), unit) in seen:
            continue
        seen.add((id(part), unit))
        prefix = f"{path}." if path else ""
        for name, param in part.named_parameters(recurse=False):
            homes.setdefault(param, (prefix + name, set()))[1].add(unit)
        stack += [(child, prefix + name, unit) for name, child in reversed([*part.named_children()])]
    for param, (name, units) in homes.items():
        home = next(iter(units)) if len(units) == 1 else id(module)
        key = GroupKey(param.dtype, param.requires_grad, is_expert(param), is_marked(param))
        if compute is not None and not key.fp8 and key.dtype != compute:
            key = replace(key, dtype=compute, stored=None if key.trainable else key.dtype)
        plans[home].buckets.setdefault(key, []).append((name, param))
    return [plan for plan in plans.values() if plan.name == ROOT or plan.buckets]
