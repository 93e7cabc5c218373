"""Hooks that tell the pipelines where the model is. They decide nothing but what has begun and what has ended.

[Note: When a unit's backward ends] When everything has come that `harness.fsdp.runtime.readiness` says is due. What
never comes (an undefined gradient, a call nobody differentiates) is settled when the whole backward ends, by a callback
of the autograd engine.

[Note: What the hooks cannot see] A unit may hand tensors on where no hook finds them: in an attribute, a closure, an
object of its own. Its backward may then begin before a hook tells so. For this reason the next unit of the sweep is
unsharded as soon as one is over, not only when a gradient comes to its outputs; a unit of which neither inputs nor
outputs can be seen stays whole from its forward on; and what arrives from a unit whose weights were not whole is
refused, because what came of it is wrong.

[Note: Backwards inside a forward] `autograd.grad` or `backward` in the model's own forward would release weights that
the rest of the forward needs, and reduce gradients of half a model. The engine refuses it, as it refuses create_graph:
a second differentiation would need weights that are released by then.

[Note: Methods as forwards] A method such as `generate` runs modules without, or many times over, the model's forward.
`run_as_forward` makes it one forward of the model, through which the root stays whole. Forwards of the model inside it
are sweeps of their own, so that each token's units are fetched ahead; their end releases units and not the root.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.fsdp.guards.nonfinite import GradientGuard
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.graph import (
    ABOVE_ALL,
    BackwardEnd,
    PassedInputs,
    could_reach,
    direct_tensors,
    number_of,
    replaced,
    tensors_with_grad,
)
from harness.fsdp.runtime.readiness import Call
from harness.fsdp.runtime.reduce import ReducePipeline
from harness.fsdp.runtime.refusals import (
    refuse_backward,
    refuse_dtensors,
    refuse_late_gradient,
    refuse_layout,
    refuse_unfrozen,
    unfrozen_too_late,
)
from harness.fsdp.runtime.step import Forward, ForwardState, Step
from harness.fsdp.runtime.units import Unit
from harness.fsdp.runtime.weak_hooks import WeakHook
from harness.fsdp.storage.bucket import Bucket
from harness.fsdp.storage.gradients import MAIN_GRADIENT, Gradients
from harness.fsdp.storage.parameter_access import by_engine, grad_of


class HookDriver:
    """Installs the hooks of one model and drives its two pipelines.

    Args:
        units: in forward order, the root first.
        step: asked as each backward begins what it is to do; told when it ends.
        guard: told when a backward begins; None: nobody looks for gradients that are not finite.
    """

    def __init__(
        self,
        units: list[Unit],
        gather: GatherPipeline,
        reduce: ReducePipeline,
        step: Step,
        guard: GradientGuard | None = None,
    ) -> None:
        self.units = units
        self.gather = gather
        self.reduce = reduce
        self.step = step
        self.guard = guard
        self.forward = Forward(units[0].name)
        self._end: Callable[[], BackwardEnd | None] = lambda: None
        """What the autograd engine holds as long as the backward that began last runs."""
        self._backward_of = units[0].name
        """The unit whose backward began last."""
        self._entered: set[Unit] = set()
        """Units of which only the order of nodes tells when they are over; see [Note: Sequence numbers]."""
        self._number = ABOVE_ALL
        """What the backward has come to."""
        self._coming: list[tuple[int, Unit]] = []
        """Calls it is to come to, each with the number it began at: the next one last."""
        self._handles: list[Any] = []
        self._params: set[int] = set()
        self.before_gradients: Callable[[], None] = lambda: None
        """Called before every forward of the model with gradients."""
        for unit in units:
            self._install(unit)

    def _install(self, unit: Unit) -> None:
        for bucket in unit.trainable:
            self._watch_gradients(unit, bucket)
        before = WeakHook(self._root_pre_forward) if unit.is_root else WeakHook(self._pre_forward, unit)
        after = WeakHook(self._root_post_forward) if unit.is_root else WeakHook(self._post_forward, unit)
        left = WeakHook(self._forward_left, unit)
        for module in unit.modules:
            self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after))
            self._handles.append(module.register_forward_hook(left, always_call=True))

    def _watch_gradients(self, unit: Unit, bucket: Bucket) -> None:
        gradients = bucket.gradients
        assert gradients is not None
        for index, (name, param) in enumerate(bucket.params):
            self._params.add(id(param))
            frozen = not param.requires_grad
            param.requires_grad_()  # torch hangs hooks on no other
            hook = WeakHook(self._gradient_arrived, unit, gradients, index, name)
            self._handles.append(param.register_post_accumulate_grad_hook(hook))
            setattr(param, MAIN_GRADIENT, WeakHook(self._main_gradient, unit, gradients, index))
            param.requires_grad_(not frozen)

    @by_engine
    def take_in(self, buckets: Sequence[Bucket]) -> None:
        """Further buckets get gradients. No backward may be running."""
        taken = {id(bucket) for bucket in buckets}
        for unit in self.units:
            unit.readiness.params = [param for bucket in unit.trainable for _, param in bucket.params]
            for bucket in unit.trainable:
                if id(bucket) in taken:
                    self._watch_gradients(unit, bucket)

    @property
    def is_installed(self) -> bool:
        """Whether hooks are on."""
        return bool(self._handles)

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def recover(self) -> None:
        """Settle a backward that raised: autograd then never tells that it ended, but drops what it was to call."""
        runs = torch._C._current_graph_task_id() != -1 and self._end() is not None
        if runs or not self.step.in_backward:
            return
        self._entered.clear()
        self.gather.reshard_all()
        self.reduce.post_backward(reduce=False)
        self.reduce.discard()
        for unit in self.units:
            for gradients in unit.gradients:
                gradients.discard()
            unit.readiness.post_backward()
        self._rest()
        self.step.fail()

    def where(self) -> str:
        """Where the program is, for whoever looks from another thread."""
        if self.step.in_backward:
            return f"in the backward of {self._backward_of}"
        running, root = tuple(self.forward.running), self.units[0].name
        if running:
            return f"in the forward of {', '.join(name for name in running if name != root) or root}"
        return "outside the model's forward and backward"

    # -- forward -------------------------------------------------------------------------------------------------

    def _root_pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.recover()
        if self.step.in_backward:
            return
        refuse_dtensors(args, kwargs)
        if self.forward.in_model:  # see [Note: Methods as forwards]
            self.forward.depth += 1
            self.forward.with_gradients = torch.is_grad_enabled()
        else:
            self._begin_forward(with_gradients=torch.is_grad_enabled())
        self.gather.pre_forward()

    def _begin_forward(self, *, with_gradients: bool) -> None:
        self.step.check_installed()
        if self.forward.state is not ForwardState.IDLE:  # one that raised left weights unsharded
            self.gather.reshard_all()
        if with_gradients:
            self.before_gradients()
        for bucket in self._buckets():
            bucket.check_untouched()
            if not self.gather.holds:  # which takes edits itself, from all ranks at once
                bucket.adopt_edits()
                bucket.check_unedited()
            bucket.use()
        self.forward.pre_forward(with_gradients=with_gradients)

    def _buckets(self) -> Iterator[Bucket]:
        return (bucket for unit in self.units for bucket in unit.buckets)

    def _rest(self) -> None:
        for bucket in self._buckets():
            bucket.rest()

    def _root_post_forward(self, module: nn.Module | None, args: Any, output: Any) -> None:
        if self.step.in_backward:
            return
        leaves = tensors_with_grad(output)
        inside = self.forward.depth > 0
        self.gather.post_forward(backward_follows=bool(leaves) or inside or self.forward.made_nodes)
        if not inside:
            self.forward.post_forward()
        self._watch_backward(self.units[0], leaves)

    def run_as_forward(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the module that runs parts of it; see [Note: Methods as forwards]. *Collective.*"""
        self.recover()
        if self.forward.in_model or self.step.in_backward:
            return method(*args, **kwargs)
        root = self.units[0]
        self._begin_forward(with_gradients=False)  # units called right here are not hidden from autograd's graph
        try:
            self.gather.pre_forward()
            output = method(*args, **kwargs)
            self._root_post_forward(None, args, output)
        finally:
            self._forward_left(root, None, args, None)
        return output

    def _pre_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.gather.unshard(unit)
        with_gradients = torch.is_grad_enabled()
        if self.step.in_backward:
            if with_gradients:
                unit.readiness.note_recomputation()
            return None
        self.forward.running.add(unit.name)
        unit.readiness.note_call(hidden=self.forward.hides(with_gradients=with_gradients))
        if with_gradients:
            return self._watch_inputs(unit, args, kwargs)
        unit.readiness.begin_call()
        return None

    def _watch_inputs(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        inputs = [*direct_tensors(args), *direct_tensors(tuple(kwargs.values()))]
        if not inputs:
            unit.readiness.begin_call()
            return None
        passed: tuple[Tensor, ...] = PassedInputs.apply(  # type: ignore[no-untyped-call] # torch leaves it unannotated
            WeakHook(self._passed_inputs, unit), *inputs
        )
        unit.readiness.begin_call(passed[0].grad_fn)
        following = iter(passed)
        return replaced(args, following), {key: replaced((v,), following)[0] for key, v in kwargs.items()}

    def _forward_left(self, unit: Unit, module: nn.Module | None, args: Any, output: Any) -> None:
        """A forward is over, also by an exception."""
        if not self.step.in_backward:
            self.forward.left(unit.name)
            unit.readiness.end_call()
            if unit.is_root and not self.forward.in_model:
                self._rest()

    def _post_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if self.step.in_backward:
            return
        leaves = tensors_with_grad(output)
        self._watch_backward(unit, leaves, unit.readiness.call)
        if not leaves and torch.is_grad_enabled() and unit.readiness.call.is_unseen:
            self._keep_unseen(unit)
        if module is unit.modules[-1] and (unit is not self.gather.last or not leaves):
            self.gather.reshard_after_forward(unit)

    def _keep_unseen(self, unit: Unit) -> None:
        """What a unit took and gave lies where no hook finds it; see [Note: What the hooks cannot see]."""
        unit.readiness.note_unseen()
        if unit.shares_buffers and not self.gather.is_resident(unit):
            raise RuntimeError(
                f"unit {unit.name} takes and gives its tensors where no hook could see them (attributes, closures,"
                " objects of other kinds): its weights must stay until the backward, and double_buffer=True has no room"
                " for that. Pass tensors as arguments and results (in tuples, lists, dicts, dataclasses), or use"
                " double_buffer=False; what needs no gradient belongs under torch.no_grad()"
            )
        self.gather.keep(unit)

    def _watch_backward(self, unit: Unit, leaves: list[Tensor], call: Call | None = None) -> None:
        """Have autograd tell when the first gradient comes to one of these outputs of a call, or of the model."""
        if leaves:
            newest = max(number_of(each) for each in leaves)
            hook = WeakHook(self._pre_backward, unit, call, newest, self.step.num_updates)
            torch.autograd.graph.register_multi_grad_hook(leaves, hook, mode="any")

    # -- backward ------------------------------------------------------------------------------------------------

    def _root_pre_backward(self) -> None:
        """The first thing that any hook of a backward does; further calls do nothing."""
        self.recover()
        if self.step.in_backward:
            return
        self._refuse_unsupported()
        self._number = ABOVE_ALL
        for unit in self.units:
            unit.readiness.pre_backward()
        coming = ((begin, unit) for unit in self.units for begin in unit.readiness.due_numbers)
        self._coming = sorted(coming, key=lambda each: each[0])
        is_due = any(unit.readiness.is_due for unit in self.units)
        self.step.pre_backward(of_inputs=not is_due and could_reach(self._params))
        end = BackwardEnd(self._root_post_backward)
        self._end = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        if self.guard is not None:
            self.guard.begin_backward()
        for bucket in self._buckets():
            bucket.use()
        self.gather.pre_backward()
        self.gather.unshard(self.units[0])
        self.reduce.expect(self.units[0])
        for unit in self.units:
            if unit.readiness.is_unused:
                self._post_backward(unit)
        self._unshard_next()

    def _refuse_unsupported(self) -> None:
        """Raise for a backward that cannot be right; its step has failed, for it may have left a gradient already."""
        late = unfrozen_too_late(self._buckets())
        if late is not None:
            self.step.fail()
            refuse_unfrozen(late)
        if self.forward.running or torch.is_grad_enabled():
            self.step.fail()
            refuse_backward(self.forward.running, self.units[0].name)

    def _pre_backward(self, unit: Unit, call: Call | None, newest: int, num_updates: int, gradient: Tensor) -> None:
        """The first gradient of a call's outputs is here.

        Args:
            call: of the unit; None: the model's.
            newest: highest number of the nodes that made the outputs.
            num_updates: of the weights, when these were computed.
        """
        self.step.check_forward(num_updates)
        self._root_pre_backward()
        self._pass_to(newest)
        self._backward_of = unit.name
        if call is not None:
            unit.readiness.enter(call)
            self._note_entered(unit)
        self.gather.unshard(unit)
        if not self.reduce.is_done_with(unit):
            self.reduce.expect(unit)

    def _pass_to(self, number: int) -> None:
        """Autograd has come to a node of this number: end the units which that passes."""
        self._number = min(self._number, number)
        for unit in list(self._entered):
            unit.readiness.pass_to(number)
            if not unit.readiness.is_entered:
                self._entered.discard(unit)
                self._call_passed(unit)

    def _note_entered(self, unit: Unit) -> None:
        if unit.readiness.is_entered:
            self._entered.add(unit)

    def _call_passed(self, unit: Unit) -> None:
        self._end_if_over(unit)
        if unit.readiness.is_resting and not self.reduce.is_done_with(unit):
            self.gather.rest(unit)
            self._unshard_next()

    def _end_if_over(self, unit: Unit) -> None:
        if unit.readiness.is_over and not unit.is_root:
            self._post_backward(unit)
            self._unshard_next()

    def _unshard_next(self) -> None:
        """Have the unit whole that the backward comes to next; see [Note: What the hooks cannot see]."""
        while self._coming and self._coming[-1][0] > self._number:
            self._coming.pop()
        self.gather.unshard_next(self._coming[-1][1] if self._coming else None)

    def _refuse_sharded(self, unit: Unit, what: str) -> None:
        if unit.is_root or self.gather.is_whole(unit) or self.reduce.is_done_with(unit):
            return
        raise RuntimeError(
            f"{what} came from unit {unit.name} while its weights were sharded, so it is wrong: a backward reached the"
            " unit through a tensor that no hook could see (in an attribute, a closure, an object of another kind)."
            " Return such tensors from the unit's forward: in tuples, lists, dicts, dataclasses, or what pytree knows"
        )

    def _passed_inputs(self, unit: Unit, node: Any) -> None:
        self._root_pre_backward()
        self._refuse_sharded(unit, "a gradient of its inputs")
        unit.readiness.note_passed(node)
        self._pass_to(node._sequence_nr())
        self._call_passed(unit)

    def _gradient_arrived(self, unit: Unit, gradients: Gradients, index: int, name: str, param: nn.Parameter) -> None:
        self._root_pre_backward()
        if not param.requires_grad:  # frozen since the forward: torch calls, and has brought nothing
            return
        if self.reduce.is_done_with(unit):
            refuse_late_gradient(name, unit.name)
        self._refuse_sharded(unit, f"a gradient of {name}")
        refuse_layout(name, grad_of(param))
        if not gradients.is_prepared:  # the first of this backward
            self.reduce.prepare(unit)
        gradients.adopt(index)
        unit.readiness.note_gradient(param)
        unit.readiness.enter_unseen(self._number)
        self._note_entered(unit)
        self._end_if_over(unit)

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
        self._root_pre_backward()
        if not gradients.is_prepared:
            self.reduce.prepare(unit)
        unit.readiness.note_written(gradients.params[index])
        return gradients.written_by(index)

    def _post_backward(self, unit: Unit) -> None:
        """A unit needs its weights no more, and its gradients are complete; the root's end with the backward."""
        if unit.is_root:
            return
        self.gather.reshard(unit)
        if self.step.plan.reduce_units and unit.trainable and not self.reduce.is_done_with(unit):
            self.reduce.mark_ready(unit)

    def _root_post_backward(self) -> None:
        """The whole backward has ended: the autograd engine calls back."""
        self._entered.clear()
        for unit in self.units:
            self.gather.reshard(unit)
        self.reduce.post_backward(reduce=self.step.plan.reduce_units)  # before waiting: [Note: Who waits for whom]
        self.gather.post_backward()
        for unit in self.units:
            unit.readiness.post_backward()
        self._rest()
        self.step.post_backward()
