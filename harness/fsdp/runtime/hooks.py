"""Hooks that tell the pipelines where the model is. They decide nothing but what has begun and what has ended.

[Note: When a unit's backward ends] When everything has come that `harness.fsdp.runtime.readiness` says is due. What
never comes (an undefined gradient, a call nobody differentiates) is settled when the whole backward ends, by a callback
of the autograd engine.

[Note: Backwards inside a forward] `autograd.grad` or `backward` in the model's own forward would release weights that
the rest of the forward needs, and reduce gradients of half a model. The engine refuses it, as it refuses create_graph:
a second differentiation would need weights that are released by then.
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

from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.reduce import ReducePipeline
from harness.fsdp.runtime.units import Unit
from harness.fsdp.storage.gradients import Gradients


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
        rhythm: asked once as each backward begins: whether units are handed to the reductions as they end, and whether
            this backward ends the step's accumulation.
    """

    def __init__(
        self,
        units: list[Unit],
        gather: GatherPipeline,
        reduce: ReducePipeline,
        *,
        before_backward: Callable[[], None],
        rhythm: Callable[[], tuple[bool, bool]],
    ) -> None:
        self.units = units
        self.gather = gather
        self.reduce = reduce
        self.phase = Phase.IDLE
        self._before_backward = before_backward
        self._rhythm = rhythm
        self._reduces = False
        self.failed = False
        """The last backward raised, and its gradients are worth nothing until they are forgotten."""
        self._backward_of = units[0].name
        """The unit whose backward began last."""
        self._running: set[str] = set()
        """Units in whose forward the program is; recomputations during a backward are left out."""
        self._with_gradients = False
        """Whether the model's forward was called with gradients on."""
        self._handles: list[Any] = []
        for unit in units:
            self._install(unit)

    def _install(self, unit: Unit) -> None:
        for bucket, gradients in zip(unit.trainable, unit.gradients, strict=True):
            for index, (name, param) in enumerate(bucket.params):
                hook = partial(self._gradient_arrived, unit, gradients, index, name)
                self._handles.append(param.register_post_accumulate_grad_hook(hook))
                param.get_main_grad = partial(self._main_gradient, unit, gradients, index)  # type: ignore[attr-defined]
        before = self._before_root if unit.is_root else partial(self._before_unit, unit)
        after = self._after_root if unit.is_root else partial(self._after_unit, unit)
        left = partial(self._left, unit)
        for module in unit.modules:
            self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after))
            self._handles.append(module.register_forward_hook(left, always_call=True))

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
        self.reduce.discard()
        for unit in self.units:
            for gradients in unit.gradients:
                gradients.discard()
        self._forget_backward()
        self.failed = True

    def where(self) -> str:
        """Where the program is, for whoever looks from another thread."""
        if self.phase is Phase.FORWARD:
            inner = [name for name in tuple(self._running) if name != self.units[0].name]
            return f"in the forward of {', '.join(inner) or self.units[0].name}"
        if self.phase is Phase.BACKWARD:
            return f"in the backward of {self._backward_of}"
        return "outside the model's forward and backward"

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
        self._running = {self.units[0].name}
        self._with_gradients = torch.is_grad_enabled()
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
        with_gradients = torch.is_grad_enabled()
        if self.phase is Phase.BACKWARD:
            if with_gradients:
                unit.readiness.note_recomputation()
            return None
        self._running.add(unit.name)
        hidden = self.phase is Phase.FORWARD and self._with_gradients and not with_gradients
        unit.readiness.note_call(hidden=hidden)
        return self._watch_inputs(unit, args, kwargs) if with_gradients else None

    def _watch_inputs(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        inputs = [*_direct_tensors(args), *_direct_tensors(tuple(kwargs.values()))]
        if not inputs:
            return None
        # torch leaves Function.apply unannotated
        passed: tuple[Tensor, ...] = _PassedInputs.apply(  # type: ignore[no-untyped-call]
            partial(self._passed_inputs, unit), *inputs
        )
        unit.readiness.watch(passed[0].grad_fn)
        following = iter(passed)
        return _replaced(args, following), {key: _replaced((v,), following)[0] for key, v in kwargs.items()}

    def _left(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        """A forward is over, also by an exception."""
        if self.phase is not Phase.BACKWARD:
            self._running.discard(unit.name)

    def _after_unit(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if self.phase is Phase.BACKWARD:
            return
        leaves = _tensors_with_grad(output)
        self._watch_backward(unit, leaves)
        if module is unit.modules[-1] and (unit is not self.gather.last or not leaves):
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
        self._refuse_unsupported()
        try:
            self._before_backward()
        except BaseException:  # the gradient that announced this backward may have been added to finished sums
            self.failed = True
            raise
        self.phase = Phase.BACKWARD
        self._reduces, is_last = self._rhythm()
        self.reduce.begin_backward(is_last=is_last)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        for unit in self.units:
            unit.readiness.begin_backward()
        self.gather.begin_backward()
        self.gather.request(self.units[0])
        self.reduce.expect(self.units[0])
        for unit in self.units:
            if unit.readiness.is_unused:
                self._end_unit(unit)

    def _refuse_unsupported(self) -> None:
        """Raise for a backward that cannot be right; its step has failed, for it may have left a gradient already."""
        if not self._running and not torch.is_grad_enabled():
            return
        self.failed = True
        if self._running:
            where = "the model" if self.units[0].name in self._running else ", ".join(sorted(self._running))
            raise RuntimeError(
                f"a backward (autograd.grad or backward) reached sharded units inside the forward of {where}; weights"
                " that the rest of the forward needs would be released. Differentiate after the model's forward"
            )
        raise NotImplementedError(
            "create_graph=True (differentiating a backward) is not built: weights are released when a unit's backward"
            " ends, and its gradient leaves for the reduction; only create_graph=False is accepted"
        )

    def _before_unit_backward(self, unit: Unit, gradient: Tensor) -> None:
        self._begin_backward()
        self._backward_of = unit.name
        self.gather.request(unit)
        if not self.reduce.is_done_with(unit):
            self.reduce.expect(unit)

    def _passed_inputs(self, unit: Unit, node: Any) -> None:
        self._begin_backward()
        unit.readiness.note_passed(node)
        if unit.readiness.is_over:
            self._end_unit(unit)

    def _gradient_arrived(self, unit: Unit, gradients: Gradients, index: int, name: str, param: nn.Parameter) -> None:
        self._begin_backward()
        if self.reduce.is_done_with(unit):
            raise RuntimeError(
                f"a gradient of {name} arrived after unit {unit.name} was reduced: it came from a"
                " backward inside the backward that nothing announced; let the parameters that reentrant activation"
                " checkpointing hides belong to the root (leave the class out of the unit list), or use_reentrant=False"
            )
        if not gradients.is_prepared:  # the first of this backward
            self.reduce.prepare(unit)
        gradients.adopt(index)
        unit.readiness.note_gradient(param)
        if unit.readiness.is_over:
            self._end_unit(unit)

    def _main_gradient(self, unit: Unit, gradients: Gradients, index: int) -> Tensor:
        """What `param.get_main_grad()` gives to a kernel that adds a weight's gradient itself.

        Flat storage in the parameter's shape and in the dtype its gradients wait in. The kernel adds to it, within the
        backward, and gives autograd no gradient for that weight; or a stand-in, and says so by setting
        `param.grad_added_to_main_grad` (TransformerEngine's way).

        Raises:
            NotImplementedError: under grad_buffer=concat there is no such place.
        """
        if gradients.concat:
            raise NotImplementedError("get_main_grad needs grad_buffer=flat: under concat no flat gradient exists yet")
        self._begin_backward()
        if not gradients.is_prepared:
            self.reduce.prepare(unit)
        unit.readiness.note_written(gradients.params[index])
        return gradients.written_by(index)

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
            unit.readiness.end_backward()
        self.phase = Phase.IDLE


class _PassedInputs(torch.autograd.Function):
    """Identity on a unit's inputs whose backward says that the unit's backward has passed them."""

    @staticmethod
    def forward(ctx: Any, notify: Callable[[Any], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.notify = notify
        ctx.set_materialize_grads(False)  # an input without a gradient must not get a zero one
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.notify(ctx)
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
