"""A local step: torch's elementwise rules update this rank's rows as plain tensors, in place of sharded parameters.

[Note: Local step] Plain tensors stand in the optimizer's groups only while its rule runs, below torch's step hooks:
hooks, closures and exception handlers see sharded parameters. State is by sharded parameter; moments are DTensors,
whose rows the rule is given. Any other rule (LAMB, a class with its own `step`) steps the sharded parameters.
"""

from __future__ import annotations

import inspect
import operator
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.mesh import all_values, everyones
from harness.fsdp.ragged import RaggedShard, RaggedTensor
from harness.fsdp.ragged.tensor import spec_like
from harness.fsdp.storage.at_rest import LOCATION, ShardedParameters, location_of
from harness.fsdp.storage.dtensors import laid_as
from harness.fsdp.storage.parameter_access import HOME, by_engine, grad_of, put_grad
from harness.fsdp.tensor_parallel import values_here
from harness.fsdp.update.matrices import Box, Group, Lane, Matrix, MatrixStep, Opt
from harness.fsdp.update.rules import COUNTERS, KERNELS, kernel_settings, moments_of, needs_whole_of
from harness.muon import MuonWithAdamW
from harness.private_torch import local_tensor, tree_map_only


@dataclass(eq=False)
class Rows:
    """Rows that stand for a sharded parameter.

    held: values of its state as the program has them. given: entries of it that the rule is given, before it runs.
    While all are the same objects, nothing is looked at anew.
    """

    param: Tensor
    rows: Tensor
    held: list[Any] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)


def _are_same(some: Collection[Any], others: Collection[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


class LocalStep:
    """before: called before the rule may write main weights. *Collective.* unfused: see `kernel_settings`.
    steps_unused: None is stepped as zeros. matrices: step what is needed whole, and call the rule for the rest.
    agree: called before that, once gradients are known. *Collective.*
    """

    def __init__(self, optimizer: Opt, agree: Callable[[MatrixStep, Opt], None]) -> None:
        self.optimizer, self.agree = optimizer, agree
        is_muon = isinstance(optimizer, torch.optim.Muon | MuonWithAdamW)
        self.matrices: MatrixStep | None = MatrixStep() if is_muon else None
        if (needs := needs_whole_of(optimizer)) is not None:  # else its rule steps rows, or sharded parameters
            self.matrices = OwnStep(needs)
        self.before: list[Callable[[], None]] = []
        self.unfused = self.steps_unused = False
        self.moments = moments_of(optimizer)
        self._known = COUNTERS | (self.moments or frozenset())
        self._rows: dict[int, Rows] = {}  # by identity of the sharded parameter
        self._stepped: list[Rows] = []  # while the rule runs; and groups and state as they were
        self._saved: tuple[list[dict[str, Any]], Any] | None = None
        self._wrap()

    def _wrap(self) -> None:
        optimizer = self.optimizer
        # below torch's hooks
        rule: Any = inspect.unwrap(type(optimizer).step, stop=lambda each: not getattr(each, "hooked", None))
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
            for name in ("sync_grad_before_optimizer_step", "install_optimized_model_weights"):
                kwargs.pop(name, None)  # megatron-fsdp's: what the loop did by itself is not done again
            return hooked(own, *args, **kwargs)

        optimizer.step = types.MethodType(outer, optimizer)  # type: ignore[method-assign] # later schedulers wrap its function

    # -- around the rule -----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        for before in self.before:
            before()

    @by_engine
    def _begin(self) -> None:
        self._prepare()
        self._take_gradients()
        if self.matrices is not None and not self.steps_unused:
            self.agree(self.matrices, self.optimizer)
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
        if own.given:
            self.optimizer.state[own.rows] = dict(own.given)
        self._stepped.append(own)
        return own.rows

    def _give(self, own: Rows, entries: Mapping[str, Any]) -> None:
        own.held = list(entries.values())
        known = [(key, value) for key, value in entries.items() if key in self._known]
        own.given = {key: local_tensor(value) if isinstance(value, DTensor) else value for key, value in known}

    @by_engine
    def _end(self) -> None:
        if self._saved is None:
            return
        (groups, state), self._saved = self._saved, None
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({name: saved[name] for name in ("params", *KERNELS) if name in saved})
        found, self.optimizer.state = self.optimizer.state, state
        stepped, self._stepped = self._stepped, []
        for own in stepped:
            put_grad(own.rows, None)
            made = found.pop(own.rows, None)
            if made is not None and not _are_same(made.values(), own.given.values()):
                entries = state.setdefault(own.param, {})
                changed = (key for key, value in made.items() if key not in own.given or value is not own.given[key])
                entries.update({key: self._shown(own.param, key, made[key]) for key in changed})
                self._give(own, entries)
        state.update(found)
        torch.autograd.graph.increment_version([own.rows for own in stepped])  # fused kernels do not

    def _shown(self, param: Tensor, key: str, value: Any) -> Any:
        """Entry of a parameter's state, for what the rule has made for its rows: a moment is laid as the parameter."""
        if key not in (self.moments or ()) or not isinstance(value, Tensor):
            return value
        sharded, index = cast(tuple[ShardedParameters, int], location_of(param))
        slot = sharded.bucket.layout.slots[index]
        return sharded.shards.rows(sharded.bucket, slot, value.reshape(-1), sharded.bucket.cuts.own_slice(slot).offset)

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


class OwnStep(MatrixStep):
    """An optimizer's own `step` on whole parameters, each at its owner: Shampoo, SOAP, Adafactor and their like.

    [Note: Own step] An optimizer says by `needs_whole(param)` which parameters it needs whole; of torch's, Adafactor
    needs all. Their owner gets plain ones, with gradients, in the optimizer's groups, and runs its `step` once; on
    other ranks they are in no group meanwhile. So an update may depend on its parameter, gradient, state and group
    alone.

    State has any shapes, and lies with the owner. In `optimizer.state` its tensors are DTensors that one rank has all
    rows of. Other ranks are told shapes and plain numbers where these have changed.
    """

    wire = None

    def __init__(self, needs_whole: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._needs = needs_whole
        self._meshes: dict[Communicator, DeviceMesh] = {}

    def needs(self, group: Group, param: Tensor) -> bool:
        """A plain parameter, which every rank has, is stepped as it is."""
        return isinstance(param, DTensor) and self._needs(param)

    def cut(self, group: Group, param: Tensor) -> tuple[int, int, Iterable[Box]]:
        return 1, param.numel(), [tuple((0, size) for size in param.shape or (1,))]

    def cost(self, group: Group, m: Matrix) -> int:
        return m.columns

    def give(self, group: Group, param: Tensor, held: dict[str, Any]) -> list[Tensor]:
        return [values_here(param), values_here(cast(Tensor, grad_of(param)))]

    def work(self, optimizer: Opt, lanes: Sequence[Lane], step: Callable[[Mapping[int, Tensor]], None]) -> None:
        state, here = optimizer.state, dict[int, nn.Parameter]()
        for lane in lanes:
            for m, whole in lane.gather():
                weight, grad = (each.view(m.param.shape) for each in whole)
                here[id(m.param)] = plain = nn.Parameter(weight)
                plain.grad = grad
                if m.param in state:
                    state[plain] = tree_map_only(RaggedTensor, local_tensor, state[m.param])
        step(here)
        found = {place: state.pop(plain, {}) for place, plain in here.items()}
        for comm in dict.fromkeys(lane.comm for lane in lanes):
            self._tell(state, comm, [m for lane in lanes if lane.comm is comm for m in lane.matrices], found)
        for lane in lanes:
            lane.spread({id(m): here[id(m.param)].detach().view(m.shape) for m in lane.own})

    def take(self, group: Group, m: Matrix, rows: Tensor, values: Tensor) -> None:
        rows.copy_(values)

    # -- state at owners -----------------------------------------------------------------------------------------------

    def put_state(self, m: Matrix, held: dict[str, Any], comm: Communicator) -> None:
        def settled(value: Tensor) -> Tensor:
            is_there = isinstance(value, RaggedTensor) and value.device_mesh is self._mesh(comm)
            if is_there and m.owner is not None and cast(Any, value).cut.spans[m.owner] == (0, value.shape[:1].numel()):
                return value
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            return whole if m.owner is None else self._at(comm, m, whole)

        held.update(tree_map_only(Tensor, settled, dict(held)))

    def _tell(self, state: Any, comm: Communicator, matrices: Sequence[Matrix], found: Mapping[int, Any]) -> None:
        """Put what was found into the state of parameters. *Collective.*"""
        told: dict[int, Any] = {}
        for place, m in enumerate(matrices):
            if id(m.param) in found:
                held = found[id(m.param)]
                if m.owner is not None and _told(held) != _told(state.get(m.param, {})):
                    told[place] = _told(held)
                at_owner = partial(self._at, comm, m)
                state[m.param] = held if m.owner is None else tree_map_only(Tensor, at_owner, dict(held))
        if not all_values(comm, torch.tensor(len(told), device=comm.runtime.device), "changed states").any():
            return
        for rank, others in enumerate(everyones([*told.items()], comm, "changed states")):
            for place, held in others:
                made = _from_told(held, partial(self._at, comm, matrices[place]))
                if rank != comm.rank:
                    state[matrices[place].param] = made

    def _at(self, comm: Communicator, m: Matrix, value: Tensor) -> Tensor:
        """A tensor of which the owner has all rows; elsewhere its shape alone counts."""
        is_here, whole = comm.rank == m.owner, torch.empty(value.shape, dtype=value.dtype, device="meta")
        local = value if is_here else value.new_empty(0, *value.shape[1:], device=comm.runtime.device)
        if local.is_meta:  # to be loaded
            local = torch.zeros_like(local, device=comm.runtime.device)
        spans = tuple((0, value.shape[:1].numel() * (rank == m.owner)) for rank in range(comm.size))
        cut = RaggedShard(spans, getattr(m.param, HOME)[0])
        return RaggedTensor.of(local, spec_like(whole, self._mesh(comm), [cut]))

    def _mesh(self, comm: Communicator) -> DeviceMesh:
        if comm not in self._meshes:
            self._meshes[comm] = DeviceMesh.from_group(comm.group, comm.runtime.device.type)
        return self._meshes[comm]


def _told(value: Any) -> Any:
    """Shapes and dtypes in place of tensors, in JSON's types."""
    if isinstance(value, Mapping):
        return {"entries": [[key, _told(each)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        return [_told(each) for each in value]
    if isinstance(value, Tensor):
        return {"shape": [*value.shape], "dtype": str(value.dtype).removeprefix("torch.")}
    return value if isinstance(value, int | float | str | None) else {"refused": type(value).__name__}


def _from_told(told: Any, made: Callable[[Tensor], Tensor]) -> Any:
    """Raises NotImplementedError: something else than tensors, numbers and texts is kept, perhaps in lists."""
    if isinstance(told, list):
        return [_from_told(each, made) for each in told]
    if not isinstance(told, dict):
        return told
    if "refused" in told:
        raise NotImplementedError(
            f"an optimizer keeps a {told['refused']} in the state of a parameter that it needs whole, of which other"
            " ranks cannot be told: keep tensors, numbers, texts, and lists of them"
        )
    if "entries" in told:
        return {key: _from_told(each, made) for key, each in told["entries"]}
    return made(torch.empty(told["shape"], dtype=getattr(torch, told["dtype"]), device="meta"))
