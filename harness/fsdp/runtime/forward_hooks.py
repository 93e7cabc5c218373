"""Hooks of a forward: before and after the modules of every unit.

[Note: Methods as forwards] A method such as `generate` runs modules without, or many times over, the model's forward.
`run_as_forward` makes it one forward of the model, through which the root stays whole. Forwards of the model inside it
are sweeps of their own, so that each token's units are fetched ahead; their end releases units and not the root.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from harness.fsdp.guards.sharded_twice import refuse_ddp_around
from harness.fsdp.runtime.backward_hooks import BackwardHooks
from harness.fsdp.runtime.forward import Forward, ForwardState
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.graph import Passed, PassedInputs, direct_tensors, replaced, tensors_with_grad
from harness.fsdp.runtime.handed_on import without_weights
from harness.fsdp.runtime.refusals import refuse_dtensors, refuse_forward_mode, refuse_generator, refuse_transforms
from harness.fsdp.runtime.step import Step
from harness.fsdp.runtime.units import Unit, buckets_of, rest
from harness.fsdp.runtime.weak_hooks import WeakHook
from harness.fsdp.storage import edits
from harness.fsdp.storage.codec import FORWARD
from harness.fsdp.storage.edits import LostEdits
from harness.fsdp.storage.parameter_access import Whereabouts, by_engine


class ForwardHooks:
    """Forward hooks on the modules of all units.

    Args:
        units: in forward order, the root first.
    """

    def __init__(
        self, units: Sequence[Unit], gather: GatherPipeline, step: Step, forward: Forward, backward: BackwardHooks
    ) -> None:
        self.units = units
        self.gather = gather
        self.step = step
        self.forward = forward
        self.backward = backward
        self.before_gradients: Callable[[], None] = lambda: None
        self.before_forward: Callable[[], None] = lambda: None
        self.whereabouts = Whereabouts(units[0].modules[0])
        self.lost_edits = LostEdits(next(buckets_of(units)).memory.device)
        self.handles: list[RemovableHandle] = []
        params = (param for bucket in buckets_of(units) for _, param in bucket.params)
        self._takes_dtensors = any(isinstance(param, DTensor) for param in params)
        self._passed: dict[str, list[Passed | None]] = {unit.name: [] for unit in units}
        self._inputs_passed = {unit.name: WeakHook(backward.inputs_passed, unit) for unit in units}
        self._num_updates = 0
        for unit in units:
            self._install(unit)

    def _install(self, unit: Unit) -> None:
        before = WeakHook(self._root_pre_forward) if unit.is_root else WeakHook(self._pre_forward, unit)
        after = WeakHook(self._root_post_forward) if unit.is_root else WeakHook(self._post_forward, unit)
        left = WeakHook(self._forward_left, unit)
        for module in unit.modules:
            self.handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self.handles.append(module.register_forward_hook(after))
            self.handles.append(module.register_forward_hook(left, always_call=True))

    def _root_pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.backward.recover()
        if self.step.in_backward:
            return
        if not self._takes_dtensors:
            refuse_dtensors(args, kwargs)
        if self.forward.in_model:  # see [Note: Methods as forwards]
            self.forward.depth += 1
            self.forward.with_gradients = torch.is_grad_enabled()
        else:
            self._begin_forward(with_gradients=torch.is_grad_enabled())
        self.gather.pre_forward()
        if self.lost_edits.looks:
            self.lost_edits.note(self.units[0].buckets)

    def _begin_forward(self, *, with_gradients: bool) -> None:
        self.step.check_installed()
        if self.forward.state is not ForwardState.IDLE:  # one that raised left weights unsharded
            self.gather.reshard_all()
        rest(self.units[:1])  # unsharded since a forward that no backward followed
        if with_gradients:
            refuse_transforms()
            refuse_ddp_around(self.units[0].modules[0])
            self.before_gradients()
        if with_gradients or self.gather.order:
            refuse_forward_mode()
        if self.step.num_updates != self._num_updates:
            self._num_updates = self.step.num_updates
            for unit in self.units:
                unit.readiness.forget_unseen()
        self.check_module()
        self.before_forward()
        for bucket in self.units[0].buckets:
            bucket.receive()
        self._take_up_weights()
        may_look = with_gradients and not self.gather.holds
        self.lost_edits.begin(buckets_of(self.units), self.step.num_updates, may_look=may_look)
        self.forward.pre_forward(with_gradients=with_gradients)  # last: what raises above leaves no forward begun

    @by_engine
    def _take_up_weights(self) -> None:
        for bucket in buckets_of(self.units):
            bucket.views.check_untouched()
            if not self.gather.holds:  # which takes edits itself, from all ranks at once
                edits.refuse_lost(bucket)
            bucket.use()

    def check_module(self) -> None:
        """Raise RuntimeError for a parameter that was added, replaced, moved or cast."""
        for bucket in buckets_of(self.units):
            if (sharded := bucket.views.sharded()) is not None:
                sharded.check()
        self.whereabouts.check()

    def _root_post_forward(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        if self.step.in_backward:
            return output
        output = self._own(self.units[0], output)
        leaves, number = tensors_with_grad(output), self.forward.number
        inside = self.forward.depth > 0
        if self.lost_edits.looks and not inside:
            self.lost_edits.end()
        self.gather.post_forward(backward_follows=bool(leaves) or self.forward.made_nodes, inside=inside)
        if not inside:
            for bucket in buckets_of(self.units):
                bucket.receive()
            self.forward.post_forward()
        self.backward.watch_outputs(self.units[0], leaves, forward=number)
        return output

    def run_as_forward(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method that runs parts of the module; see [Note: Methods as forwards]. *Collective.*"""
        self.backward.recover()
        if self.forward.in_model or self.step.in_backward:
            return method(*args, **kwargs)
        root = self.units[0]
        if torch.is_grad_enabled():
            refuse_transforms()
            self.before_gradients()
        self._begin_forward(with_gradients=False)  # units called right here are not hidden from autograd's graph
        try:
            self.gather.pre_forward()
            output = self._root_post_forward(None, args, method(*args, **kwargs))
        finally:
            self._forward_left(root, None, args, None)
        return output

    def _pre_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.gather.unshard(unit, FORWARD)
        with_gradients = torch.is_grad_enabled()
        if self.step.in_backward:
            if with_gradients:
                unit.readiness.note_recomputation()
            return None
        self.forward.running.add(unit.name)
        hidden, number = self.forward.hides(with_gradients=with_gradients), self.forward.number
        unit.readiness.note_call(hidden=hidden, forward=number)
        if self.lost_edits.looks:
            self.lost_edits.note(unit.buckets)
        self._passed[unit.name].append(None)
        if with_gradients:
            return self._watch_inputs(unit, number, args, kwargs)
        unit.readiness.begin_call()
        return None

    def _watch_inputs(self, unit: Unit, forward: int, args: Any, kwargs: Any) -> Any:
        inputs = [*direct_tensors(args), *direct_tensors(tuple(kwargs.values()))]
        if not inputs:
            unit.readiness.begin_call()
            return None
        refuse_transforms()
        passed: tuple[Tensor, ...] = PassedInputs.apply(  # type: ignore[no-untyped-call] # torch leaves it unannotated
            self._inputs_passed[unit.name], *inputs
        )
        node = passed[0].grad_fn
        unit.readiness.begin_call(node, forward)
        self._passed[unit.name][-1] = Passed(inputs, passed, node)
        following = iter(passed)
        return replaced(args, following), {key: replaced((v,), following)[0] for key, v in kwargs.items()}

    def _forward_left(self, unit: Unit, module: nn.Module | None, args: Any, output: Any) -> None:
        if not self.step.in_backward:
            if self._passed[unit.name]:
                self._passed[unit.name].pop()
            unit.readiness.end_call()
            if not self._passed[unit.name]:
                self.forward.left(unit.name)
            if unit.is_root and not self.forward.in_model:
                self._rest(raised=sys.exc_info()[1] is not None)

    def _rest(self, *, raised: bool) -> None:
        stays = self.forward.with_gradients and not raised
        rest(self.units[1:] if stays else self.units)
        for bucket in self.units[0].buckets if stays else ():
            if (sharded := bucket.views.sharded()) is not None:
                sharded.count_edits()

    def break_off(self) -> None:
        """Reset after a forward that was interrupted without its hooks."""
        if self.step.in_backward:
            return
        for unit in self.units:
            while self._passed[unit.name]:
                self._forward_left(unit, None, (), None)
        self.forward.depth = 0
        self._forward_left(self.units[0], None, (), None)

    def _post_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> Any:
        if self.step.in_backward:
            return output
        output = self._own(unit, output)
        leaves = tensors_with_grad(output)
        calls = self._passed[unit.name]
        if passed := calls[-1]:
            leaves += passed.take_edits(unit.name)
        self.backward.watch_outputs(unit, leaves, unit.readiness.call)
        if not leaves and torch.is_grad_enabled() and unit.readiness.call.is_unseen:
            self._keep_unseen(unit)
        is_over = module is unit.modules[-1] and len(calls) == 1  # it may be called in its own forward
        if is_over and self.lost_edits.looks:
            self.lost_edits.check(unit.buckets)
        if is_over and (unit is not self.gather.last or not leaves):
            self.gather.reshard_after_forward(unit)
        return output

    def _own(self, unit: Unit, output: Any) -> Any:
        """Output with copies of weights that are about to be released.

        Raises:
            RuntimeError: the call has assigned `data` of a parameter, which is lost then.
        """
        if isinstance(output, GeneratorType) and any(bucket.views.is_sharded for bucket in unit.buckets):
            refuse_generator(unit.name)
        released = [bucket for bucket in unit.buckets if not bucket.is_resident]
        for bucket in released:
            bucket.views.check_untouched()
        return without_weights(output, [bucket.compute for bucket in released], unit.name) if released else output

    def _keep_unseen(self, unit: Unit) -> None:
        """Keep a unit unsharded whose inputs and outputs no hook can see."""
        unit.readiness.note_unseen()
        if unit.shares_buffers and not self.gather.is_resident(unit):
            raise RuntimeError(
                f"unit {unit.name} takes and gives its tensors where no hook could see them (attributes, closures,"
                " objects of other kinds): its weights must stay until the backward, and double_buffer=True has no room"
                " for that. Pass tensors as arguments and results (in tuples, lists, dicts, dataclasses), or use"
                " double_buffer=False; what needs no gradient belongs under torch.no_grad()"
            )
        self.gather.keep(unit)
