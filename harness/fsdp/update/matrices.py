"""Steps of what an optimizer needs whole: rows are brought to an owner, and what it makes of them back.

[Note: Owners] An owner is any rank that has a part of the bucket, along both data-parallel axes and the tensor-parallel
one. Owners are planned from the places that all ranks tell once. Each bucket has one all-to-all to its owners and one
back; those of later buckets travel while an earlier one's matrices are worked on. One process makes the same products
of the same shapes, so that bits do not depend on the layout.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.fsdp.comm import events
from harness.fsdp.comm.communicator import Communicator, Pending
from harness.fsdp.comm.events import Label
from harness.fsdp.comm.mesh import Mesh, all_values, crossed
from harness.fsdp.storage.at_rest import location_of
from harness.fsdp.storage.dtensors import laid_as
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.parameter_access import HOME, by_engine, grad_of
from harness.fsdp.tensor_parallel import values_here
from harness.muon import MOMENTUM, WIRE, add, boxes, matrices_of, mix, multiplications, orthogonalize, steps_matrices

Opt = torch.optim.Optimizer
Box = tuple[tuple[int, int], ...]  # begin and end in each dimension of a parameter; a scalar counts as a vector of one
Group = Mapping[str, Any]


@dataclass(eq=False)
class Matrix:
    """One matrix of a parameter, several of a stack, or all of it.

    group: number of the parameter's. box: of the matrix in the parameter. regions: of the parameter, by rank. having:
    ranks that have each of these. owner: None where every rank works it out alike.
    """

    param: Tensor
    group: int
    rows: int
    columns: int
    box: Box
    regions: Sequence[Box]
    having: Mapping[Box, Sequence[int]]
    owner: int | None = None

    def __post_init__(self) -> None:
        self.shape = [end - begin for begin, end in self.box]
        self.parts = [_overlap(self.box, region) for region in self.regions]
        self.holders = [rank for rank, part in enumerate(self.parts) if part == self.box]

    def here(self, rank: int, values: Tensor) -> Tensor:
        """The rank's part of the matrix in what the rank has of a tensor of the parameter's shape."""
        region = self.regions[rank]
        return _within(values.view([end - begin for begin, end in region]), self.parts[rank], region)

    def part(self, whole: Tensor, rank: int) -> Tensor:
        return _within(whole, self.parts[rank], self.box)

    def is_of(self, owner: int, rank: int) -> bool:
        """True if the owner works it out for a rank that has a part."""
        return owner == (rank if self.owner is None else self.owner) and _numel(self.parts[rank]) > 0

    def is_given(self, rank: int, owner: int) -> bool:
        """True if the owner gets the rank's part from that rank, and not from another one that has the same: replicas
        of rows do not travel, as an owner gets them from the rank whose place among these is its own."""
        if not self.is_of(owner, rank):
            return False
        same, owners = (self.having[self.regions[each]] for each in (rank, owner))
        return rank == same[owners.index(owner) * len(same) // len(owners)]


class Lane:
    """Matrices of one bucket."""

    def __init__(self, rule: MatrixStep, comm: Communicator, name: str, matrices: Sequence[Matrix]) -> None:
        self.rule, self.comm, self.name, self.matrices = rule, comm, f"{name} matrices", matrices
        self.params = list({id(m.param): (m.param, m.group) for m in matrices}.values())
        self._like = torch.empty(0, dtype=rule.wire or matrices[0].param.dtype, device=comm.runtime.device)
        self._is_shared = any(m.owner is not None for m in matrices)
        me, ranks = comm.rank, range(comm.size)
        self.own = [m for m in matrices if m.owner in (None, me)]
        # by the other rank: what travels to owners from here, and here; then the updates
        self._to_owners = [(m, o) for o in ranks for m in matrices if m.is_given(me, o)]
        self._to_here = [(m, r) for r in ranks for m in self.own if m.is_given(r, me)]
        self._updates_from = [(m, o) for o in ranks for m in matrices if m.is_of(o, me)]
        self._updates_to = [(m, r) for r in ranks for m in self.own if m.is_of(me, r)]

    def begin(self, groups: Sequence[Group], state: Any) -> None:
        """Send to owners. *Collective.*"""
        me = self.comm.rank
        given = {id(param): self.rule.give(groups[number], param, state[param]) for param, number in self.params}
        self._count = len(given[id(self.params[0][0])])
        parts = [(o, m.here(me, each)) for m, o in self._to_owners for each in given[id(m.param)]]
        self._send(self.name, parts, [(r, m.parts[r]) for m, r in self._to_here for _ in range(self._count)])

    def gather(self) -> list[tuple[Matrix, list[Tensor]]]:
        """Matrices that are worked out here, with their tensors whole. *Collective.*"""
        whole = {id(m): [self._like.new_empty(m.shape) for _ in range(self._count)] for m in self.own}
        came = iter(self._receive())
        for part in (m.part(each, rank) for m, rank in self._to_here for each in whole[id(m)]):
            part.copy_(next(came).view(part.shape))
        return [(m, whole[id(m)]) for m in self.own]

    def spread(self, results: Mapping[int, Tensor]) -> None:
        """Send results back, by identity of the matrix. *Collective.*"""
        given = [(r, m.part(results[id(m)], r)) for m, r in self._updates_to]
        self._send(f"{self.name} back", given, [(o, m.parts[self.comm.rank]) for m, o in self._updates_from])

    def finish(self, groups: Sequence[Group]) -> None:
        for (m, _), values in zip(self._updates_from, self._receive(), strict=True):
            rows = m.here(self.comm.rank, values_here(m.param))
            self.rule.take(groups[m.group], m, rows, values.view(rows.shape).to(rows.device))

    def _send(self, name: str, given: Sequence[tuple[int, Tensor]], coming: Sequence[tuple[int, Box]]) -> None:
        """One all-to-all, by rank. *Collective* where an owner works for others."""
        flat = [each.to(self._like.device, self._like.dtype).flatten() for _, each in given]
        self._came = sent = torch.cat([self._like, *flat])
        self._label, self._pending = Label("all_to_all", name), Pending([])
        self._lengths = [_numel(box) for _, box in coming]
        if self._is_shared:
            sizes, lengths = [0] * self.comm.size, [0] * self.comm.size
            for rank, part in given:
                sizes[rank] += part.numel()
            for rank, box in coming:
                lengths[rank] += _numel(box)
            self._came = sent.new_empty(sum(lengths))
            with events.begin(self._label):
                work = self.comm.group.alltoall_base(self._came, sent, lengths, sizes)
            self._pending = Pending([work], [sent])

    def _receive(self) -> Sequence[Tensor]:
        if self._is_shared:
            with events.waiting(self._label):
                self._pending.wait()
        came, self._came = self._came, self._like
        return cast(Sequence[Tensor], came.split(self._lengths))


class MatrixStep:
    """Runs in place of an optimizer's `step`, and calls that for what it does not need whole.

    Of torch's Muon, and `harness.muon.MuonWithAdamW`: momentum, decay and the last addition are made of rows where they
    lie ([Note: Parts of Muon]), and 16 bits travel each way. A subclass has another rule.

    wire: dtype in which all travels; None: the parameter's.
    """

    wire: torch.dtype | None = WIRE

    def __init__(self) -> None:
        self._comms: dict[tuple[Mesh, Communicator | None], Communicator] = {}
        self._matrices: dict[tuple[int, int], list[Matrix]] = {}  # by group, and identity of the parameter
        self._given: list[int] = []
        self._lanes: list[Lane] = []

    # -- the rule ------------------------------------------------------------------------------------------------------

    def needs(self, group: Group, param: Tensor) -> bool:
        return steps_matrices(group)

    def cut(self, group: Group, param: Tensor) -> tuple[int, int, Iterable[Box]]:
        """(rows, columns, boxes) of a parameter's matrices."""
        rows, columns = matrices_of(param.shape, group, f"parameter {getattr(param, HOME)[0]}")
        return rows, columns, boxes(param.shape, rows)

    def cost(self, group: Group, m: Matrix) -> int:
        return multiplications(m.rows, m.columns, group["ns_steps"]) * _numel(m.box) // (m.rows * m.columns)

    def give(self, group: Group, param: Tensor, held: dict[str, Any]) -> list[Tensor]:
        """Tensors of a parameter that travel, in the places of its rows here. held: its state."""
        if MOMENTUM not in held:
            held[MOMENTUM] = torch.zeros_like(param, requires_grad=False)
        grad = values_here(cast(Tensor, grad_of(param))).to(param.dtype)
        return [mix(group, grad, values_here(held[MOMENTUM]))]

    def work(self, optimizer: Opt, lanes: Sequence[Lane], step: Callable[[Mapping[int, Tensor]], None]) -> None:
        """Gather all lanes, and spread their results. *Collective.*

        step: runs the optimizer's own `step` once on what is not needed whole, and on parameters by identity of those
        that they stand for.
        """
        step({})
        for lane in lanes:
            results = {}
            for m, (whole,) in lane.gather():
                group = optimizer.param_groups[m.group]
                results[id(m)] = orthogonalize(group, whole.view(-1, m.rows, m.columns)).reshape(m.shape)
            lane.spread(results)

    def take(self, group: Group, m: Matrix, rows: Tensor, values: Tensor) -> None:
        """Update rows of a parameter by those of a result."""
        add(group, rows, values, m.rows, m.columns)

    def put_state(self, m: Matrix, held: dict[str, Any], comm: Communicator) -> None:
        """Put state, as it was loaded perhaps, where it belongs. *Collective.*"""
        value = held.get(MOMENTUM)
        if value is not None and getattr(value, "placements", None) != getattr(m.param, "placements", None):
            held[MOMENTUM] = laid_as(m.param, value)

    # -- for any rule --------------------------------------------------------------------------------------------------

    def params(self, optimizer: Opt) -> list[tuple[int, Tensor]]:
        """Sharded parameters that are needed whole, with the number of their group."""
        return [
            (number, param)
            for number, group in enumerate(optimizer.param_groups)
            for param in group["params"]
            if location_of(param) is not None and self.needs(group, param)
        ]

    def comm_of(self, param: Tensor) -> Communicator:
        """Ranks that have parts of a parameter. *Collective* the first time."""
        bucket = _bucket_of(param)
        key = bucket.mesh, bucket.tp
        if key not in self._comms:
            self._comms[key] = crossed(bucket.mesh.everyone, bucket.tp)
        return self._comms[key]

    @torch.compiler.disable  # type: ignore[untyped-decorator] # torch's
    @torch.no_grad()
    @by_engine
    def step(self, optimizer: Opt, rule: Callable[[Opt], Any]) -> None:
        """*Collective.*"""
        groups, whole = optimizer.param_groups, self.params(optimizer)
        lanes = self._lanes_of(whole)
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

        self.work(optimizer, lanes, step_rest)
        for lane in lanes:
            lane.finish(groups)

    @torch.no_grad()
    @by_engine
    def settle(self, optimizer: Opt) -> None:
        """Plan owners, and put state where it belongs; before each `step`. *Collective.*"""
        whole = self.params(optimizer)
        self._plan(optimizer.param_groups, whole)
        for number, param in whole:
            if (made := self._matrices.get((number, id(param)))) and (held := optimizer.state.get(param)):
                self.put_state(made[0], held, self.comm_of(param))

    def _lanes_of(self, whole: Sequence[tuple[int, Tensor]]) -> list[Lane]:
        given = [self._matrices[n, id(param)] for n, param in whole if grad_of(param) is not None]
        if [id(each) for each in given] != self._given:
            self._given = [id(each) for each in given]
            by_bucket: dict[ParamGroup, list[Matrix]] = {}
            for matrices in filter(None, given):  # one without elements has none
                by_bucket.setdefault(_bucket_of(matrices[0].param), []).extend(matrices)
            self._lanes = [Lane(self, self.comm_of(ms[0].param), b.name, ms) for b, ms in by_bucket.items()]
        return self._lanes

    def _plan(self, groups: Sequence[Group], whole: Sequence[tuple[int, Tensor]]) -> None:
        """Owners of what is trained now and has none. They stay: state lies there, and keeps its strides.
        *Collective* where there is something new."""
        new: dict[Communicator, list[tuple[int, Tensor]]] = {}
        for number, param in whole:
            if (param.requires_grad or grad_of(param) is not None) and (number, id(param)) not in self._matrices:
                new.setdefault(self.comm_of(param), []).append((number, param))
        for comm, params in new.items():
            flat = [each for _, param in params for span in _box_here(param) for each in span]
            told = all_values(comm, torch.tensor(flat, device=comm.runtime.device), "places of parameters").tolist()
            begin, works = 0, list[tuple[Matrix, Work]]()
            for number, param in params:
                end, having = begin + 2 * max(param.dim(), 1), dict[Box, list[int]]()
                regions = [tuple(zip(row[begin:end:2], row[begin + 1 : end : 2], strict=True)) for row in told]
                for rank, region in enumerate(regions):
                    having.setdefault(region, []).append(rank)
                rows, columns, found = self.cut(groups[number], param)
                made = [Matrix(param, number, rows, columns, box, regions, having) for box in found]
                works += [(m, Work(self.cost(groups[number], m), 2 * _numel(m.box), m.holders)) for m in made]
                begin, self._matrices[number, id(param)] = end, made
            shared = [(m, work) for m, work in works if is_shared(work, comm.size)]
            for (m, _), owner in zip(shared, owners_of([work for _, work in shared], comm.size), strict=True):
                m.owner = owner


# -- owners, planned from shapes: pure arithmetic, the same on every rank ----------------------------------------------

WORTH = 4096
"""Multiplications that take as long as a byte does from rank to rank: 400 TFLOPS in 16 bits beside 50 GB/s."""


@dataclass(frozen=True)
class Work:
    """cost: multiplications. num_bytes: of the result. holders: ranks that hold the whole matrix anyway."""

    cost: int
    num_bytes: int
    holders: Sequence[int] = ()


def is_shared(work: Work, num_ranks: int) -> bool:
    """True where one rank works for all: False where all have the matrix, and bringing the result takes longer."""
    return len(work.holders) < num_ranks or work.cost > WORTH * work.num_bytes


def least(costs: Sequence[int], num_ranks: int) -> int:
    """A bound that no distribution beats: the mean; the longest; and k + 1 of the kn + 1 longest, the shortest ones, as
    some rank has that many of them."""
    falling = [0, *accumulate(sorted(costs, reverse=True))]
    several = [
        falling[k * num_ranks + 1] - falling[k * (num_ranks - 1)] for k in range((len(costs) - 1) // num_ranks + 1)
    ]
    return max(-(-falling[-1] // num_ranks), *several, 0)


def owners_of(works: Sequence[Work], num_ranks: int) -> list[int]:
    """Owner of each matrix, by rank number: balanced by cost, and a holder where none waits for that."""
    bound = least([work.cost for work in works], num_ranks)
    limits = ((bound * percent // 100, tight) for percent in count(100) for tight in (False, True))
    tries = (_packed(works, num_ranks, most, tight=tight) for most, tight in limits)
    return next(found for found in tries if found is not None)


def _packed(works: Sequence[Work], num_ranks: int, most: int, *, tight: bool) -> list[int] | None:
    """The longest first, each to a holder with room for it, else to whoever has most, or (`tight`) just enough. None if
    somebody would have more than `most` to do."""
    owners, room, by_room = [0] * len(works), [most] * num_ranks, [(most, rank) for rank in range(num_ranks)]
    for place in sorted(range(len(works)), key=lambda each: (-works[each].cost, each)):
        cost = works[place].cost
        free = [(room[rank], rank) for rank in works[place].holders if room[rank] >= cost]
        at = bisect_left(by_room, max(free) if free else (cost if tight else max(cost, by_room[-1][0]), 0))
        if at == num_ranks:
            return None
        left, owner = by_room.pop(at)
        room[owner] = left - cost
        insort(by_room, (room[owner], owner))
        owners[place] = owner
    return owners


# -- boxes -------------------------------------------------------------------------------------------------------------


def _bucket_of(param: Tensor) -> ParamGroup:
    return cast(ParamGroup, cast(Any, location_of(param))[0].bucket)


def _box_here(param: Tensor) -> Box:
    if not isinstance(param, DTensor):
        return tuple((0, size) for size in param.shape or (1,))
    chunks = cast(Any, param).__create_chunk_list__()
    if not chunks:
        return ((0, 0),) * max(param.dim(), 1)
    offsets, sizes = chunks[0].offsets or (0,), chunks[0].sizes or (1,)
    return tuple((begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))


def _numel(box: Box) -> int:
    return prod(end - begin for begin, end in box)


def _overlap(one: Box, other: Box) -> Box:
    spans = ((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return tuple((begin, max(begin, end)) for begin, end in spans)


def _within(tensor: Tensor, box: Box, origin: Box) -> Tensor:
    return tensor[tuple(slice(begin - o, end - o) for (begin, end), (o, _) in zip(box, origin, strict=True))]
