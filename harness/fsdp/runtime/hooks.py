"""All hooks of a sharded model: those of a forward here, those of a backward in the base class.

[Note: Methods as forwards] A method such as `generate` runs modules without, or many times over, the model's forward.
`run_as_forward` makes it one forward of the model, through which the root stays whole. Forwards of the model inside it
are sweeps of their own, so that each token's units are fetched ahead; their end releases units and not the root.

What a module returns may be a weight, or a view of one. Where weights are released after a forward, its storage would
be gone before the caller uses it. A copy takes its place, through which its gradient comes as before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.fsdp.comm.device import DeviceRuntime
from harness.fsdp.runtime.backward_hooks import BackwardHooks
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.reduce import ReducePipeline
from harness.fsdp.runtime.units import Call, PassedInputs, Unit, WeakHook, buckets_of
from harness.fsdp.storage.parameter_access import Whereabouts, by_engine
from harness.private_torch import tree_flatten, tree_leaves, tree_unflatten


class Hooks(BackwardHooks):
    def __init__(self, units: Sequence[Unit], gather: GatherPipeline, reduce: ReducePipeline) -> None:
        super().__init__(units, gather, reduce)
        self.root = units[0]
        self.before_forward: Callable[[], None] = lambda: None
        self.whereabouts: Whereabouts  # once parameters are sharded
        self._depth = 0  # of forwards of the model inside its own, or inside a method
        for unit in units:
            before = WeakHook(self._root_pre_forward if unit.is_root else self._pre_forward, unit)
            after = WeakHook(self._root_post_forward if unit.is_root else self._post_forward, unit)
            self.handles += [
                unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                unit.module.register_forward_hook(after),
                unit.module.register_forward_hook(WeakHook(self._forward_left, unit), always_call=True),
            ]

    @property
    def in_model(self) -> bool:
        """True inside the model's forward, and inside a method run by `run_as_forward`."""
        return self.root.name in self.step.running

    @property
    def is_inside(self) -> bool:
        return bool(self.step.running) or self.step.in_backward

    def where(self) -> str:
        if self.step.in_backward:
            return f"in the backward of {self._reached}"
        running, root = tuple(self.step.running), self.root.name
        if running:
            return f"in the forward of {', '.join(name for name in running if name != root) or root}"
        return "outside the model's forward and backward"

    # -- the model's forward ---------------------------------------------------------------------------------------

    def _root_pre_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.recover()
        if self.step.in_backward:
            return
        with_gradients = torch.is_grad_enabled()
        if self.in_model:  # see [Note: Methods as forwards]
            self._depth += 1
            self.step.with_gradients = with_gradients
        else:
            self._begin_forward(with_gradients=with_gradients)
        self.gather.pre_forward()

    def _begin_forward(self, *, with_gradients: bool) -> None:
        step = self.step
        if step.in_forward:  # the one before raised, and left weights unsharded
            self.gather.reshard_all()
        self.gather.rest(self.units[:1])  # unsharded since a forward that no backward followed
        self.check_module()
        self.before_forward()
        for bucket in self.root.buckets:
            bucket.receive()
        self._use_weights()
        self._depth = 0
        step.pre_forward(self.root.name, with_gradients=with_gradients)  # last: what raises above begins no forward

    @by_engine
    def _use_weights(self) -> None:
        for bucket in buckets_of(self.units):
            bucket.use()

    def check_module(self) -> None:
        """Raise RuntimeError for a parameter that was added, replaced, moved or cast."""
        for bucket in buckets_of(self.units):
            bucket.sharded().check_untouched()
        self.whereabouts.check()

    def _root_post_forward(self, unit: Unit, module: nn.Module | None, args: Any, output: Any) -> Any:
        if self.step.in_backward:
            return output
        output = self._own(self.root, output)
        leaves = [each for each in tensors_in(output) if each.requires_grad]
        inside = self._depth > 0
        follows = bool(leaves) or (self.step.with_gradients and not self._is_all_frozen)
        self.gather.post_forward(backward_follows=follows, inside=inside)
        if not inside:
            for bucket in buckets_of(self.units):
                bucket.receive()
            self.step.in_forward = False
        self.watch_outputs(self.root, leaves, forward=self.step.num_forwards)
        return output

    def run_as_forward(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method that runs parts of the module; see [Note: Methods as forwards]. *Collective.*"""
        self.recover()
        if self.is_inside:
            return method(*args, **kwargs)
        self._begin_forward(with_gradients=False)  # units called right here are not hidden from autograd's graph
        try:
            self.gather.pre_forward()
            return self._root_post_forward(self.root, None, args, method(*args, **kwargs))
        finally:
            self._forward_left(self.root, None, args, None)

    # -- a unit's forward ------------------------------------------------------------------------------------------

    def _pre_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        with_gradients = torch.is_grad_enabled()
        if not self.is_inside:  # weights may have been updated or edited since the model's last forward
            self.recover()
            self._begin_forward(with_gradients=with_gradients)
            self.step.running.clear()
        self.gather.unshard(unit)
        if self.step.in_backward:
            recorded = with_gradients and unit.readiness.note_recomputation()
            return self._watch_recomputed(unit, args, kwargs) if recorded else None
        self.step.running.add(unit.name)
        # under reentrant checkpointing, where the call is recorded in the backward only
        hidden = self.step.in_forward and self.step.with_gradients and not with_gradients
        call = unit.readiness.begin_call(hidden=hidden, forward=self.step.num_forwards)
        return self._watch_inputs(unit, call, args, kwargs) if with_gradients else None

    def _watch_inputs(self, unit: Unit, call: Call, args: Any, kwargs: Any) -> Any:
        """Arguments behind a node that tells when a backward has passed the call; None where they are no tensors.

        Of tensors with gradients among arguments and in tuples of them: lists, dicts and objects keep their identity.
        """
        inputs: list[Tensor] = []
        given = (args, tuple(kwargs.values()))
        _map_tensors(given, inputs.append)
        if not inputs:
            return None
        passed: Any = PassedInputs.apply(WeakHook(self._inputs_passed, unit, call), *inputs)  # type: ignore[no-untyped-call] # torch's
        unit.readiness.watch(call, passed[0].grad_fn)
        call.inputs = passed
        following = iter(passed)
        args, values = _map_tensors(given, lambda _: next(following))
        return args, dict(zip(kwargs, values, strict=True))

    def _watch_recomputed(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        """Frozen weights are needed until a backward inside the backward has passed the call, which no outer node
        tells."""
        if all(all(bucket.sharded().flags()) for bucket in unit.buckets):
            return None
        call = Call(self.step.num_forwards)
        watched = self._watch_inputs(unit, call, args, kwargs)
        if watched is not None:
            unit.readiness.due.add(call)
        return watched

    def _post_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> Any:
        if self.step.in_backward:
            return output
        output, calls = self._own(unit, output), unit.readiness.running
        seen = tensors_in(output)
        leaves = [each for each in seen if each.requires_grad]
        node = calls[-1].identity()
        if [given for given in calls[-1].inputs if given.grad_fn is not node]:
            raise RuntimeError(
                f"unit {unit.name} edited an input in place: its caller would use the tensor without the history of the"
                " edit. Edit a copy, x = x.clone(), or use the operation that makes a new tensor (relu for relu_, x + y"
                " for x.add_(y))"
            )
        if unit.shares_buffers and not seen and torch.is_grad_enabled():
            raise RuntimeError(
                f"unit {unit.name} returns no tensor that a hook could see, and under double_buffer its weights might"
                " be another unit's when its backward begins: return tensors in tuples, lists, dicts or dataclasses"
            )
        self.watch_outputs(unit, leaves, calls[-1])
        unit.readiness.is_blind |= not leaves and torch.is_grad_enabled() and node is None
        if len(calls) == 1 and (unit is not self.gather.last or not leaves):  # it may be called in its own forward
            self.gather.reshard(unit)
        return output

    def _own(self, unit: Unit, output: Any) -> Any:
        """Output with copies of weights that are about to be released. Raises RuntimeError: the call has assigned
        `data` of a parameter, which is lost then."""
        released = [bucket for bucket in unit.buckets if not bucket.is_resident]
        for bucket in released:
            bucket.sharded().check_untouched()
        return without_weights(output, [bucket.compute for bucket in released]) if released else output

    def _forward_left(self, unit: Unit, module: nn.Module | None, args: Any, output: Any) -> None:
        if self.step.in_backward:
            return
        calls = unit.readiness.running
        if calls:
            calls.pop().inputs = ()
        if calls:
            return
        raised = sys.exc_info()[1] is not None
        if not unit.is_root:
            self.step.running.discard(unit.name)
            if not self.step.running:  # it was called outside of the model's forward
                self.step.in_forward = raised
                self._model_left(stays=False)
        elif self._depth:
            self._depth -= 1
        else:
            self._model_left(stays=self.step.with_gradients and not raised)

    def _model_left(self, *, stays: bool) -> None:
        """stays: the root, whose backward may follow."""
        self.step.running.discard(self.root.name)
        self.gather.rest(self.units[1:] if stays else self.units)
        for bucket in self.root.buckets if stays else ():
            bucket.sharded().count_edits()

    def break_off(self) -> None:
        if self.step.in_backward:
            return
        for unit in self.units:
            while unit.readiness.running:
                self._forward_left(unit, None, (), None)
        self._depth = 0
        self._forward_left(self.root, None, (), None)


def abandon(
    runtime: DeviceRuntime,
    reduce: ReducePipeline,
    gather: GatherPipeline,
    wait_for_weights: Callable[[], None],
    close_watches: Callable[[], None],
) -> None:
    """Leave collectives of a model that was garbage-collected, without waiting for other ranks, which collect theirs at
    other moments. On CUDA streams wait, and not the host. On a CPU a peer that still wants this rank's part gets the
    error of one that has ended.
    """
    close_watches()
    if runtime.has_streams:
        with suppress(Exception):
            reduce.discard()
            gather.reshard_all()
            wait_for_weights()


def _map_tensors(values: tuple[Any, ...], function: Callable[[Tensor], Any]) -> tuple[Any, ...]:
    found = []
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad:
            found.append(function(value))
        else:
            found.append(_map_tensors(value, function) if type(value) is tuple else value)
    return tuple(found)


def tensors_in(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):  # as almost always
        return [output]
    found = []
    for value in tree_leaves(output):
        if isinstance(value, Tensor):
            found.append(value)
        elif is_dataclass(value) and not isinstance(value, type):
            found += tensors_in([getattr(value, each.name) for each in fields(value)])
    return found


@by_engine
def without_weights(output: Any, weights: Sequence[Tensor]) -> Any:
    """Output with copies of tensors that lie in the storage of `weights`; dataclasses are changed in place."""
    places = {weight.untyped_storage().data_ptr() for weight in weights if weight.numel()}
    if isinstance(output, Tensor):  # as almost always
        return output.clone() if _lies_in(output, places) else output
    leaves, shape = tree_flatten(output)
    copied = False
    for place, leaf in enumerate(leaves):
        if _lies_in(leaf, places):
            leaves[place], copied = leaf.clone(), True
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for each in fields(leaf):
                held = getattr(leaf, each.name, None)
                if (made := without_weights(held, weights)) is not held:
                    object.__setattr__(leaf, each.name, made)  # a frozen one, too
    return tree_unflatten(leaves, shape) if copied else output


def _lies_in(value: Any, places: set[int]) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested or not value.numel():
        return False
    try:
        return value.untyped_storage().data_ptr() in places
    except (NotImplementedError, RuntimeError):  # DTensors and their like, which have none of their own
        return False
