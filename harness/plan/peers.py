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
from typing import NamedTuple

from harness.config.derived import (
    data_ranks,
    may_leave_unused,
    microbatches_per_rank,
    optimizer_states,
)
from harness.config.schema import Config, Device, Numerics, OptimizerName, Strategy
from harness.fp8.linear import layers_of
from harness.fp8.quantize import Column
from harness.plan.activations import Mark, Recorded, local
from harness.plan.model import ROLES, Model, Unit
from harness.plan.peak import BUCKETS, SUMS, WEIGHTS, Step, in_order
from harness.plan.wire import NUMBER, Rows, summed

COUNT, ADDRESS = 4, 16
"""Bytes of Adam's count of steps, and of the places where FSDP1 begins parameters."""
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Bytes at which DDP closes its first bucket and the others."""
INCOMING = ", incoming"


class Param(NamedTuple):
    """shape: on this rank of the tensor-parallel axis. is_8_bit: an FP8 layer quantizes its main weights."""

    shape: tuple[int, ...]
    trains: bool
    decays: bool
    is_8_bit: bool

    @property
    def numel(self) -> int:
        return prod(self.shape)


def alone(config: Config) -> Config:
    """The cell with our engine on one data-parallel rank: module, units and recorded traffic are as under others."""
    compute = config.dtype.compute
    return replace(
        config,
        engine=type(config.engine)(),
        sharding=replace(config.sharding, strategy=Strategy.no_shard),
        mesh=replace(config.mesh, world_size=config.mesh.tp, dp_outer=1),
        train=replace(config.train, global_batch_size=config.train.microbatch_size),
        dtype=replace(config.dtype, main_grads=compute, grad_comm=compute, allow_low_precision_grads=True),
        nccl_ub=type(config.nccl_ub)(),
    )


class Peer(Step):
    """An engine's bytes: `count` adds up what it keeps and sends, and `on_...` are what it holds within a step.

    Args:
        config: of the cell.
        model: of `alone`.
        recorded: for the order in which gradients come.
    """

    def __init__(self, config: Config, model: Model, recorded: Recorded) -> None:
        dtype, mesh, module = config.dtype, config.mesh, model.module
        self.config, self.model, self.strategy = config, model, config.sharding.strategy
        self.ranks, self.outer, self.k = data_ranks(config), mesh.dp_outer, microbatches_per_rank(config)
        self.inner = self.ranks // self.outer
        self.sizes = {"inner": self.inner, "outer": self.outer, "all": mesh.world_size, "tp": mesh.tp}
        self.compute, self.main = dtype.compute.bytes, dtype.main_params.bytes
        self.grads, self.wire = dtype.main_grads.bytes, dtype.grad_comm.bytes
        self.gloo = int(config.cluster.device is Device.cpu)
        self.states, self.counts = optimizer_states(config), COUNT * (config.optimizer.name is not OptimizerName.sgd)
        self.arrivals = [mark.given // self.compute for mark in recorded.marks if mark.what == "gradient"]
        self.memory, self.rows = dict.fromkeys(ROLES, 0), Rows()
        self.memory["buffers"] = sum(buffer.nbytes for buffer in module.buffers())
        held = {layer.weight for layer in layers_of(module) if layer.is_held}
        decays = {param: model.workload.decays(name, param.shape) for name, param in module.named_parameters()}
        params = {p: Param(tuple(local(p).shape), p.requires_grad, decays[p], p in held) for p in module.parameters()}
        self.params, self.trained = list(params.values()), [each for each in params.values() if each.trains]
        owned = [(unit, set().union(*unit.params)) for unit in model.units]
        self.owned = [(unit, [params[p] for p in params if p in own]) for unit, own in owned]
        self.order = [unit.name for unit in in_order(model.units, recorded.marks)]
        # bytes of a unit's weights when whole, of its gradients as they are sent, and of what a rank gets of them
        self.whole, self.sent, self.sums = dict[str, int](), dict[str, int](), dict[str, int]()
        super().__init__(model.units, 0)
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

    def close_step(self) -> None:
        """Maxima of delayed scaling, and squares for the norm, over the tensor-parallel axis."""
        delayed = [layer for layer in layers_of(self.model.module) if layer.recipe.delayed]
        self.move("all", "all_reduce", 4 * len(Column) * len(delayed))
        self.move("tp", "all_reduce", NUMBER)

    # -- a step --------------------------------------------------------------------------------------------------------

    def gather(self, mark: Mark, name: str, *, incoming: str = "") -> None:
        """Have a unit's weights whole, or its result incoming, beside a cast shard and gloo's own copy."""
        size = self.whole.get(name, 0)
        if not size or name in self.live[WEIGHTS] or name + incoming in self.live[WEIGHTS]:
            return
        self.take(WEIGHTS, name + incoming, size)
        cast = size // self.inner if self.compute != self.main else 0
        self.note(f"gather of {name}", mark.live, self.gloo * size + cast)

    def on_gradient(self, mark: Mark, unit: Unit) -> None:
        self.live[BUCKETS]["waiting"] += mark.given

    def reduce(self, mark: Mark, unit: Unit, more: int = 0) -> None:
        """Copy a unit's gradients to where they are sent from, which stays; more: beside them while they are sent."""
        where, sent = f"backward of {unit.name}", self.sent.get(unit.name, 0)
        self.take(BUCKETS, f"{unit.name} as sent", sent)
        self.note(where, mark.live)
        self.free(BUCKETS, "waiting")
        self.note(where, mark.live, more)
        self.take(SUMS, unit.name, self.sums.get(unit.name, 0))

    def end(self) -> None:
        self.live[BUCKETS].clear()
        if self.last or self.strategy is not Strategy.optim_grads:
            self.live[WEIGHTS].clear()

    def update(self) -> None:
        """The norm squares the largest tensor in fp64."""
        self.note("update", 0, NUMBER * max((each.numel for each in self.trained), default=0) // self.inner)


def inside(spans: Iterable[tuple[int, int]], shard: int) -> int:
    """Elements of these (begin, elements) among the first `shard`."""
    return sum(max(0, min(numel, shard - begin)) for begin, numel in spans)


class Fsdp2(Peer):
    """Rows are dealt as by `torch.chunk`, and travel padded to the first rank's.

    A gather's result is copied into parameters; in a forward it stays until the next one's. A backward gathers one unit
    ahead. Gradients as they are sent stay until the next unit's are in.
    """

    def count(self) -> None:
        self.keep(self.here(self.params), self.here(self.trained), len(self.trained))
        stays = self.strategy is Strategy.optim_grads
        for unit, params in self.owned:
            trained = self.here([each for each in params if each.trains])
            self.whole[unit.name] = self.here(params) * self.compute * self.inner
            self.sent[unit.name], self.sums[unit.name] = trained * self.wire * self.inner, trained * self.grads
            times = 1 if stays else self.k * (1 if unit.is_root else 2)
            self.move("inner", "all_gather", self.here(params) * self.compute, times)
            self.move("inner", "reduce_scatter", trained * self.wire, self.k)
            self.move("outer", "all_reduce", trained * self.wire)
        self.move("inner", "all_reduce", NUMBER)
        self.close_step()

    def here(self, params: Sequence[Param]) -> int:
        return sum(-(-each.shape[0] // self.inner) * prod(each.shape[1:]) for each in params)

    def use(self, name: str) -> None:
        if self.whole.get(name) and name not in self.live[WEIGHTS]:
            self.take(WEIGHTS, name, self.whole[name])

    def on_forward(self, mark: Mark, unit: Unit) -> None:
        before = [name for name in self.live[WEIGHTS] if name.endswith(INCOMING)]
        self.gather(mark, unit.name, incoming=INCOMING)
        for name in before:
            self.free(WEIGHTS, name)
        self.use(unit.name)

    def on_left(self, mark: Mark, unit: Unit) -> None:
        if unit.is_root:
            for name in [name for name in self.live[WEIGHTS] if name.endswith(INCOMING)]:
                self.free(WEIGHTS, name)
        elif self.strategy is not Strategy.optim_grads:
            self.free(WEIGHTS, unit.name)

    def on_backward(self, mark: Mark, unit: Unit) -> None:
        self.gather(mark, unit.name, incoming=INCOMING)
        self.use(unit.name)
        self.note(f"gather of {unit.name}", mark.live)
        self.free(WEIGHTS, unit.name + INCOMING)
        place = self.order.index(unit.name)
        self.gather(mark, self.order[place - 1], incoming=INCOMING)

    def on_done(self, mark: Mark, unit: Unit) -> None:
        if self.last or self.strategy is not Strategy.optim_grads:
            self.free(WEIGHTS, unit.name)
        for name in [name for name in self.live[BUCKETS] if name != "waiting"]:
            self.free(BUCKETS, name)
        sent = self.sent[unit.name]
        self.reduce(mark, unit, sent // self.inner + self.gloo * sent)


class Fsdp1(Peer):
    """A unit is one flat tensor, its parameters placed on addresses; all of it is reduced.

    A backward gathers one unit ahead, and ends with a flat tensor of the unit's gradients. Reduced ones stay until the
    next step's forward.
    """

    def count(self) -> None:
        self.is_whole = self.strategy is Strategy.no_shard or self.inner == 1
        stays = self.strategy is Strategy.optim_grads
        align, over = max(1, ADDRESS // self.compute), self.ranks if self.is_whole else self.inner
        for unit, params in self.owned:
            end, spans = 0, []
            for each in params:
                spans.append((-(-end // align) * align, each.numel))
                end = sum(spans[-1])
            shard = -(-end // over) * (over if self.is_whole else 1)
            flat = shard if any(each.trains for each in params) else 0
            held = inside(spans, shard)
            trained = inside([span for span, each in zip(spans, params, strict=True) if each.trains], shard)
            self.keep(held, trained, sum(each.trains for each in params), shard - held + flat - trained)
            self.sums[unit.name] = flat * self.grads
            if self.is_whole:
                self.whole[unit.name] = shard * self.compute if self.compute != self.main else 0
                self.sent[unit.name] = flat * self.wire
                self.move("all", "all_reduce", flat * self.wire, 1 if self.strategy is Strategy.no_shard else self.k)
            else:
                self.whole[unit.name], self.sent[unit.name] = shard * self.compute * over, flat * self.wire * over
                self.move("inner", "all_gather", shard * self.compute, self.k * (1 if unit.is_root or stays else 2))
                self.move("inner", "reduce_scatter", flat * self.wire, self.k)
                self.move("outer", "all_reduce", flat * self.wire, self.k)
        if not self.is_whole:
            self.move("inner", "all_reduce", NUMBER)

    def on_forward(self, mark: Mark, unit: Unit) -> None:
        self.gather(mark, unit.name)

    def on_left(self, mark: Mark, unit: Unit) -> None:
        if not unit.is_root and self.strategy is not Strategy.optim_grads:
            self.free(WEIGHTS, unit.name)

    def on_backward(self, mark: Mark, unit: Unit) -> None:
        self.gather(mark, unit.name)
        self.gather(mark, self.order[self.order.index(unit.name) - 1])

    def on_done(self, mark: Mark, unit: Unit) -> None:
        sent = self.sent[unit.name]
        flat = sent // self.wire * self.compute
        self.note(f"backward of {unit.name}", mark.live, flat)
        self.free(WEIGHTS, unit.name)
        self.free(BUCKETS, "waiting")
        cast = flat if self.compute != self.wire else 0
        self.reduce(mark, unit, cast + (0 if self.is_whole else sent // self.inner + self.gloo * sent))
        self.free(BUCKETS, f"{unit.name} as sent")


class Replicated(Peer):
    """All weights and gradients on every rank.

    Where weights are cast before a forward, gradients of the cast ones wait until the backward's end, to be cast last.
    """

    has_buckets = False
    """True if gradients are kept between steps, and summed beside these before the last microbatch."""

    def count(self) -> None:
        self.hold()
        self.close_step()

    def hold(self, stepped: Sequence[Param] | None = None) -> None:
        """stepped: parameters whose optimizer state this rank has; None: all."""
        own = self.trained if stepped is None else stepped
        weights, trained, here = (sum(each.numel for each in params) for params in (self.params, self.trained, own))
        self.keep(weights, trained, len(own))
        self.memory["optimizer"] -= self.states * (trained - here) * self.main
        if self.compute != self.main:
            self.memory["compute_weights"] = sum(each.numel for each in self.params if not each.is_8_bit) * self.compute
        if not self.has_buckets:
            self.sums["all"] = self.memory["main_grads"]

    @property
    def casts(self) -> bool:
        return self.compute != self.main or self.model.tp > 1

    def on_gradient(self, mark: Mark, unit: Unit) -> None:
        if self.casts:
            self.live[BUCKETS]["waiting"] += mark.given
        elif not (self.has_buckets and self.last):
            self._sum(mark.given // self.compute * self.main)

    def _sum(self, num_bytes: int) -> None:
        """Gradients that autograd has summed so far: those of a later microbatch are added in place."""
        total = self.memory["main_grads"]
        self.live[SUMS]["all"] = min(total, self.live[SUMS]["all"] + num_bytes)

    def end(self) -> None:
        waiting = self.live[BUCKETS].pop("waiting", 0)
        if self.casts and not (self.has_buckets and self.last):
            self._sum(waiting // self.compute * self.main)
        self.note("end", 0)


class Ddp(Replicated):
    """Buckets fill in the order of gradients; where parameters may be unused, in that of the model."""

    has_buckets = True

    def count(self) -> None:
        looks = may_leave_unused(self.config) or self.config.numerics.mode is not Numerics.fast
        filled, limit, width = 0, FIRST_BUCKET, min(self.wire, self.main)
        for numel in (each.numel for each in self.trained) if looks else self.arrivals:
            filled += numel
            if filled * self.main >= limit:
                self.move("inner", "all_reduce", filled * width)
                filled, limit = 0, BUCKET
        self.move("inner", "all_reduce", filled * width)
        self.move("inner", "all_reduce", looks * 4 * len(self.trained))
        self.close_step()
        if self.strategy is not Strategy.optim:
            return self.hold()
        of_ranks: list[list[Param]] = [[] for _ in range(self.ranks)]
        sizes = [0] * self.ranks  # largest first, to the rank with least; all that decay before the others
        for each in sorted(self.trained, key=lambda each: (not each.decays, -each.numel)):
            rank = sizes.index(min(sizes))
            of_ranks[rank].append(each)
            sizes[rank] += each.numel
        self.move("inner", "broadcast", sizes[0] * self.main)
        self.rows["inner", "broadcast", "count"] = self.ranks
        self.hold(of_ranks[0])

    def end(self) -> None:
        if self.last and self.wire < self.main:
            self.take(BUCKETS, "as sent", sum(each.numel for each in self.trained) * self.wire)
        super().end()
        if self.last:
            self.live[SUMS].clear()

    def update(self) -> None:
        super().update()
        self.live[BUCKETS].clear()
