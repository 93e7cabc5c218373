"""Steps of what an optimizer needs whole: rows are brought to an owner, and what it makes of them back.

[Note: Owners] Storage knows nothing of owners. An owner is any rank that has a part of the bucket, along both
data-parallel axes and the tensor-parallel one. Owners are planned from shapes. Each bucket has one all-to-all to its
owners and one back. The first ones of all buckets are issued at once, so that those of later buckets travel while an
earlier one's matrices are worked on. Replicas of rows do not travel: an owner gets them from the rank whose place on
that axis is its own. What travels, and what is made of it, is a `Rule`: Muon's (`MuonRule`), or the optimizer's own
`step` on whole parameters (`harness.fsdp.update.own_step`).

One process makes the same products of the same shapes, so that bits do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from math import prod
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import Communicator, Pending
from harness.fsdp.comm.events import Label
from harness.fsdp.comm.mesh import Mesh, all_values, crossed
from harness.fsdp.storage.at_rest import ShardedParameters, location_of
from harness.fsdp.storage.dtensors import fill
from harness.fsdp.storage.layout import ParamSpec, plan_bucket
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.parameter_access import HOME, by_engine, grad_of
from harness.fsdp.storage.placement import SHARD
from harness.fsdp.tensor_parallel import values_here
from harness.fsdp.update.owners import Work, is_shared, owners_of
from harness.muon import (
    MOMENTUM,
    WIRE,
    add,
    boxes,
    decay,
    matrices_of,
    mix,
    multiplications,
    orthogonalize,
    steps_matrices,
)

Opt = torch.optim.Optimizer
Box = tuple[tuple[int, int], ...]
"""Begin and end in each dimension of a parameter."""


class Place(NamedTuple):
    inner: int
    outer: int
    tensor: int


@dataclass(frozen=True)
class Grid:
    """Ranks that have parts of a bucket. places: of each rank of `comm`."""

    comm: Communicator
    places: Sequence[Place]

    @classmethod
    def of(cls, mesh: Mesh, tp: Communicator | None) -> Grid:
        """*Collective.*"""
        comm = crossed(mesh.everyone, tp)
        own = [mesh.place.inner_rank, mesh.place.outer_rank, 0 if tp is None else tp.rank]
        found = all_values(comm, torch.tensor(own, device=comm.runtime.device), "places of ranks")
        return cls(comm, [Place(*each) for each in found.tolist()])


class Regions:
    """Which part of each of a bucket's parameters each rank has; a scalar counts as a vector of one."""

    def __init__(self, bucket: ParamGroup, places: Sequence[Place]) -> None:
        self.bucket, self.places = bucket, places
        layout = bucket.layout
        self.layouts = {
            rank: plan_bucket(
                [ParamSpec(name, replace(each, rank=rank).here) for name, each in bucket.tp_shards.items()],
                *(layout.num_ranks, layout.align, layout.outer),
            )
            for rank in {place.tensor for place in places}
        }
        self.inner, self.outer = (each is SHARD for each in bucket.cuts.own)

    def of(self, index: int, rank: int) -> Box:
        place = self.places[rank]
        layout = self.layouts[place.tensor]
        slot = layout.slots[index]
        shard = (place.inner if self.inner else 0) * layout.outer + (place.outer if self.outer else 0)
        rows, row = layout.local_slice(slot, shard), slot.spec.row_numel
        tp_shard = replace(self.bucket.tp_shard_of(slot), rank=place.tensor)
        found = [(0, size) for size in tp_shard.shape or (1,)]
        if tp_shard.dim is not None:
            found[tp_shard.dim] = tp_shard.span()
        begin = found[0][0]
        return ((begin + rows.start // row, begin + rows.end // row), *found[1:])

    def gives(self, index: int, rank: int, owner: int) -> bool:
        """True if an owner gets a rank's part from that rank, and not from another one that has the same."""
        slot = self.bucket.layout.slots[index]
        cut = self.inner, self.outer, self.bucket.tp_shard_of(slot).dim is not None
        return all(
            one or mine == theirs for one, mine, theirs in zip(cut, self.places[rank], self.places[owner], strict=True)
        )


@dataclass(eq=False)
class Matrix:
    """One matrix of a parameter, several of a stack, or all of it.

    group: number of the parameter's. box: of the matrix in the parameter. regions, parts: of the parameter, and of the
    matrix, by rank. owner: None where every rank works it out alike.
    """

    param: Tensor
    group: int
    rows: int
    columns: int
    box: Box
    regions: list[Box]
    gives: Callable[[int, int], bool]
    owner: int | None = None

    @cached_property
    def parts(self) -> list[Box]:
        return [_overlap(self.box, region) for region in self.regions]

    def work(self, cost: int) -> Work:
        holders = [rank for rank, part in enumerate(self.parts) if part == self.box]
        return Work(cost, 2 * _numel(self.box), holders)

    def here(self, rank: int, values: Tensor) -> Tensor:
        """The rank's part of the matrix in what the rank has of a tensor of the parameter's shape."""
        region = self.regions[rank]
        return _within(values.view([end - begin for begin, end in region]), self.parts[rank], region)

    def part(self, whole: Tensor, rank: int) -> Tensor:
        return _within(whole, self.parts[rank], self.box)

    @property
    def shape(self) -> list[int]:
        return [end - begin for begin, end in self.box]


Due = tuple[Matrix, Box, int]
"""Part of a matrix, and of the how manieth tensor that is given of it."""


class Exchange:
    """One all-to-all: `given[rank]` to each rank, and what `due[rank]` says from each, with its place in `received`."""

    def __init__(
        self, comm: Communicator, label: Label, dtype: torch.dtype, given: list[list[Tensor]], due: list[list[Due]]
    ) -> None:
        views = [view for of_rank in given for view in of_rank]
        sizes = [sum(view.numel() for view in of_rank) for of_rank in given]
        sent = torch.empty(sum(sizes), dtype=dtype, device=comm.runtime.device)
        for view, space in zip(views, sent.split([view.numel() for view in views]), strict=True):
            space.view(view.shape).copy_(view)
        self._due = [each for of_rank in due for each in of_rank]
        self._lengths = [_numel(box) for _, box, _ in self._due]
        coming = [sum(_numel(box) for _, box, _ in of_rank) for of_rank in due]
        self._label, self._received, self._pending = label, sent, Pending([])
        if comm.size > 1:
            self._received = torch.empty(sum(coming), dtype=dtype, device=sent.device)
            with events.begin(label):
                work = comm.group.alltoall_base(self._received, sent, coming, sizes)
            self._pending = Pending([work], [sent])

    def wait(self) -> Iterator[tuple[Due, Tensor]]:
        with events.waiting(self._label):
            self._pending.wait()
        for due, values in zip(self._due, self._received.split(self._lengths), strict=True):
            yield due, values.view([end - begin for begin, end in due[1]])


class Rule(Protocol):
    """Tells what an optimizer needs whole, what travels of it, and what is made of that. group: of the optimizer's.

    num_given: tensors that an owner gets of a matrix.
    """

    num_given: int

    def needs(self, group: Mapping[str, Any], param: Tensor) -> bool: ...

    def cut(self, group: Mapping[str, Any], shape: torch.Size, name: str) -> tuple[int, int, Iterator[Box]]:
        """(rows, columns, boxes) of a parameter's matrices."""

    def cost(self, group: Mapping[str, Any], rows: int, columns: int) -> int: ...

    def dtype(self, param: Tensor) -> torch.dtype:
        """Dtype in which everything travels."""

    def give(self, group: Mapping[str, Any], param: Tensor, held: dict[str, Any]) -> list[Tensor]:
        """Tensors of a parameter that travel, in the places of its rows here. held: its state."""

    def work(self, optimizer: Opt, lanes: Sequence[Lane], step: Callable[[Mapping[int, Tensor]], None]) -> None:
        """Gather all lanes, and spread their results. *Collective.*

        step: runs the optimizer's own `step` once on what is not needed whole, and on parameters by identity of those
        that they stand for.
        """

    def take(self, group: Mapping[str, Any], matrix: Matrix, rows: Tensor, values: Tensor) -> None:
        """Update rows of a parameter by those of a result."""

    def settle(self, param: Tensor, held: dict[str, Any], grid: Grid, owner: int | None) -> None:
        """Put state, as it was loaded perhaps, where it belongs. *Collective.*"""


class Lane:
    """Matrices of one bucket."""

    def __init__(self, rule: Rule, bucket: ParamGroup, grid: Grid, matrices: list[Matrix]) -> None:
        comm = grid.comm
        self.rule, self.grid, self.comm = rule, grid, comm
        self.name, self.matrices = f"{bucket.name} matrices", matrices
        self.params = list({id(m.param): (m.param, m.group) for m in matrices}.values())
        self.dtype = rule.dtype(matrices[0].param)
        self.alike = [each for each in matrices if each.owner is None]
        owned: list[list[Matrix]] = [[] for _ in range(comm.size)]
        for each in matrices:
            if each.owner is not None:
                owned[each.owner].append(each)
        me, ranks, given = comm.rank, range(comm.size), range(rule.num_given)
        self.own = owned[me]
        # by the other rank: what travels to owners from here, and here; then the updates
        self.to_owners = [[m for m in owned[o] if m.gives(me, o) and _numel(m.parts[me])] for o in ranks]
        froms = [[m for m in self.own if m.gives(r, me) and _numel(m.parts[r])] for r in ranks]
        self.to_here = [[(m, m.parts[r], place) for m in froms[r] for place in given] for r in ranks]
        self.updates_from = [[(m, m.parts[me], 0) for m in owned[o] if _numel(m.parts[me])] for o in ranks]
        self.updates_to = [[m for m in self.own if _numel(m.parts[r])] for r in ranks]
        self.is_shared = any(owned)
        self.whole: dict[int, list[Tensor]] = {}

    def begin(self, groups: Sequence[dict[str, Any]], state: Any) -> None:
        """Send to owners. *Collective.*"""
        me = self.comm.rank
        given = {id(param): self.rule.give(groups[number], param, state[param]) for param, number in self.params}
        self.whole = {
            id(m): [m.here(me, each).to(self.dtype, copy=True) for each in given[id(m.param)]] for m in self.alike
        }
        if self.is_shared:
            parts = [[m.here(me, each) for m in of_owner for each in given[id(m.param)]] for of_owner in self.to_owners]
            self.exchange = Exchange(self.comm, Label("all_to_all", self.name), self.dtype, parts, self.to_here)

    def gather(self) -> list[Matrix]:
        """Matrices that are worked out here, with their tensors in `whole`. *Collective.*"""
        for m in self.own:
            self.whole[id(m)] = [
                torch.empty(m.shape, dtype=self.dtype, device=self.comm.runtime.device)
                for _ in range(self.rule.num_given)
            ]
        for (matrix, box, place), values in self.exchange.wait() if self.is_shared else ():
            _within(self.whole[id(matrix)][place], box, matrix.box).copy_(values)
        return [*self.alike, *self.own]

    def spread(self, results: Mapping[int, Tensor]) -> None:
        """Send results back, by identity of the matrix. *Collective.*"""
        self.results, self.whole = results, {}
        if self.is_shared:
            given = [[m.part(results[id(m)], rank) for m in of_rank] for rank, of_rank in enumerate(self.updates_to)]
            label = Label("all_to_all", f"{self.name} back")
            self.exchange = Exchange(self.comm, label, self.dtype, given, self.updates_from)

    def finish(self, groups: Sequence[dict[str, Any]]) -> None:
        coming = self.exchange.wait() if self.is_shared else ()
        updates = chain(((m, self.results[id(m)]) for m in self.alike), ((due[0], values) for due, values in coming))
        for m, values in updates:
            rows = m.here(self.comm.rank, values_here(m.param))
            self.rule.take(groups[m.group], m, rows, values.to(rows.device))
        self.results = {}


class MuonRule:
    """torch's Muon, and `harness.muon.MuonWithAdamW`: momentum, decay and the last addition are made of rows where they
    lie ([Note: Parts of Muon]), and 16 bits travel each way."""

    num_given = 1

    def needs(self, group: Mapping[str, Any], param: Tensor) -> bool:
        return steps_matrices(group)

    def cut(self, group: Mapping[str, Any], shape: torch.Size, name: str) -> tuple[int, int, Iterator[Box]]:
        rows, columns = matrices_of(shape, group, name)
        return rows, columns, boxes(shape, rows)

    def cost(self, group: Mapping[str, Any], rows: int, columns: int) -> int:
        return multiplications(rows, columns, group["ns_steps"])

    def dtype(self, param: Tensor) -> torch.dtype:
        return WIRE

    def give(self, group: Mapping[str, Any], param: Tensor, held: dict[str, Any]) -> list[Tensor]:
        if MOMENTUM not in held:
            held[MOMENTUM] = torch.zeros_like(param, requires_grad=False)
        grad = values_here(cast(Tensor, grad_of(param))).to(param.dtype)
        return [mix(group, grad, values_here(held[MOMENTUM]))]

    def work(self, optimizer: Opt, lanes: Sequence[Lane], step: Callable[[Mapping[int, Tensor]], None]) -> None:
        step({})
        groups = optimizer.param_groups
        for lane in lanes:
            results = {}
            for m in lane.gather():
                whole = lane.whole[id(m)][0].view(-1, m.rows, m.columns)
                results[id(m)] = orthogonalize(groups[m.group], whole).reshape(m.shape)
            lane.spread(results)

    def take(self, group: Mapping[str, Any], matrix: Matrix, rows: Tensor, values: Tensor) -> None:
        decay(group, rows)
        add(group, rows, values, matrix.rows, matrix.columns)

    def settle(self, param: Tensor, held: dict[str, Any], grid: Grid, owner: int | None) -> None:
        value = held.get(MOMENTUM)
        if value is not None and getattr(value, "placements", None) != getattr(param, "placements", None):
            held[MOMENTUM] = torch.zeros_like(param, dtype=value.dtype, requires_grad=False)
            fill(held[MOMENTUM], value)


class MatrixStep:
    """Runs in place of an optimizer's `step`, and calls that for what it does not need whole."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._grids: dict[tuple[Mesh, Communicator | None], Grid] = {}
        self._kinds: dict[int, Any] = {}
        self._matrices: dict[int, list[Matrix]] = {}
        self._given: list[int] = []
        self._lanes: list[Lane] = []

    def params(self, optimizer: Opt) -> list[tuple[int, Tensor]]:
        """Sharded parameters that are needed whole, with the number of their group."""
        numbered = enumerate(optimizer.param_groups)
        found = ((n, group, param) for n, group in numbered for param in group["params"])
        return [(n, p) for n, group, p in found if location_of(p) is not None and self.rule.needs(group, p)]

    @torch.compiler.disable  # type: ignore[untyped-decorator] # torch's
    @torch.no_grad()
    @by_engine
    def step(self, optimizer: Opt, rule: Callable[[Opt], Any]) -> None:
        """*Collective.*"""
        groups, whole = optimizer.param_groups, self.params(optimizer)
        lanes = self._lanes_of(groups, whole)
        for lane in lanes:
            lane.begin(groups, optimizer.state)

        def step_rest(instead: Mapping[int, Tensor]) -> None:
            held, out = [group["params"] for group in groups], {id(param) for _, param in whole} - instead.keys()
            for group in groups:
                group["params"] = [instead.get(id(each), each) for each in group["params"] if id(each) not in out]
            try:
                rule(optimizer)
            finally:
                for group, params in zip(groups, held, strict=True):
                    group["params"] = params

        self.rule.work(optimizer, lanes, step_rest)
        for lane in lanes:
            lane.finish(groups)

    @torch.no_grad()
    @by_engine
    def settle(self, optimizer: Opt) -> None:
        """Put state that was loaded where it belongs. *Collective.*"""
        whole = self.params(optimizer)
        self._plan(optimizer.param_groups, whole)
        for _, param in whole:
            if self._matrices.get(id(param)) and (held := optimizer.state.get(param)):
                self.rule.settle(param, held, self._grid(bucket_of(param)), self._matrices[id(param)][0].owner)

    def _plan(self, groups: Sequence[dict[str, Any]], whole: Sequence[tuple[int, Tensor]]) -> None:
        """Owners of what is trained now and has none. They stay: state lies there, and keeps its strides."""
        new = list[Matrix]()
        for number, param in whole:
            kind = number, bucket_of(param).cuts.own
            if (param.requires_grad or grad_of(param) is not None) and self._kinds.get(id(param)) != kind:
                self._kinds[id(param)] = kind
                self._matrices[id(param)] = self._matrices_of(groups[number], number, param)
                new += self._matrices[id(param)]
        by_grid: dict[int, tuple[Grid, list[tuple[Matrix, Work]]]] = {}
        for m in new:
            grid = self._grid(bucket_of(m.param))
            work = m.work(
                self.rule.cost(groups[m.group], m.rows, m.columns) * _numel(m.box) // (m.rows * m.columns or 1)
            )
            if is_shared(work, grid.comm.size):
                by_grid.setdefault(id(grid), (grid, []))[1].append((m, work))
        for grid, shared in by_grid.values():
            for (m, _), owner in zip(shared, owners_of([work for _, work in shared], grid.comm.size), strict=True):
                m.owner = owner

    def _lanes_of(self, groups: Sequence[dict[str, Any]], whole: Sequence[tuple[int, Tensor]]) -> list[Lane]:
        self._plan(groups, whole)
        given = [self._matrices[id(param)] for _, param in whole if grad_of(param) is not None]
        if [id(each) for each in given] != self._given:
            self._given = [id(each) for each in given]
            by_bucket: dict[ParamGroup, list[Matrix]] = {}
            for matrices in filter(None, given):  # one without elements has none
                by_bucket.setdefault(bucket_of(matrices[0].param), []).extend(matrices)
            self._lanes = [Lane(self.rule, bucket, self._grid(bucket), each) for bucket, each in by_bucket.items()]
        return self._lanes

    def _matrices_of(self, group: dict[str, Any], number: int, param: Tensor) -> list[Matrix]:
        bucket = bucket_of(param)
        _, index = cast(tuple[ShardedParameters, int], location_of(param))
        grid, shape = self._grid(bucket), torch.Size(bucket.tp_shard_of(bucket.layout.slots[index]).shape)
        rows, columns, found = self.rule.cut(group, shape, f"parameter {getattr(param, HOME)[0]}")
        regions = Regions(bucket, grid.places)
        everywhere = [regions.of(index, rank) for rank in range(grid.comm.size)]
        gives = partial(regions.gives, index)
        return [Matrix(param, number, rows, columns, box, everywhere, gives) for box in found]

    def _grid(self, bucket: ParamGroup) -> Grid:
        key = bucket.mesh, bucket.tp
        if key not in self._grids:
            self._grids[key] = Grid.of(*key)
        return self._grids[key]


def bucket_of(param: Tensor) -> ParamGroup:
    return cast(tuple[ShardedParameters, int], location_of(param))[0].bucket


def _numel(box: Box) -> int:
    return prod(end - begin for begin, end in box)


def _overlap(one: Box, other: Box) -> Box:
    spans = ((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return tuple((begin, max(begin, end)) for begin, end in spans)


def _within(tensor: Tensor, box: Box, origin: Box) -> Tensor:
    return tensor[tuple(slice(begin - o, end - o) for (begin, end), (o, _) in zip(box, origin, strict=True))]
