"""A local step: torch's elementwise rules update this rank's rows as plain tensors, in place of sharded parameters.

[Note: Local step] Plain tensors stand in the optimizer's groups only while its rule runs, below torch's step hooks:
hooks, closures and exception handlers see sharded parameters. State is by sharded parameter; moments are DTensors,
whose rows the rule is given. Any other rule (LAMB, a class with its own `step`) steps the sharded parameters.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.fsdp.storage.at_rest import LOCATION, ShardedParameters, location_of
from harness.fsdp.storage.dtensors import laid_as
from harness.fsdp.storage.parameter_access import HOME, by_engine, grad_of, put_grad
from harness.fsdp.tensor_parallel import values_here
from harness.fsdp.update.matrices import MatrixStep
from harness.fsdp.update.rules import COUNTERS, KERNELS, kernel_settings, moments_of
from harness.private_torch import local_tensor, note_step

SYNC, INSTALL = "sync_grad_before_optimizer_step", "install_optimized_model_weights"
"""Arguments of `step` beside a closure, True by default: megatron-fsdp's names."""
Opt = torch.optim.Optimizer


class LocalStep:
    """before: called, with further arguments of `step`, before the rule may write main weights. *Collective.* unfused:
    see `kernel_settings`. steps_unused: None is stepped as zeros. matrices: step what is
    needed whole, and call the rule for the rest. agree: called before that, once gradients are known. *Collective.*
    """

    def __init__(self, optimizer: Opt, matrices: MatrixStep | None = None) -> None:
        self.optimizer, self.matrices = optimizer, matrices
        self.before: list[Callable[..., None]] = []
        self.unfused = self.steps_unused = False
        self.agree: Callable[[Opt], None] = lambda _: None
        self.moments = moments_of(optimizer)
        self._others: dict[str, Any] = {}
        self._rows: dict[int, Tensor] = {}  # by identity of the sharded parameter
        # while the rule runs: groups and state as they were; and parameters, what stands for them, and its state before
        self._saved: tuple[list[dict[str, Any]], Any] | None = None
        self._stepped: list[tuple[Tensor, Tensor, Mapping[str, Any]]] = []
        self._wrap()

    def _wrap(self) -> None:
        optimizer, held = self.optimizer, self.optimizer.step
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
            note_step(own)
            self._others = {name: kwargs.pop(name) for name in (SYNC, INSTALL) if name in kwargs}
            if len(args) > 1 or any(value is not None for name, value in kwargs.items() if name != "closure"):
                raise NotImplementedError(
                    f"step({', '.join(kwargs) or '...'}) is not built: step() takes a closure, {SYNC} and {INSTALL}"
                )
            return hooked(own, *args, **{name: value for name, value in kwargs.items() if value is not None})

        if "step" in vars(optimizer):  # a scheduler that was made before has marked it
            vars(outer).update(vars(held))
        optimizer.step = types.MethodType(outer, optimizer)  # type: ignore[method-assign] # later schedulers wrap its function

    # -- around the rule -----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        for before in self.before:
            before(**self._others)

    def _begin(self) -> None:
        self._prepare()
        self._exchange()

    @by_engine
    def _exchange(self) -> None:
        self._take_gradients()
        if self.matrices is not None and not self.steps_unused:
            self.agree(self.optimizer)
        placed = self.take_state()
        if self.moments is None:
            return
        groups, held = self.optimizer.param_groups, self.optimizer.state
        self._saved = [dict(group) for group in groups], held
        state = self.optimizer.state = defaultdict(dict)
        for group in groups:
            group.update(kernel_settings(self.optimizer, group, unfused=self.unfused))
            state.update({param: held[param] for param in group["params"] if param in held and id(param) not in placed})
            group["params"] = [self._local(param, held) if id(param) in placed else param for param in group["params"]]

    def _local(self, param: Tensor, state: Mapping[Tensor, Any]) -> Tensor:
        """Stands for a sharded parameter: its rows here, with their gradient and state."""
        if (rows := self._rows.get(id(param))) is None:
            sharded, index = cast(tuple[ShardedParameters, int], location_of(param))
            rows = values_here(sharded.view(index, sharded.bucket.main_shards)).detach().requires_grad_()
            self._rows[id(param)] = rows
        grad = grad_of(param)
        put_grad(rows, None if grad is None else values_here(grad).to(rows.dtype))
        known = (self.moments or frozenset()) | COUNTERS
        given = {
            key: local_tensor(value) if isinstance(value, DTensor) else value
            for key, value in (state.get(param) or {}).items()
            if key in known
        }
        if given:
            self.optimizer.state[rows] = dict(given)
        self._stepped.append((param, rows, given))
        return rows

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
        for param, rows, given in stepped:
            put_grad(rows, None)
            made = {key: value for key, value in found.pop(rows, {}).items() if value is not given.get(key, _NONE)}
            if made:
                state.setdefault(param, {}).update({key: self._shown(param, key, each) for key, each in made.items()})
        state.update(found)
        torch.autograd.graph.increment_version([rows for _, rows, _ in stepped])  # fused kernels do not

    def _shown(self, param: Tensor, key: str, value: Any) -> Any:
        """An entry of a parameter's state, of one that the rule has made for its rows."""
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

    def take_state(self) -> dict[int, Tensor]:
        """Let state that the program has put there lie as its parameter does. *Collective* where it does not. Returns
        the sharded parameters that the rule steps, by identity."""
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        placed = {id(param): param for param in params if location_of(param) is not None}
        if self.matrices is not None:
            self.matrices.settle(self.optimizer)
            for _, param in self.matrices.params(self.optimizer):
                del placed[id(param)]
        for param in placed.values():
            held, lies = self.optimizer.state.get(param) or {}, getattr(param, "placements", None)
            for key, value in held.items():
                if isinstance(value, Tensor) and self._is_moment(key, value, param):
                    if value.shape != param.shape:
                        raise ValueError(
                            f"{key} of parameter {getattr(param, HOME)[0]} in the optimizer's state has shape"
                            f" {[*value.shape]}, and the parameter {[*param.shape]}: load the state of this model"
                        )
                    if getattr(value, "placements", None) != lies:
                        held[key] = laid_as(param, value)
        return placed

    def _is_moment(self, key: str, value: Tensor, param: Tensor) -> bool:
        return key in self.moments if self.moments is not None else value.dim() > 0 and value.shape == param.shape

    @by_engine
    def take_loaded(self) -> None:
        """Loaded state is this optimizer's own from now on: torch keeps the tensors that it was given."""
        for param in self.take_state().values():
            held, known = self.optimizer.state.get(param) or {}, (self.moments or frozenset()) | COUNTERS
            held.update({key: held[key].clone() for key in known & held.keys() if isinstance(held[key], Tensor)})

    def state_bytes(self) -> int:
        """Bytes of moments on this rank."""
        whole = {id(param) for _, param in self.matrices.params(self.optimizer)} if self.matrices is not None else ()
        found = 0
        for param, held in self.optimizer.state.items():
            keys = held if id(param) in whole else self.moments or ()
            moments = (held.get(key) for key in keys) if location_of(param) is not None else ()
            found += sum(values_here(each).nbytes for each in moments if isinstance(each, Tensor))
        return found


_NONE = object()
