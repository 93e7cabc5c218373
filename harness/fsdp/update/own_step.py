"""An optimizer's own `step` on whole parameters, each at its owner: Shampoo, SOAP, Adafactor and their like.

[Note: Own step] An optimizer says by `needs_whole(param)` which parameters it needs whole; of torch's, Adafactor needs
all. Their owner gets plain ones, with gradients, in the optimizer's groups, and runs its `step` once; on other ranks
they are in no group meanwhile. So an update may depend on its parameter, gradient, state and group alone.

State has any shapes, and lies with the owner. In `optimizer.state` its tensors are DTensors that one rank has all rows
of. Other ranks are told shapes and plain numbers where these have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.fsdp.comm.mesh import all_values, everyones
from harness.fsdp.ragged import RaggedShard, RaggedTensor
from harness.fsdp.ragged.tensor import spec_like
from harness.fsdp.storage.parameter_access import HOME, grad_of
from harness.fsdp.tensor_parallel import values_here
from harness.fsdp.update.flat_step import DECOUPLED
from harness.fsdp.update.matrices import Box, Grid, Lane, Matrix, MatrixStep, MuonRule, Opt
from harness.fsdp.update.rules import needs_whole_of
from harness.muon import MuonWithAdamW
from harness.private_torch import local_tensor, tree_leaves, tree_map_only


class OwnStep:
    num_given = 2

    def __init__(self, needs_whole: Callable[[Tensor], bool]) -> None:
        self._needs = needs_whole
        self._meshes: dict[int, DeviceMesh] = {}

    def needs(self, group: Mapping[str, Any], param: Tensor) -> bool:
        """A plain parameter, which every rank has, is stepped as it is."""
        return isinstance(param, DTensor) and self._needs(param)

    def cut(self, group: Mapping[str, Any], shape: torch.Size, name: str) -> tuple[int, int, Iterator[Box]]:
        box: Box = tuple((0, size) for size in shape or (1,))
        return shape[0] if shape else 1, shape[1:].numel(), iter([box])

    def cost(self, group: Mapping[str, Any], rows: int, columns: int) -> int:
        return rows * columns

    def dtype(self, param: Tensor) -> torch.dtype:
        return param.dtype

    def give(self, group: Mapping[str, Any], param: Tensor, held: dict[str, Any]) -> list[Tensor]:
        return [values_here(param), values_here(cast(Tensor, grad_of(param)))]

    def work(self, optimizer: Opt, lanes: Sequence[Lane], step: Callable[[Mapping[int, Tensor]], None]) -> None:
        state, here = optimizer.state, dict[int, nn.Parameter]()
        for lane in lanes:
            for m in lane.gather():
                weight, grad = (each.view(m.param.shape) for each in lane.whole[id(m)])
                here[id(m.param)] = plain = nn.Parameter(weight)
                plain.grad = grad
                if hasattr(m.param, DECOUPLED):
                    setattr(plain, DECOUPLED, grad)
                if m.param in state:
                    state[plain] = tree_map_only(RaggedTensor, local_tensor, state[m.param])
        step(here)
        found = {place: state.pop(plain, {}) for place, plain in here.items()}
        for grid in {id(lane.grid): lane.grid for lane in lanes}.values():
            self._tell(state, grid, [m for lane in lanes if lane.grid is grid for m in lane.matrices], found)
        for lane in lanes:
            lane.spread({id(m): here[id(m.param)].detach().view(m.shape) for m in (*lane.alike, *lane.own)})

    def take(self, group: Mapping[str, Any], matrix: Matrix, rows: Tensor, values: Tensor) -> None:
        rows.copy_(values)

    # -- state at owners -----------------------------------------------------------------------------------------------

    def settle(self, param: Tensor, held: dict[str, Any], grid: Grid, owner: int | None) -> None:
        def settled(value: Tensor) -> Tensor:
            if owner is None:
                return value.full_tensor() if isinstance(value, DTensor) else value
            is_of_grid = isinstance(value, RaggedTensor) and value.device_mesh is self._mesh(grid)
            if is_of_grid and cast(RaggedTensor, value).cut.spans[owner] == (0, _rows(value.shape)):
                return value
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            return self._at(grid, owner, param, whole, whole if grid.comm.rank == owner else None)

        held.update(tree_map_only(Tensor, settled, dict(held)))

    def _tell(self, state: Any, grid: Grid, matrices: Sequence[Matrix], found: Mapping[int, dict[str, Any]]) -> None:
        """Put what was found into the state of parameters. *Collective.*"""
        told: dict[int, Any] = {}
        for place, m in enumerate(matrices):
            if id(m.param) in found:
                held = found[id(m.param)]
                if m.owner is not None and _told(held) != _told(state.get(m.param, {})):
                    told[place] = _told(held)
                state[m.param] = held if m.owner is None else self._wrapped(grid, m, held, state.get(m.param, {}))
        comm = grid.comm
        if not all_values(comm, torch.tensor(len(told), device=comm.runtime.device), "changed states").any():
            return
        for rank, others in enumerate(everyones([*told.items()], comm, "changed states")):
            for place, held in others:
                m = matrices[place]
                made = _from_told(held, partial(self._at, grid, cast(int, m.owner), m.param))
                if rank != comm.rank:
                    state[m.param] = made

    def _wrapped(self, grid: Grid, m: Matrix, found: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
        kept = {id(local_tensor(each)): each for each in tree_leaves(before) if isinstance(each, RaggedTensor)}

        def wrapped(value: Tensor) -> Tensor:
            same = kept.get(id(value))
            return self._at(grid, cast(int, m.owner), m.param, value, value) if same is None else same

        return cast(dict[str, Any], tree_map_only(Tensor, wrapped, dict(found)))

    def _at(self, grid: Grid, owner: int, param: Tensor, like: Tensor, local: Tensor | None = None) -> Tensor:
        """local: on the owner."""
        if local is None:
            local = torch.empty(0, *like.shape[1:], dtype=like.dtype, device=grid.comm.runtime.device)
        spans = tuple((0, _rows(like.shape) * (rank == owner)) for rank in range(grid.comm.size))
        whole = torch.empty(like.shape, dtype=like.dtype, device="meta")
        cut = RaggedShard(spans, getattr(param, HOME)[0])
        return RaggedTensor.of(local, spec_like(whole, self._mesh(grid), [cut]))

    def _mesh(self, grid: Grid) -> DeviceMesh:
        if id(grid) not in self._meshes:
            self._meshes[id(grid)] = DeviceMesh.from_group(grid.comm.group, grid.comm.runtime.device.type)
        return self._meshes[id(grid)]


def _rows(shape: torch.Size) -> int:
    return shape[0] if shape else 1


def _told(value: Any) -> Any:
    """Shapes and dtypes in place of tensors, in JSON's types."""
    if isinstance(value, Mapping):
        return {"entries": {key: _told(each) for key, each in value.items()}}
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
        return {key: _from_told(each, made) for key, each in told["entries"].items()}
    return made(torch.empty(told["shape"], dtype=getattr(torch, told["dtype"]), device="meta"))


def whole_step_of(optimizer: Opt) -> MatrixStep | None:
    """None for an optimizer whose rule steps flat pieces, or sharded parameters, by itself."""
    if (needs := needs_whole_of(optimizer)) is not None:
        return MatrixStep(OwnStep(needs))
    return MatrixStep(MuonRule()) if isinstance(optimizer, torch.optim.Muon | MuonWithAdamW) else None
