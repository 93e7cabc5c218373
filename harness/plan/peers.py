"""Bytes that other engines keep, hold at most and send on their first rank: formulas of torch 2.13 and of the releases
that adapters name.

`tests/plan` holds them against steps on real ranks: what is kept and sent to the byte, the peak within 5 %. Traffic is
that of a step after the first two. Beside what an engine allocates, gloo's all-gather has a copy of what it fills, and
its reduce-scatter one of what it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from torch import nn

from harness.config.derived import data_ranks, may_leave_unused, microbatches_per_rank, optimizer_states
from harness.config.schema import Config, Device, Numerics, OptimizerName, Strategy
from harness.fp8.linear import layers_of
from harness.fsdp.runtime.units import Unit
from harness.fsdp.storage.layout import round_up
from harness.fsdp.tensor_parallel import values_here
from harness.plan.activations import Mark, Recorded
from harness.plan.model import ROLES, Model
from harness.plan.peak import BUCKETS, SUMS, WAITING, WEIGHTS, Step
from harness.plan.wire import NUMBER, Rows, summed

COUNT, ADDRESS = 4, 16
"""Bytes of Adam's count of steps, and of the places where FSDP1 begins parameters."""
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Bytes at which DDP closes its first bucket and the others."""
STRATEGIES = list(Strategy)
ALL = "all"
"""Owner of what is not by unit."""


def alone(config: Config) -> Config:
    """The cell with our engine on one data-parallel rank: module, units and recorded traffic are as under others."""
    compute = config.dtype.compute
    return replace(
        config,
        engine=type(config.engine)(),
        sharding=replace(config.sharding, strategy=Strategy.no_shard),
        mesh=replace(config.mesh, world_size=config.mesh.tp, dp_outer=1),
        dtype=replace(config.dtype, main_grads=compute, grad_comm=compute, allow_low_precision_grads=True),
        nccl_ub=type(config.nccl_ub)(),
    )


def numel_here(param: nn.Parameter) -> int:
    return values_here(param).numel()


def elements(params: Iterable[nn.Parameter]) -> int:
    return sum(map(numel_here, params))


def inside(spans: Iterable[tuple[int, int]], shard: int) -> int:
    """Elements of these (begin, elements) among the first `shard`."""
    return sum(max(0, min(size, shard - begin)) for begin, size in spans)


class Peer(Step):
    """An engine's bytes: `count` adds up what it keeps and sends; what a step holds is as here where it says nothing.

    A backward gathers one unit ahead, and copies a unit's gradients to where they are sent from when all are in.

    Args:
        config: of the cell.
        model: of `alone`.
        recorded: for the order in which gradients come.
    """

    def __init__(self, config: Config, model: Model, recorded: Recorded) -> None:
        super().__init__(model.units, recorded.marks)
        dtype, mesh, module = config.dtype, config.mesh, model.module
        self.config, self.model, self.strategy = config, model, config.sharding.strategy
        self.stage, self.ranks = STRATEGIES.index(self.strategy), data_ranks(config)
        self.k = microbatches_per_rank(config)
        self.outer, self.inner = mesh.dp_outer, self.ranks // mesh.dp_outer
        self.sizes = {"inner": self.inner, "outer": self.outer, "all": mesh.world_size, "tp": mesh.tp}
        self.compute, self.main = dtype.compute.bytes, dtype.main_params.bytes
        self.grads, self.wire = dtype.main_grads.bytes, dtype.grad_comm.bytes
        self.gloo, self.states = int(config.cluster.device is Device.cpu), optimizer_states(config)
        self.counts = COUNT * (config.optimizer.name is not OptimizerName.sgd)
        self.arrivals = [mark.given // self.compute for mark in recorded.marks if mark.what == "gradient"]
        self.memory, self.rows = dict.fromkeys(ROLES, 0), Rows()
        self.memory["buffers"] = sum(buffer.nbytes for buffer in module.buffers())
        self.in_8_bits = {layer.weight for layer in layers_of(module) if layer.is_held}  # of main weights, at each use
        self.decays = {p: model.workload.decays(name, p.shape) for name, p in module.named_parameters()}
        self.params, self.trained = list(self.decays), [each for each in self.decays if each.requires_grad]
        homes = {p: unit for unit in model.units for bucket in unit.buckets for _, p in bucket.params}
        self.owned = [(unit, [each for each in self.params if homes[each] is unit]) for unit in model.units]
        # bytes of a unit's gradients as they are sent, and of what a rank gets of them
        self.sent, self.sums = dict[str, int](), dict[str, int]()
        self.count()
        self.kept = sum(self.memory.values()) - sum(self.sums.values())

    def count(self) -> None:
        raise NotImplementedError

    def keep(self, weights: int, trained: int, counted: int, padding: int = 0) -> None:
        """Elements of main weights, of trained ones with their moments, and of padding; counts of steps."""
        self.memory["main_weights"] += weights * self.main
        self.memory["main_grads"] += trained * self.grads
        self.memory["optimizer"] += self.states * trained * self.main + self.counts * counted
        self.memory["padding"] += padding * self.main

    def move(self, axis: str, kind: str, num_bytes: int, times: int = 1) -> None:
        """num_bytes: of a rank's shard, or of all that an all-reduce sums."""
        size = self.sizes[axis]
        if size > 1 and num_bytes and times:
            moved = summed(size, num_bytes) if kind == "all_reduce" else num_bytes * (size - 1)
            self.rows.sent(axis, kind, times * moved, times)

    # -- a step --------------------------------------------------------------------------------------------------------

    def beside_gather(self, size: int) -> int:
        """A cast shard, and gloo's own copy."""
        return self.gloo * size + (size // self.inner if self.compute != self.main else 0)

    def beside_sums(self, sent: int) -> int:
        """Bytes beside gradients that are being sent: this rank's sums, and gloo's copy."""
        return sent // self.inner + self.gloo * sent

    def stays(self, unit: Unit) -> bool:
        return not self.in_backward and (unit.is_root or self.strategy is Strategy.optim_grads)

    def on_gradient(self, mark: Mark, unit: Unit) -> None:
        self.live[BUCKETS][WAITING] += mark.given

    def on_done(self, mark: Mark, unit: Unit) -> None:
        sent = self.sent.get(unit.name, 0)
        self.drop(unit)
        self.take(BUCKETS, f"{unit.name} as sent", sent)
        self.note(f"backward of {unit.name}", mark.live)
        self.free(BUCKETS, WAITING)
        self.note(f"backward of {unit.name}", mark.live, self.beside_sums(sent))
        self.take(SUMS, unit.name, self.sums.get(unit.name, 0))

    def end(self) -> None:
        self.live[BUCKETS].clear()
        if self.last or self.strategy is not Strategy.optim_grads:
            self.live[WEIGHTS].clear()

    def update(self) -> None:
        """The norm squares the largest tensor in fp64."""
        self.note("update", 0, NUMBER * max((numel_here(each) for each in self.trained), default=0) // self.inner)


class Fsdp2(Peer):
    """Rows are dealt as by `torch.chunk`, and travel padded to the first rank's.

    A gather's result is copied into parameters, and stays in a forward until the next one's. Gradients as they are sent
    stay until the next unit's are in.
    """

    def count(self) -> None:
        self.keep(self.here(self.params), self.here(self.trained), len(self.trained))
        stays = self.strategy is Strategy.optim_grads
        for unit, params in self.owned:
            trained = self.here([each for each in params if each.requires_grad])
            self.whole[unit.name] = self.here(params) * self.compute * self.inner
            self.sent[unit.name], self.sums[unit.name] = trained * self.wire * self.inner, trained * self.grads
            times = 1 if stays else self.k * (1 if unit.is_root else 2)
            self.move("inner", "all_gather", self.here(params) * self.compute, times)
            self.move("inner", "reduce_scatter", trained * self.wire, self.k)
            self.move("outer", "all_reduce", trained * self.wire)
        self.move("inner", "all_reduce", NUMBER)
        self.move("tp", "all_reduce", NUMBER)

    def here(self, params: Sequence[nn.Parameter]) -> int:
        shapes = (values_here(each).shape for each in params)
        return sum(-(-shape[0] // self.inner) * prod(shape[1:]) for shape in shapes)

    def stays(self, unit: Unit) -> bool:
        if self.in_backward:
            return not self.last and self.strategy is Strategy.optim_grads
        return super().stays(unit)

    def on_forward(self, mark: Mark, unit: Unit) -> None:
        before = self.gathers.total()
        super().on_forward(mark, unit)
        if self.gathers.total() > before:
            self.take(WEIGHTS, ALL, self.whole[unit.name])

    def on_left(self, mark: Mark, unit: Unit) -> None:
        super().on_left(mark, unit)
        if unit.is_root:
            self.free(WEIGHTS, ALL)

    def on_done(self, mark: Mark, unit: Unit) -> None:
        for owner in [each for each in self.live[BUCKETS] if each != WAITING]:
            self.free(BUCKETS, owner)
        super().on_done(mark, unit)


class Fsdp1(Peer):
    """A unit is one flat tensor, its parameters placed on addresses; all of it is reduced.

    A backward ends with a flat tensor of the unit's gradients. Reduced ones stay until the next step's forward.
    """

    def count(self) -> None:
        self.is_whole = self.strategy is Strategy.no_shard
        stays, align = self.strategy is Strategy.optim_grads, max(1, ADDRESS // self.compute)
        over = self.ranks if self.is_whole else self.inner
        for unit, params in self.owned:
            end, spans = 0, []
            for each in params:
                spans.append((round_up(end, align), numel_here(each)))
                end = sum(spans[-1])
            shard = -(-end // over) * (over if self.is_whole else 1)
            flat = shard if any(each.requires_grad for each in params) else 0
            held = inside(spans, shard)
            trained = inside([span for span, each in zip(spans, params, strict=True) if each.requires_grad], shard)
            self.keep(held, trained, sum(each.requires_grad for each in params), shard - held + flat - trained)
            self.sums[unit.name] = flat * self.grads
            self.whole[unit.name], self.sent[unit.name] = shard * self.compute * over, flat * self.wire * over
            if self.is_whole:
                self.whole[unit.name] = shard * self.compute if self.compute != self.main else 0
                self.sent[unit.name] = flat * self.wire
                self.move("all", "all_reduce", flat * self.wire)
                continue
            self.move("inner", "all_gather", shard * self.compute, self.k * (1 if unit.is_root or stays else 2))
            self.move("inner", "reduce_scatter", flat * self.wire, self.k)
            self.move("outer", "all_reduce", flat * self.wire, self.k)
        if not self.is_whole:
            self.move("inner", "all_reduce", NUMBER)

    def beside_sums(self, sent: int) -> int:
        cast = sent // self.wire * self.compute if self.compute != self.wire else 0
        return cast + (0 if self.is_whole else super().beside_sums(sent))

    def on_done(self, mark: Mark, unit: Unit) -> None:
        self.note(f"backward of {unit.name}", mark.live, self.sent[unit.name] // self.wire * self.compute)
        self.free(BUCKETS, WAITING)
        super().on_done(mark, unit)
        self.free(BUCKETS, f"{unit.name} as sent")


class Replicated(Peer):
    """All weights and gradients on every rank.

    Where weights are cast before a forward, gradients of the cast ones wait until the backward's end, to be cast last.
    """

    has_buckets = False
    """True if gradients are kept between steps, and summed beside these before the last microbatch."""

    def count(self) -> None:
        self.keep(elements(self.params), elements(self.trained), len(self.trained))
        if self.compute != self.main:
            self.memory["compute_weights"] = elements(p for p in self.params if p not in self.in_8_bits) * self.compute
        if not self.has_buckets:
            self.sums[ALL] = self.memory["main_grads"]

    def on_gradient(self, mark: Mark, unit: Unit) -> None:
        self.live[BUCKETS][ALL] += mark.given
        if self.compute == self.main:
            self._sum()

    def _sum(self) -> None:
        """Gradients that autograd sums; those of a later microbatch are added in place."""
        given = self.live[BUCKETS].pop(ALL, 0) // self.compute * self.main
        if not (self.has_buckets and self.last):
            self.live[SUMS][ALL] = min(self.memory["main_grads"], self.live[SUMS][ALL] + given)

    def end(self) -> None:
        self._sum()
        self.note("end", 0)


class Ddp(Replicated):
    """Buckets fill in the order of gradients; where parameters may be unused, in that of the model."""

    has_buckets = True

    def count(self) -> None:
        looks = may_leave_unused(self.config) or self.config.numerics.mode is not Numerics.fast
        filled, limit, width = 0, FIRST_BUCKET, min(self.wire, self.main)
        for numel in map(numel_here, self.trained) if looks else self.arrivals:
            filled += numel
            if filled * self.main >= limit:
                self.move("inner", "all_reduce", filled * width)
                filled, limit = 0, BUCKET
        self.move("inner", "all_reduce", filled * width)
        self.move("inner", "all_reduce", looks * 4 * len(self.trained))
        Replicated.count(self)

    def end(self) -> None:
        if self.last and self.wire < self.main:
            self.take(BUCKETS, "as sent", elements(self.trained) * self.wire)
        super().end()
        if self.last:
            self.live[SUMS].clear()
