"""An optimizer's own `step` on whole parameters, each at its owner: Shampoo, SOAP, Adafactor and their like.

[Note: Own step] An optimizer says by `needs_whole(param)` which parameters it needs whole; of torch's, Adafactor needs
all. Their owner gets plain ones, with gradients, in the optimizer's groups, and runs its `step` once; on other ranks
they are in no group meanwhile. So an update may depend on its parameter, gradient, state and group alone.

State has any shapes, and lies with the owner. In `optimizer.state` its tensors are DTensors that one rank has all rows
of. Other ranks are told shapes and plain numbers where these have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
from harness.fsdp.storage.parameter_access import HOME, grad_of
from harness.fsdp.tensor_parallel import values_here
from harness.fsdp.update.matrices import Box, Group, Lane, Matrix, MatrixStep, Opt
from harness.fsdp.update.rules import needs_whole_of
from harness.muon import MuonWithAdamW
from harness.private_torch import local_tensor, tree_map_only


class OwnStep(MatrixStep):
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
            if is_there and m.owner is not None and cast(Any, value).cut.spans[m.owner] == (0, _rows(value.shape)):
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
        spans = tuple((0, _rows(value.shape) * (rank == m.owner)) for rank in range(comm.size))
        cut = RaggedShard(spans, getattr(m.param, HOME)[0])
        return RaggedTensor.of(local, spec_like(whole, self._mesh(comm), [cut]))

    def _mesh(self, comm: Communicator) -> DeviceMesh:
        if comm not in self._meshes:
            self._meshes[comm] = DeviceMesh.from_group(comm.group, comm.runtime.device.type)
        return self._meshes[comm]


def _rows(shape: torch.Size) -> int:
    return shape[0] if shape else 1


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


def whole_step_of(optimizer: Opt) -> MatrixStep | None:
    """None for an optimizer whose rule steps rows, or sharded parameters, by itself."""
    if (needs := needs_whole_of(optimizer)) is not None:
        return OwnStep(needs)
    return MatrixStep() if isinstance(optimizer, torch.optim.Muon | MuonWithAdamW) else None
