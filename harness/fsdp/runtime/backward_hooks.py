"""Hooks of a backward: on parameters, on the outputs of calls and on their inputs.

A unit's backward ends when everything has come that `harness.fsdp.runtime.units` says is due. What never comes (an
undefined gradient, a call nobody differentiates) is settled when the whole backward ends.

A unit may hand tensors on where no hook finds them: in an attribute, a closure, an object of its own. Its backward may
then begin before a hook tells so. For this reason the next unit of the sweep is unsharded as soon as one is over, not
only when a gradient comes to its outputs; and what arrives from a unit whose weights were not whole is refused.

Of a unit whose calls are all passed, gradients may still come: autocast's copy of a weight may have been made before
the call, in an evaluation say, and what is behind it needs no weights. They are taken.

`autograd.grad` or `backward` in the model's own forward would release weights that the rest of the forward needs. The
engine refuses it, as it refuses create_graph: a second differentiation would need weights that are released by then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.reduce import ReducePipeline
from harness.fsdp.runtime.units import (
    NUMBERS,
    Call,
    Unit,
    WeakHook,
    begin_backward,
    buckets_of,
    could_reach,
    due_among,
)
from harness.fsdp.storage.at_rest import location_of
from harness.fsdp.storage.gradients import Gradients
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.parameter_access import by_engine, grad_of, put_grad
from harness.private_torch import at_end_of_backward, running_node, without_torch_function


class BackwardHooks:
    """Hooks of a backward, on parameters and on inputs and outputs of units; they drive gather and reduce.

    units: in forward order, the root first.
    """

    def __init__(self, units: Sequence[Unit], gather: GatherPipeline, reduce: ReducePipeline) -> None:
        self.units, self.gather, self.reduce = units, gather, reduce
        self.step = reduce.step
        self.before_backward: Callable[[], None] = lambda: None
        self.after_backward: Callable[[], None] = lambda: None
        self.handles: list[RemovableHandle] = []
        self._reached = units[0].name
        self._end: Callable[[], Any] = NoneType  # reference to what ends the backward, which dies with that
        self._entered: set[Unit] = set()  # in a call whose end only the order of nodes tells
        self._rested: set[Unit] = set()
        self._coming: list[tuple[Call, Unit]] = []  # calls that the backward may still pass, the next one last
        for unit in units:
            for bucket in unit.trainable:
                self._watch_gradients(unit, bucket)

    @by_engine
    def _watch_gradients(self, unit: Unit, bucket: ParamGroup) -> None:
        gradients = bucket.gradients
        assert gradients is not None
        for index, (name, param) in enumerate(bucket.params):
            frozen = not param.requires_grad
            param.requires_grad_()  # torch hangs hooks on no other
            hook = WeakHook(self._gradient_arrived, unit, gradients, index, name)
            self.handles.append(param.register_post_accumulate_grad_hook(hook))
            param.requires_grad_(not frozen)

    def recover(self) -> None:
        """Reset after a backward that raised: autograd then calls no end callback."""
        runs = self._end() is not None and running_node() is not None  # here: another thread may let go of it later
        if runs or not self.step.in_backward:
            return
        self._end = NoneType
        self.gather.reshard_all()
        self.reduce.post_backward(reduce=False)
        self.reduce.discard()
        for gradients in (each for unit in self.units for each in unit.gradients):
            gradients.discard()
        self._reset()
        self.step.fail()

    def _reset(self) -> None:
        self._entered.clear()
        self._rested.clear()
        for unit in self.units:
            unit.readiness.post_backward()
        self.gather.rest(self.units)

    def watch_outputs(self, unit: Unit, leaves: list[Tensor], call: Call | None = None, forward: int = 0) -> None:
        """Hook the first gradient of a call's outputs, or of the model's forward of this number.

        A leaf (an input or parameter handed on) is left out: it would keep the hook for ever.
        """
        made = [each for each in leaves if each.grad_fn is not None]
        if not made:
            return
        hook = WeakHook(self._pre_backward, unit, call, forward, next(NUMBERS), self.step.num_updates)
        if len(made) == 1:  # as almost always, and a third of the host's time
            made[0].register_hook(hook)
        else:
            torch.autograd.graph.register_multi_grad_hook(made, hook, mode="any")

    # -- the whole backward ----------------------------------------------------------------------------------------

    def _root_pre_backward(self, forward: int = 0) -> None:
        if self._end() is not None:
            return
        self.recover()
        self._show_own()
        self._refuse_unsupported()
        begin_backward([unit.readiness for unit in self.units], forward)
        coming = [(call, unit) for unit in self.units for call in unit.readiness.due]
        self._coming = sorted(coming, key=lambda each: each[0].begin)
        of_inputs = self._is_of_inputs
        if not of_inputs:
            self.before_backward()
        self.step.pre_backward(of_inputs=of_inputs)
        end = partial(self._root_post_backward)
        self._end = weakref.ref(end)
        at_end_of_backward(end)
        del end  # autograd alone keeps it, as long as the backward runs; the traceback of an error would, too
        for bucket in buckets_of(self.units):
            bucket.use()
        self.gather.pre_backward()
        self.gather.unshard(self.units[0])
        self.reduce.expect(self.units[0])
        for unit in self.units:
            if unit.readiness.is_unused:
                self._post_backward(unit)
        self._unshard_next()

    def _root_post_backward(self) -> None:
        self._end = NoneType
        for unit in self.units:
            self.gather.reshard(unit)
        self.reduce.post_backward(reduce=self.step.plan.reduce_units)  # before waiting: [Note: Who waits for whom]
        self.gather.post_backward()
        self._reset()
        self.step.state = self.step.plan.leads_to
        if not self.step.plan.of_inputs:
            self.after_backward()

    def _show_own(self) -> None:
        for bucket in buckets_of(self.units):
            sharded = bucket.sharded()
            if sharded.shows_unsharded:
                sharded.show(unsharded=True)
            else:
                sharded.sync_flags()

    @property
    def _is_of_inputs(self) -> bool:
        """True for `torch.autograd.grad` of inputs alone.

        Calls hidden by reentrant checkpointing do not count: `autograd.grad` cannot reach through them.
        """
        asked = [unit.readiness for unit in self.units]
        if any(each.is_due for each in asked):
            return False
        hides = any(each.hidden_calls for each in asked)
        params = {id(param) for each in asked for param in (each.trained if hides else each.params)}
        return could_reach(params) or self._is_all_frozen

    @property
    @by_engine
    def _is_all_frozen(self) -> bool:
        return not any(any(bucket.sharded().flags()) for bucket in buckets_of(self.units) if bucket.trainable)

    def _refuse_unsupported(self) -> None:
        """Raise for a backward inside a forward, with create_graph, or through a parameter that was frozen when it
        was sharded."""
        running, late = self.step.running, unfrozen_too_late(self.units)
        if late is None and not running and not torch.is_grad_enabled():
            return
        self.step.fail()
        if late is not None:
            raise RuntimeError(
                f"parameter {late} was frozen when it was sharded and is to be trained now, and has nowhere to put its"
                " gradient: shard with requires_grad=True, and freeze afterwards (requires_grad_(False))"
            )
        if running:
            where = "the model" if self.units[0].name in running else ", ".join(sorted(running))
            raise RuntimeError(
                f"a backward (autograd.grad or backward) reached sharded units inside the forward of {where}; weights"
                " that the rest of the forward needs would be released. Differentiate after the model's forward"
            )
        raise NotImplementedError(
            "create_graph=True (differentiating a backward) is not built: weights are released when a unit's backward"
            " ends, and its gradient leaves for the reduction; only create_graph=False is accepted"
        )

    # -- one unit --------------------------------------------------------------------------------------------------

    def _pre_backward(
        self, unit: Unit, call: Call | None, forward: int, end: int, num_updates: int, gradient: Tensor
    ) -> None:
        """First gradient of a call's outputs. call: None for the model's forward. end: moment when it had ended."""
        is_stale = self._end() is None and any(bucket.is_stale for bucket in buckets_of(self.units))
        self.step.check_forward(num_updates, is_stale=is_stale)
        self._root_pre_backward(forward)
        if self._entered:
            self._pass_to(end)
        self._reached = unit.name
        if call is not None:
            unit.readiness.inside.add(call)
            if call not in unit.readiness.due:
                self._entered.add(unit)
        self.gather.unshard(unit)
        if not self.reduce.is_done_with(unit):
            self.reduce.expect(unit)

    def _end_if_over(self, unit: Unit) -> None:
        if unit.readiness.is_over and not unit.is_root:
            self._post_backward(unit)
            self._unshard_next()

    def _unshard_next(self) -> None:
        if not self.gather.order:
            return
        while self._coming and self._coming[-1][0] not in self._coming[-1][1].readiness.due:
            self._coming.pop()
        self.gather.unshard_next(self._coming[-1][1] if self._coming else None)

    def _inputs_passed(self, unit: Unit, call: Call) -> None:
        self._root_pre_backward()
        self._refuse_sharded(unit, "its inputs")
        unit.readiness.note_passed(call)
        if self._entered:
            self._pass_to(call.begin)
        self._call_passed(unit)

    def _pass_to(self, moment: int) -> None:
        for unit in [each for each in self._entered if each.readiness.pass_to(moment)]:
            self._entered.discard(unit)
            self._call_passed(unit)

    def _call_passed(self, unit: Unit) -> None:
        self._end_if_over(unit)
        if not (unit.readiness.inside or self.reduce.is_done_with(unit)):  # gathered again for its next call
            self.gather.reshard(unit)
            self._rested.add(unit)
            self._unshard_next()

    def _refuse_sharded(self, unit: Unit, of: str) -> None:
        if not (self.gather.is_whole(unit) or unit.is_root or self.reduce.is_done_with(unit)):
            raise RuntimeError(
                f"a gradient of {of} came from unit {unit.name} while its weights were sharded, so it is wrong: a"
                " backward reached the unit through a tensor that no hook could see (in an attribute, a closure, an"
                " object of another kind). Return such tensors from the unit's forward: in tuples, lists, dicts,"
                " dataclasses, or what pytree knows"
            )

    def _gradient_arrived(self, unit: Unit, gradients: Gradients, index: int, name: str, param: nn.Parameter) -> None:
        if self._end() is None:  # nothing told that a backward has begun, and the gradient came before what begins one
            self._begin_with(name, param)
        if not param.requires_grad:  # frozen since the forward: torch calls, and has brought nothing
            return
        if self.reduce.is_done_with(unit):
            raise RuntimeError(
                f"a gradient of {name} arrived after unit {unit.name} was reduced: it came from a backward inside the"
                " backward that nothing announced; let the parameters that reentrant activation checkpointing hides"
                " belong to the root (leave the class out of the unit list), or use_reentrant=False"
            )
        if self.gather.order and not (unit in self._rested and unit.readiness.is_passed):
            self._refuse_sharded(unit, name)
        with without_torch_function():  # as `by_engine`, for one parameter after the other
            if (gradient := grad_of(param)) is not None and gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"the gradient of {name} is {gradient.layout}, and flat buffers hold dense ones alone: call"
                    " embedding() and embedding_bag() with sparse=False"
                )
            if not gradients.is_prepared:  # the first of this backward
                self.reduce.prepare(unit)
            gradients.accumulate(index)
        unit.readiness.note_gradient(param)
        self._end_if_over(unit)

    @by_engine
    def _begin_with(self, name: str, param: nn.Parameter) -> None:
        early, place = grad_of(param), location_of(param)
        if early is not None and place is not None and early is place[0].grads[place[1]]:
            self.step.fail()
            raise RuntimeError(
                f"a gradient of {name} was added to the finished one of an earlier backward, by a backward that no hook"
                " could see (its outputs are in attributes, closures, objects of other kinds): call zero_grad() before"
                " it, or return tensors from the model's forward in tuples, lists, dicts or dataclasses"
            )
        put_grad(param, None)
        self._root_pre_backward()
        param.grad_dtype = None  # it is in that of the weight
        put_grad(param, early)

    def _post_backward(self, unit: Unit) -> None:
        if unit.is_root:
            return
        if not unit.readiness.is_blind:
            self.gather.reshard(unit)
        if not self.step.plan.reduce_units:
            for gradients in unit.gradients:
                gradients.copy_in_waiting()
        elif unit.trainable and not self.reduce.is_done_with(unit):
            self.reduce.mark_ready(unit)


@by_engine
def unfrozen_too_late(units: Sequence[Unit]) -> str | None:
    """A parameter without gradient storage that the running backward would reach."""
    params = (each for bucket in buckets_of(units) if not bucket.trainable for each in bucket.params)
    return next((name for name, param in params if param.requires_grad and due_among([param])), None)
