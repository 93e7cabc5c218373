"""Steps of matrices that an optimizer needs whole: rows are brought to the matrix's owner, and its update back.

[Note: Owners of matrices] Storage knows nothing of owners: momentum is cut as every state, and elementwise arithmetic
is made of rows where they lie ([Note: Parts of Muon]). An owner is any rank that has a part of the bucket, along both
data-parallel axes and the tensor-parallel one. Owners are planned from shapes whenever pieces are. Each bucket has one
all-to-all to its owners and one back, in 16 bits. The first ones of all buckets are issued at once, so that those of
later buckets travel while an earlier one's matrices are worked on. Replicas of rows do not travel: an owner gets
them from the rank whose place on that axis is its own.

One process makes the same products of the same shapes, so that bits do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import Communicator, Pending
from harness.fsdp.comm.events import Label
from harness.fsdp.comm.mesh import Mesh, all_values, crossed
from harness.fsdp.storage.at_rest import ShardedParameters, location_of
from harness.fsdp.storage.layout import ParamSpec, plan_bucket
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.parameter_access import HOME, by_engine, grad_of
from harness.fsdp.storage.placement import SHARD
from harness.fsdp.update.flat_step import Piece
from harness.fsdp.update.owners import Work, is_shared, owners_of
from harness.fsdp.update.rules import moments_of
from harness.muon import (
    MOMENTUM,
    WIRE,
    MuonWithAdamW,
    add,
    boxes,
    decay,
    matrices_of,
    mix,
    multiplications,
    orthogonalize,
    step_alone,
    step_rest,
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
    """Which part of each of a bucket's parameters each rank has."""

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
        found = [(0, size) for size in tp_shard.shape]
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
    """One matrix of a parameter.

    index: of the parameter in its bucket. box: of the matrix in the parameter. regions, parts: of the parameter, and of
    the matrix, by rank. owner: None where every rank works it out alike.
    """

    piece: Piece
    group: int
    index: int
    rows: int
    columns: int
    box: Box
    regions: list[Box]
    gives: Callable[[int, int], bool]
    owner: int | None = None

    @cached_property
    def parts(self) -> list[Box]:
        return [_overlap(self.box, region) for region in self.regions]

    def work(self, iterations: int) -> Work:
        holders = [rank for rank, part in enumerate(self.parts) if part == self.box]
        return Work(multiplications(self.rows, self.columns, iterations), 2 * self.rows * self.columns, holders)

    def here(self, rank: int, piece: Tensor) -> Tensor:
        """The rank's part of the matrix in a flat tensor that is cut as its piece."""
        region = self.regions[rank]
        shape = [end - begin for begin, end in region]
        return _within(piece[: prod(shape)].view(shape), self.parts[rank], region)

    def part(self, whole: Tensor, rank: int) -> Tensor:
        return _within(whole, self.parts[rank], self.box)

    @property
    def shape(self) -> list[int]:
        return [end - begin for begin, end in self.box]


class Exchange:
    """One all-to-all: `given[rank]` to each rank, and what `due[rank]` says from each, with its place in `received`."""

    def __init__(
        self, comm: Communicator, label: Label, given: list[list[Tensor]], due: list[list[tuple[Matrix, Box]]]
    ) -> None:
        views = [view for of_rank in given for view in of_rank]
        sizes = [sum(view.numel() for view in of_rank) for of_rank in given]
        sent = torch.empty(sum(sizes), dtype=WIRE, device=comm.runtime.device)
        for view, space in zip(views, sent.split([view.numel() for view in views]), strict=True):
            space.view(view.shape).copy_(view)
        self._due = [each for of_rank in due for each in of_rank]
        self._lengths = [_numel(box) for _, box in self._due]
        coming = [sum(_numel(box) for _, box in of_rank) for of_rank in due]
        self._label, self._received, self._pending = label, sent, Pending([])
        if comm.size > 1:
            self._received = torch.empty(sum(coming), dtype=WIRE, device=sent.device)
            with events.begin(label):
                work = comm.group.alltoall_base(self._received, sent, coming, sizes)
            self._pending = Pending([work], [sent])

    def wait(self) -> list[tuple[Matrix, Box, Tensor]]:
        with events.waiting(self._label):
            self._pending.wait()
        found = zip(self._due, self._received.split(self._lengths), strict=True)
        return [(matrix, box, values.view([end - begin for begin, end in box])) for (matrix, box), values in found]


class Lane:
    """Matrices of one bucket."""

    def __init__(self, bucket: ParamGroup, comm: Communicator, matrices: list[Matrix]) -> None:
        self.comm, self.name, self.matrices = comm, f"{bucket.name} matrices", matrices
        self.alike = [each for each in matrices if each.owner is None]
        owned: list[list[Matrix]] = [[] for _ in range(comm.size)]
        for each in matrices:
            if each.owner is not None:
                owned[each.owner].append(each)
        me, ranks = comm.rank, range(comm.size)
        self.own = owned[me]
        # by the other rank: what travels to owners from here, and here; then the updates
        self.to_owners = [[m for m in owned[o] if m.gives(me, o) and _numel(m.parts[me])] for o in ranks]
        self.to_here = [[(m, m.parts[r]) for m in self.own if m.gives(r, me) and _numel(m.parts[r])] for r in ranks]
        self.updates_from = [[(m, m.parts[me]) for m in owned[o] if _numel(m.parts[me])] for o in ranks]
        self.updates_to = [[m for m in self.own if _numel(m.parts[r])] for r in ranks]
        self.is_shared = any(owned)

    def begin(self, groups: Sequence[dict[str, Any]], state: Any) -> None:
        """Advance momenta, and send to owners. *Collective.*"""
        mixed: dict[int, Tensor] = {}
        for piece, number in {id(m.piece): (m.piece, m.group) for m in self.matrices}.values():
            grad, held = cast(Tensor, grad_of(piece.flat)), state[piece.flat]
            if MOMENTUM not in held:
                held[MOMENTUM] = torch.zeros_like(grad)
            mixed[id(piece)] = mix(groups[number], grad, held[MOMENTUM])
        me = self.comm.rank
        self.whole = {id(m): m.here(me, mixed[id(m.piece)]).to(WIRE, copy=True) for m in self.alike}
        if self.is_shared:
            given = [[m.here(me, mixed[id(m.piece)]) for m in of_owner] for of_owner in self.to_owners]
            self.exchange = Exchange(self.comm, Label("all_to_all", self.name), given, self.to_here)

    def work(self, groups: Sequence[dict[str, Any]]) -> None:
        """Orthogonalize what is owned here, and send updates. *Collective.*"""
        self.whole |= {id(m): torch.empty(m.shape, dtype=WIRE, device=self.comm.runtime.device) for m in self.own}
        for matrix, box, values in self.exchange.wait() if self.is_shared else ():
            _within(self.whole[id(matrix)], box, matrix.box).copy_(values)
        for m in (*self.alike, *self.own):
            found = orthogonalize(groups[m.group], self.whole[id(m)].view(m.rows, m.columns))
            self.whole[id(m)] = found.reshape(m.shape)
        if self.is_shared:
            given = [[m.part(self.whole[id(m)], rank) for m in of_rank] for rank, of_rank in enumerate(self.updates_to)]
            self.exchange = Exchange(self.comm, Label("all_to_all", f"{self.name} back"), given, self.updates_from)

    def finish(self, groups: Sequence[dict[str, Any]]) -> None:
        for piece, number in {id(m.piece): (m.piece, m.group) for m in self.matrices}.values():
            decay(groups[number], piece.flat)
        me = self.comm.rank
        updates = [(m, self.whole[id(m)]) for m in self.alike]
        updates += [(m, values) for m, _, values in self.exchange.wait()] if self.is_shared else []
        for m, values in updates:
            target = m.here(me, m.piece.flat)
            add(groups[m.group], target, values.to(target.device), m.rows, m.columns)
        self.whole = {}


class MatrixStep:
    """Runs in place of the rule of torch's Muon, and of `harness.muon.MuonWithAdamW`, on flat pieces."""

    def __init__(self) -> None:
        self._grids: dict[tuple[Mesh, Communicator | None], Grid] = {}
        self._planned: Any = None
        self._lanes: list[Lane] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator] # torch's
    @torch.no_grad()
    @by_engine
    def step(self, optimizer: Opt, plan: list[list[Any]], rule: Callable[[Opt], Any]) -> None:
        """plan: pieces, and parameters of no model that is sharded, by group; a matrix is a piece. *Collective.*"""
        groups = optimizer.param_groups
        if self._planned is not plan:
            self._lanes, self._planned = self._lanes_of(groups, plan), plan
        for lane in self._lanes:
            lane.begin(groups, optimizer.state)
        self._step_others(optimizer, plan, rule)
        for lane in self._lanes:
            lane.work(groups)
        for lane in self._lanes:
            lane.finish(groups)

    @staticmethod
    def _step_others(optimizer: Opt, plan: list[list[Any]], rule: Callable[[Opt], Any]) -> None:
        groups = optimizer.param_groups
        for group, entries in zip(groups, plan, strict=True):
            for param in entries if steps_matrices(group) else ():
                if not isinstance(param, Piece) and param.grad is not None:
                    step_alone(group, param, param.grad, optimizer.state[param])
        step_rest(optimizer, rule)

    def _lanes_of(self, groups: Sequence[dict[str, Any]], plan: list[list[Any]]) -> list[Lane]:
        by_bucket: dict[ParamGroup, list[Matrix]] = {}
        for number, (group, entries) in enumerate(zip(groups, plan, strict=True)):
            for piece in entries if steps_matrices(group) else ():
                if isinstance(piece, Piece):
                    by_bucket.setdefault(piece.span.bucket, []).extend(self._matrices(group, number, piece))
        by_grid: dict[int, tuple[Grid, list[Matrix]]] = {}
        for bucket, matrices in by_bucket.items():
            matrices.sort(key=lambda m: (m.group, m.index, m.box))  # pieces are in another order on each rank
            grid = self._grid(bucket)
            by_grid.setdefault(id(grid), (grid, []))[1].extend(matrices)
        for grid, matrices in by_grid.values():
            works = [(m, m.work(groups[m.group]["ns_steps"])) for m in matrices]
            shared = [(m, work) for m, work in works if is_shared(work, grid.comm.size)]
            for (m, _), owner in zip(shared, owners_of([work for _, work in shared], grid.comm.size), strict=True):
                m.owner = owner
        return [Lane(bucket, self._grid(bucket).comm, matrices) for bucket, matrices in by_bucket.items()]

    def _matrices(self, group: dict[str, Any], number: int, piece: Piece) -> list[Matrix]:
        param, bucket, grid = piece.params[0], piece.span.bucket, self._grid(piece.span.bucket)
        _, index = cast(tuple[ShardedParameters, int], location_of(param))
        shape = torch.Size(bucket.tp_shard_of(bucket.layout.slots[index]).shape)
        stack, rows, columns = matrices_of(shape, group, f"parameter {getattr(param, HOME)[0]}")
        regions = Regions(bucket, grid.places)
        everywhere = [regions.of(index, rank) for rank in range(grid.comm.size)]

        def gives(rank: int, owner: int) -> bool:
            return regions.gives(index, rank, owner)

        return [
            Matrix(piece, number, index, rows, columns, box, everywhere, gives) for box in boxes(shape, stack, rows)
        ]

    def _grid(self, bucket: ParamGroup) -> Grid:
        key = bucket.mesh, bucket.tp
        if key not in self._grids:
            self._grids[key] = Grid.of(*key)
        return self._grids[key]


def matrix_step_of(optimizer: Opt) -> Callable[[Opt, list[list[Any]], Callable[[Opt], Any]], None] | None:
    """None for an optimizer whose rule steps flat pieces, or sharded parameters, by itself."""
    is_known = isinstance(optimizer, torch.optim.Muon | MuonWithAdamW) and moments_of(optimizer) is not None
    return MatrixStep().step if is_known else None


def _numel(box: Box) -> int:
    return prod(end - begin for begin, end in box)


def _overlap(one: Box, other: Box) -> Box:
    spans = ((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return tuple((begin, max(begin, end)) for begin, end in spans)


def _within(tensor: Tensor, box: Box, origin: Box) -> Tensor:
    return tensor[tuple(slice(begin - o, end - o) for (begin, end), (o, _) in zip(box, origin, strict=True))]
