"""A local step: torch's elementwise rules update this rank's rows as plain tensors, in place of sharded parameters.

[Note: Local step] Plain tensors stand in the optimizer's groups only while its rule runs, below torch's step hooks:
hooks, closures and exception handlers see sharded parameters. State is by sharded parameter; moments are DTensors,
whose rows the rule is given. Any other rule (LAMB, a class with its own `step`) steps the sharded parameters.
"""

from __future__ import annotations

import operator
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.fsdp.storage.at_rest import LOCATION, ShardedParameters, location_of
from harness.fsdp.storage.dtensors import laid_as
from harness.fsdp.storage.parameter_access import HOME, by_engine, grad_of, put_grad
from harness.fsdp.tensor_parallel import values_here
from harness.fsdp.update.own_step import whole_step_of
from harness.fsdp.update.rules import COUNTERS, KERNELS, kernel_settings, moments_of
from harness.private_torch import local_tensor

IN_VAIN = ("sync_grad_before_optimizer_step", "install_optimized_model_weights")
"""Arguments that megatron-fsdp's `step` has: what the loop did by itself is not done again."""
Opt = torch.optim.Optimizer


@dataclass(eq=False)
class Rows:
    """Rows that stand for a sharded parameter.

    held: values of its state as the program has them. state: entries of it that the rule is given, and writes to.
    given: the same before it runs. While all are the same objects, nothing is looked at anew.
    """

    param: Tensor
    rows: Tensor
    held: list[Any] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)


def _are_same(some: Collection[Any], others: Collection[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


class LocalStep:
    """before: called before the rule may write main weights. *Collective.* unfused: see `kernel_settings`.
    steps_unused: None is stepped as zeros. matrices: step what is needed whole, and call the rule for the rest.
    agree: called before that, once gradients are known. *Collective.*
    """

    def __init__(self, optimizer: Opt) -> None:
        self.optimizer, self.matrices = optimizer, whole_step_of(optimizer)
        self.before: list[Callable[[], None]] = []
        self.unfused = self.steps_unused = False
        self.agree: Callable[[Opt], None] = lambda _: None
        self.moments = moments_of(optimizer)
        self._known = COUNTERS | (self.moments or frozenset())
        self._rows: dict[int, Rows] = {}  # by identity of the sharded parameter
        self._stepped: list[Rows] = []  # while the rule runs; and groups and state as they were
        self._saved: tuple[list[dict[str, Any]], Any] | None = None
        self._wrap()

    def _wrap(self) -> None:
        optimizer = self.optimizer
        rule: Any = type(optimizer).step
        while getattr(rule, "hooked", None) and hasattr(rule, "__wrapped__"):  # below torch's hooks
            rule = rule.__wrapped__

        begin, end = map(torch.compiler.disable, (LocalStep._begin, LocalStep._end))

        def around(closure: Callable[[], Any]) -> Any:
            with torch.enable_grad():
                loss = closure()
            begin(self)
            return loss

        def step(own: Opt, closure: Callable[[], Any] | None = None) -> Any:
            try:
                if self.matrices is not None:
                    loss = begin(self) if closure is None else around(closure)
                    self.matrices.step(own, rule)
                    return loss
                if closure is None:
                    begin(self)
                    return rule(own)
                if self.moments is None:  # it may write before it calls the closure
                    self._prepare()
                return rule(own, partial(around, closure))
            finally:
                end(self)

        bare = partial(torch.compiler.disable, recursive=False)  # whoever compiles `optimizer.step` compiles the rule
        hooked: Any = bare(torch.optim.Optimizer.profile_hook_step(bare(step)))

        @bare
        def outer(own: Any, *args: Any, **kwargs: Any) -> Any:
            given = {name: value for name, value in kwargs.items() if name not in IN_VAIN and value is not None}
            if len(args) > 1 or given.keys() - {"closure"}:
                raise NotImplementedError(
                    f"step({', '.join(given) or '...'}) is not built: step() takes a closure, {' and '.join(IN_VAIN)}"
                )
            return hooked(own, *args, **given)

        optimizer.step = types.MethodType(outer, optimizer)  # type: ignore[method-assign] # later schedulers wrap its function

    # -- around the rule -----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        for before in self.before:
            before()

    def _begin(self) -> None:
        self._prepare()
        self._exchange()

    @by_engine
    def _exchange(self) -> None:
        self._take_gradients()
        if self.matrices is not None and not self.steps_unused:
            self.agree(self.optimizer)
        if self.moments is None:
            self.take_state()
            return
        whole, groups, held = self._whole(), self.optimizer.param_groups, self.optimizer.state
        self._saved = [dict(group) for group in groups], held
        state = self.optimizer.state = defaultdict(dict)
        for group in groups:
            group.update(kernel_settings(self.optimizer, group, unfused=self.unfused))
            params = group["params"]
            group["params"] = [each if id(each) in whole else self._local(each, held) for each in params]
            state.update(
                {one: held[one] for one, put in zip(params, group["params"], strict=True) if one is put in held}
            )

    def _local(self, param: Tensor, held: Mapping[Tensor, dict[str, Any]]) -> Tensor:
        """This rank's rows of a sharded parameter, with their gradient and state; any other parameter itself."""
        if (own := self._rows.get(id(param))) is None:
            if (place := location_of(param)) is None:
                return param
            rows = values_here(place[0].view(place[1], place[0].bucket.main_shards)).detach().requires_grad_()
            own = self._rows[id(param)] = Rows(param, rows)
        grad, entries = grad_of(param), held.get(param) or {}
        put_grad(own.rows, None if grad is None else values_here(grad).to(own.rows.dtype))
        if not _are_same(entries.values(), own.held):
            self._settle(param, entries)
            self._give(own, entries)
        if own.state:
            self.optimizer.state[own.rows] = own.state
        self._stepped.append(own)
        return own.rows

    def _give(self, own: Rows, entries: Mapping[str, Any]) -> None:
        own.held = list(entries.values())
        known = [(key, value) for key, value in entries.items() if key in self._known]
        own.state = {key: local_tensor(value) if isinstance(value, DTensor) else value for key, value in known}
        own.given = dict(own.state)

    def _end(self) -> None:
        if self._saved is None:
            return
        (groups, state), self._saved = self._saved, None
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({name: saved[name] for name in ("params", *KERNELS) if name in saved})
        found, self.optimizer.state = self.optimizer.state, state
        self._put_state(found)

    @by_engine
    def _put_state(self, found: dict[Tensor, Any]) -> None:
        stepped, self._stepped, state = self._stepped, [], self.optimizer.state
        for own in stepped:
            put_grad(own.rows, None)
            made = found.pop(own.rows, None)
            if made is not None and not _are_same(made.values(), own.given.values()):
                entries = state.setdefault(own.param, {})
                changed = {key: value for key, value in made.items() if value is not own.given.get(key, _NONE)}
                entries.update({key: self._shown(own.param, key, value) for key, value in changed.items()})
                self._give(own, entries)
        state.update(found)
        torch.autograd.graph.increment_version([own.rows for own in stepped])  # fused kernels do not

    def _shown(self, param: Tensor, key: str, value: Any) -> Any:
        """Entry of a parameter's state, for what the rule has made for its rows: a moment is laid as the parameter."""
        if key not in (self.moments or ()) or not isinstance(value, Tensor):
            return value
        sharded, index = cast(tuple[ShardedParameters, int], location_of(param))
        begins_at = sharded.bucket.cuts.own_slice(sharded.bucket.layout.slots[index]).offset
        return sharded.view_from(index, value.reshape(-1), begins_at)

    # -- gradients and state as the program left them ------------------------------------------------------------------

    def _take_gradients(self) -> None:
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                place: Any = getattr(param, LOCATION, None)  # `location_of` would be a call for each parameter
                sharded, given = None if place is None else place[0](), grad_of(param)
                if sharded is not None and (given is None or given is not sharded.grads[place[1]]):
                    sharded.take_grad(place[1], zeros=self.steps_unused)

    def take_state(self) -> list[Tensor]:
        """Let state that the program has put there lie as its parameter does. *Collective* where it does not. Returns
        the sharded parameters that the rule steps."""
        whole, params = self._whole(), (each for group in self.optimizer.param_groups for each in group["params"])
        placed = [each for each in params if id(each) not in whole and location_of(each) is not None]
        for param in placed:
            self._settle(param, self.optimizer.state.get(param) or {})
        return placed

    def _whole(self) -> set[int]:
        """Identities of parameters that `matrices` step, whose state lies with their owners. *Collective.*"""
        if self.matrices is None:
            return set()
        self.matrices.settle(self.optimizer)
        return {id(param) for _, param in self.matrices.params(self.optimizer)}

    def _settle(self, param: Tensor, held: dict[str, Any]) -> None:
        lies = getattr(param, "placements", None)
        for key, value in held.items():
            is_laid = isinstance(value, Tensor) and value.dim() > 0 and value.shape == param.shape
            if isinstance(value, Tensor) and (is_laid if self.moments is None else key in self.moments):
                if value.shape != param.shape:
                    raise ValueError(
                        f"{key} of parameter {getattr(param, HOME)[0]} in the optimizer's state has shape"
                        f" {[*value.shape]}, and the parameter {[*param.shape]}: load the state of this model"
                    )
                if getattr(value, "placements", None) != lies:
                    held[key] = laid_as(param, value)

    @by_engine
    def take_loaded(self) -> None:
        """Loaded state is this optimizer's own from now on: torch keeps the tensors that it was given."""
        for held in filter(None, map(self.optimizer.state.get, self.take_state())):
            held.update({key: held[key].clone() for key in self._known & held.keys() if isinstance(held[key], Tensor)})

    def state_bytes(self) -> int:
        """Bytes of tensors in the state of sharded parameters on this rank, but counters."""
        state = (held.items() for param, held in self.optimizer.state.items() if location_of(param) is not None)
        found = (value for held in state for key, value in held if key not in COUNTERS and isinstance(value, Tensor))
        return sum(values_here(each).nbytes for each in found)


_NONE = object()
