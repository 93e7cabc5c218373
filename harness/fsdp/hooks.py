"""Hooks that tell the pipelines where the model is. They decide nothing but what has begun and what has ended.

[Note: When a unit's backward ends] All its gradients have been accumulated, and the backward has passed the unit's
inputs (so that no operation in it still needs the weights, frozen ones included). The second half is seen by an
identity inserted on the inputs; autograd runs it after everything else in the unit. What neither sign reaches (unused
units, outputs that no loss depends on) is settled when the whole backward ends, by a callback of the autograd engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from harness.fsdp.gather import GatherPipeline
from harness.fsdp.reduce import ReducePipeline
from harness.fsdp.units import Unit


class Phase(Enum):
    """What the model is doing."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()


class HookDriver:
    """Installs the hooks of one model and drives its two pipelines.

    Args:
        units: in forward order, the root first.
        before_backward: called once as each backward begins; may raise.
        should_reduce: asked once as each backward ends: does it reduce, under strategies that may wait.
    """

    def __init__(
        self,
        units: list[Unit],
        gather: GatherPipeline,
        reduce: ReducePipeline,
        *,
        before_backward: Callable[[], None],
        should_reduce: Callable[[], bool],
    ) -> None:
        self.units = units
        self.gather = gather
        self.reduce = reduce
        self.phase = Phase.IDLE
        self._before_backward = before_backward
        self._should_reduce = should_reduce
        self._reduces = False
        self.failed = False
        """The last backward raised, and its gradients are worth nothing until they are forgotten."""
        self._handles: list[Any] = []
        for unit in units:
            self._install(unit)

    def _install(self, unit: Unit) -> None:
        for bucket in unit.trainable:
            for index, (_, param) in enumerate(bucket.params):
                hook = partial(self._gradient_arrived, unit, bucket, index)
                self._handles.append(param.register_post_accumulate_grad_hook(hook))
        before = self._before_root if unit.is_root else partial(self._before_unit, unit)
        after = self._after_root if unit.is_root else partial(self._after_unit, unit)
        self._handles.append(unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._handles.append(unit.module.register_forward_hook(after))

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def recover(self) -> None:
        """Settle a backward that raised: autograd then never tells that it ended."""
        if self.phase is not Phase.BACKWARD or torch._C._current_graph_task_id() != -1:
            return
        self.gather.release_all()
        self.reduce.end_backward(reduce=False)
        self.reduce.drain()
        for unit in self.units:
            for bucket in unit.buckets:
                bucket.discard_unreduced()
        self._forget_backward()
        self.failed = True

    # -- forward -------------------------------------------------------------------------------------------------

    def _before_root(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.recover()
        if self.phase is Phase.BACKWARD:
            return
        if self.phase is Phase.FORWARD:  # a forward that raised left it so
            self.gather.release_all()
        for unit in self.units:
            for bucket in unit.buckets:
                bucket.check_untouched()
        self.phase = Phase.FORWARD
        self.gather.begin_forward()

    def _after_root(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.phase is Phase.BACKWARD:
            return
        leaves = _tensors_with_grad(output)
        self.gather.end_forward(backward_follows=bool(leaves))
        self.phase = Phase.IDLE
        self._watch_backward(self.units[0], leaves)

    def _before_unit(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.gather.request(unit)
        if self.phase is Phase.BACKWARD or not torch.is_grad_enabled():
            return None
        inputs = [*_direct_tensors(args), *_direct_tensors(tuple(kwargs.values()))]
        if not inputs:
            return None
        unit.open_calls += 1
        # torch leaves Function.apply unannotated
        passed: tuple[Tensor, ...] = _PassedInputs.apply(  # type: ignore[no-untyped-call]
            partial(self._passed_inputs, unit), *inputs
        )
        following = iter(passed)
        return _replaced(args, following), {key: _replaced((v,), following)[0] for key, v in kwargs.items()}

    def _after_unit(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if self.phase is Phase.BACKWARD:
            return
        leaves = _tensors_with_grad(output)
        self._watch_backward(unit, leaves)
        if unit is not self.gather.last or not leaves:
            self.gather.release(unit)

    def _watch_backward(self, unit: Unit, leaves: list[Tensor]) -> None:
        if leaves:
            begin = partial(self._before_unit_backward, unit)
            torch.autograd.graph.register_multi_grad_hook(leaves, begin, mode="any")

    # -- backward ------------------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        self.recover()
        if self.phase is Phase.BACKWARD:
            return
        self._before_backward()
        self.phase = Phase.BACKWARD
        self._reduces = self._should_reduce()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self.gather.begin_backward()
        self.gather.request(self.units[0])
        self.reduce.prepare(self.units[0])

    def _before_unit_backward(self, unit: Unit, gradient: Tensor) -> None:
        self._begin_backward()
        self.gather.request(unit)
        if not self.reduce.is_done_with(unit):
            self.reduce.prepare(unit)

    def _passed_inputs(self, unit: Unit) -> None:
        unit.open_calls = max(0, unit.open_calls - 1)
        if unit.open_calls == 0:
            self._end_unit(unit)

    def _gradient_arrived(self, unit: Unit, bucket: Any, index: int, param: nn.Parameter) -> None:
        self._begin_backward()
        if self.reduce.is_done_with(unit):
            raise RuntimeError(
                f"a gradient of {bucket.params[index][0]} arrived after unit {unit.name} was reduced; parameters used"
                " outside their unit's forward must belong to the root (leave the class out of the unit list)"
            )
        if bucket.grad_bucket is None:  # nothing told that this unit's backward began
            self.reduce.prepare(unit)
        bucket.adopt_gradient(index)
        unit.arrived.add(id(param))
        if unit.open_calls == 0 and len(unit.arrived) == unit.num_trainable:
            self._end_unit(unit)

    def _end_unit(self, unit: Unit) -> None:
        if unit.is_root:
            return
        self.gather.release(unit)
        if self._reduces and unit.trainable and not self.reduce.is_done_with(unit):
            self.reduce.mark_ready(unit)

    def _end_backward(self) -> None:
        self.gather.end_backward()
        self.reduce.end_backward(reduce=self._reduces)
        self._forget_backward()

    def _forget_backward(self) -> None:
        for unit in self.units:
            unit.open_calls = 0
            unit.arrived.clear()
        self.phase = Phase.IDLE


class _PassedInputs(torch.autograd.Function):
    """Identity on a unit's inputs whose backward says that the unit's backward has passed them."""

    @staticmethod
    def forward(ctx: Any, notify: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.notify = notify
        ctx.set_materialize_grads(False)  # an input without a gradient must not get a zero one
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.notify()
        return (None, *gradients)


def _direct_tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    """Tensors with gradients among arguments and in tuples of them; lists, dicts and objects keep their identity."""
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad:
            yield value
        elif type(value) is tuple:
            yield from _direct_tensors(value)


def _replaced(values: tuple[Any, ...], tensors: Iterator[Tensor]) -> tuple[Any, ...]:
    """The same arguments with `tensors` in the places `_direct_tensors` found."""
    return tuple(
        next(tensors)
        if isinstance(value, Tensor) and value.requires_grad
        else _replaced(value, tensors)
        if type(value) is tuple
        else value
        for value in values
    )


def _tensors_with_grad(output: Any) -> list[Tensor]:
    """Tensors with gradients anywhere in an output: nested containers, and dataclasses."""
    found = []
    for value in tree_flatten(output)[0]:
        if isinstance(value, Tensor):
            found += [value] if value.requires_grad else []
        elif is_dataclass(value) and not isinstance(value, type):
            found += _tensors_with_grad([getattr(value, each.name) for each in fields(value)])
    return found
