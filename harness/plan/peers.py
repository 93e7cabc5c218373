"""Bytes that other engines keep and send on their first rank: formulas of torch 2.13 and of the releases adapters name.

`tests/plan` holds them to the byte against steps on real ranks. Traffic is that of a step after the first two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

from harness.config.derived import (
    data_ranks,
    may_leave_unused,
    microbatches_per_rank,
    optimizer_states,
    parameter_count,
)
from harness.config.schema import Config, Device, EngineName, Numerics, OptimizerName, OuterStrategy, Strategy
from harness.fp8.linear import layers_of
from harness.fp8.quantize import Column
from harness.plan.activations import Recorded, local
from harness.plan.model import ROLES, Model
from harness.plan.wire import NUMBER, Rows, summed

COUNT, ADDRESS = 4, 16
"""Bytes of Adam's count of steps, and of the places where FSDP1 begins parameters."""
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Bytes at which DDP closes its first bucket and the others."""
ALIGNED, REDUCED, GATHERED, WHOLE = 2, 500_000_000, 50_000_000, 100_000
"""Elements by which DeepSpeed's parts end; most that it reduces at once, that ZeRO-3 gathers at once, and of a
parameter that stays whole on CUDA."""


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


class Peer:
    """Kept bytes and traffic of a cell, as one of the functions below adds them up.

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
        self.states, self.counts = optimizer_states(config), COUNT * (config.optimizer.name is not OptimizerName.sgd)
        self.arrivals = [mark.given // self.compute for mark in recorded.marks if mark.what == "gradient"]
        self.kept, self.rows = dict.fromkeys(ROLES, 0), Rows()
        self.kept["buffers"] = sum(buffer.nbytes for buffer in module.buffers())
        held = {layer.weight for layer in layers_of(module) if layer.is_held}
        decays = {param: model.workload.decays(name, param.shape) for name, param in module.named_parameters()}
        params = {p: Param(tuple(local(p).shape), p.requires_grad, decays[p], p in held) for p in module.parameters()}
        self.params, self.trained = list(params.values()), [each for each in params.values() if each.trains]
        owned = [(unit.is_root, set().union(*unit.params)) for unit in model.units]
        self.units = [(is_root, [params[p] for p in params if p in own]) for is_root, own in owned]

    def keep(self, weights: int, trained: int, counted: int, padding: int = 0) -> None:
        """Elements of main weights, of trained ones with their moments, and of padding; counts of steps."""
        self.kept["main_weights"] += weights * self.main
        self.kept["main_grads"] += trained * self.grads
        self.kept["optimizer"] += self.states * trained * self.main + self.counts * counted
        self.kept["padding"] += padding * self.main

    def move(self, axis: str, kind: str, num_bytes: int, times: int = 1) -> None:
        """num_bytes: of a rank's shard, or of all that an all-reduce sums."""
        size = self.sizes[axis]
        if size > 1 and num_bytes and times:
            self.rows[axis, kind, "count"] += times
            moved = summed(size, num_bytes) if kind == "all_reduce" else num_bytes * (size - 1)
            self.rows[axis, kind, "bytes"] += times * moved

    def end_step(self) -> None:
        """Maxima of delayed scaling, and squares for the norm, over the tensor-parallel axis."""
        delayed = [layer for layer in layers_of(self.model.module) if layer.recipe.delayed]
        self.move("all", "all_reduce", 4 * len(Column) * len(delayed))
        self.move("tp", "all_reduce", NUMBER)


def inside(spans: Iterable[tuple[int, int]], shard: int) -> int:
    """Elements of these (begin, elements) among the first `shard`."""
    return sum(max(0, min(numel, shard - begin)) for begin, numel in spans)


def fsdp2(p: Peer) -> None:
    """Rows are dealt as by `torch.chunk`, and travel padded to the first rank's."""

    def here(params: Sequence[Param]) -> int:
        return sum(-(-each.shape[0] // p.inner) * prod(each.shape[1:]) for each in params)

    p.keep(here(p.params), here(p.trained), len(p.trained))
    for is_root, params in p.units:
        trained = here([each for each in params if each.trains]) * p.wire
        stays = p.strategy is Strategy.optim_grads
        p.move("inner", "all_gather", here(params) * p.compute, 1 if stays else p.k * (1 if is_root else 2))
        p.move("inner", "reduce_scatter", trained, p.k)
        p.move("outer", "all_reduce", trained)
    p.move("inner", "all_reduce", NUMBER)
    p.end_step()


def fsdp1(p: Peer) -> None:
    """A unit is one flat tensor, its parameters placed on addresses; all of it is reduced."""
    is_whole, stays = p.strategy is Strategy.no_shard or p.inner == 1, p.strategy is Strategy.optim_grads
    align, over = max(1, ADDRESS // p.compute), p.ranks if is_whole else p.inner
    for is_root, params in p.units:
        end, spans = 0, []
        for each in params:
            spans.append((-(-end // align) * align, each.numel))
            end = sum(spans[-1])
        shard = -(-end // over) * (over if is_whole else 1)
        flat = shard if any(each.trains for each in params) else 0
        held = inside(spans, shard)
        trained = inside([span for span, each in zip(spans, params, strict=True) if each.trains], shard)
        p.keep(held, trained, sum(each.trains for each in params), shard - held + flat - trained)
        if is_whole:
            p.move("all", "all_reduce", flat * p.wire, 1 if p.strategy is Strategy.no_shard else p.k)
        else:
            p.move("inner", "all_gather", shard * p.compute, p.k * (1 if is_root or stays else 2))
            p.move("inner", "reduce_scatter", flat * p.wire, p.k)
            p.move("outer", "all_reduce", flat * p.wire, p.k)
    if not is_whole:
        p.move("inner", "all_reduce", NUMBER)


def replicated(p: Peer, stepped: Sequence[Param] | None = None) -> None:
    """stepped: parameters whose optimizer state this rank has; None: all."""
    own = p.trained if stepped is None else stepped
    weights, trained, here = (sum(each.numel for each in params) for params in (p.params, p.trained, own))
    p.keep(weights, trained, len(own))
    p.kept["optimizer"] -= p.states * (trained - here) * p.main
    if p.compute != p.main:
        p.kept["compute_weights"] = sum(each.numel for each in p.params if not each.is_8_bit) * p.compute
    p.end_step()


def ddp(p: Peer) -> None:
    """Buckets fill in the order of gradients; where parameters may be unused, in that of the model."""
    looks = may_leave_unused(p.config) or p.config.numerics.mode is not Numerics.fast
    filled, limit, width = 0, FIRST_BUCKET, min(p.wire, p.main)
    for numel in (each.numel for each in p.trained) if looks else p.arrivals:
        filled += numel
        if filled * p.main >= limit:
            p.move("inner", "all_reduce", filled * width)
            filled, limit = 0, BUCKET
    p.move("inner", "all_reduce", filled * width)
    p.move("inner", "all_reduce", looks * 4 * len(p.trained))
    if p.strategy is not Strategy.optim:
        return replicated(p)
    of_ranks: list[list[Param]] = [[] for _ in range(p.ranks)]
    sizes = [0] * p.ranks  # largest first, to the rank with least; all that decay before the others
    for each in sorted(p.trained, key=lambda each: (not each.decays, -each.numel)):
        rank = sizes.index(min(sizes))
        of_ranks[rank].append(each)
        sizes[rank] += each.numel
    p.move("inner", "broadcast", sizes[0] * p.main)
    p.rows["inner", "broadcast", "count"] = p.ranks
    replicated(p, of_ranks[0])


def megatron_fsdp(p: Peer) -> None:
    """Buckets are those of the package's own planning, which pads them to whole rows on each rank."""
    package: Any = import_module("megatron_fsdp.param_and_grad_buffer")
    splits = list(Strategy).index(p.strategy)
    is_split_twice = p.config.sharding.outer is OuterStrategy.optim and p.outer > 1
    over, axis = (p.ranks, "all") if is_split_twice else (p.inner, "inner")
    tied, padded = p.config.model.tie_embeddings, SimpleNamespace(data_parallel_sharding_strategy=p.strategy.name)
    policy = package.BucketingPolicy(None, list(p.model.workload.unit_classes), p.strategy.name)
    groups = package._get_parameter_groups(p.model.module, policy, {})[0]
    for number, group in enumerate(groups):
        shapes, factor = [param.shape for param in group.params], group.chunk_size_factor
        placed, bucket, _ = package.build_data_parallel_buffer_index(
            shapes, 0, over, False, padded, chunk_size_factor=factor
        )
        items, numel = [(item.global_data_index, item.size) for item in placed.values()], bucket.size
        main, part = numel // (over if splits else 1), numel // p.inner
        kept = [("compute_weights", part if splits == 3 else numel, p.compute)] if splits else []
        p.kept["compute_weights"] += (not splits) * sum(size for _, size in items) * p.compute
        if group.requires_grad:
            kept += [("main_weights", main, p.main), ("main_grads", part if splits > 1 else numel, p.grads)]
            counted = sum(inside([item], main) > 0 for item in items)
            p.kept["optimizer"] += p.states * inside(items, main) * p.main + p.counts * counted
        for role, size, width in kept:
            p.kept[role] += inside(items, size) * width
            p.kept["padding"] += (size - inside(items, size)) * width
        is_root = group.fsdp_unit_id is None
        p.kept["compute_weights"] += (splits == 3 and p.inner > 1 and is_root) * numel * p.compute
        # of sharded weights the first unit stays from a backward to the next forward, the root for the step
        again = p.k + 1 if number == 0 else 2 * p.k
        gathers = (1 if is_root else again) if splits == 3 else 1 if tied or number == len(groups) - 1 else 2
        p.move("inner", "all_gather", part * p.compute, gathers * (splits > 0))
        p.move("outer", "all_gather", numel // p.ranks * p.compute, 2 * is_split_twice)
        if not splits:
            p.move("inner", "all_reduce", numel * p.wire)
            continue
        p.move("inner", "reduce_scatter", part * p.wire, p.k if splits > 1 else 1)
        if is_split_twice:
            p.move("outer", "reduce_scatter", numel // p.ranks * p.wire)
        else:
            p.move("outer", "all_reduce", (part if splits > 1 else numel) * p.wire)
    if splits:
        p.move(axis, "all_reduce", NUMBER)


def deepspeed(p: Peer) -> None:
    """ZeRO-1 and 2 cut the flat tensor of each group of the optimizer, ZeRO-3 each parameter."""
    stage, n = list(Strategy).index(p.strategy), p.ranks
    groups = [sum(each.numel for each in p.trained if each.decays is decays) for decays in (True, False)]
    groups = [numel for numel in groups if numel]
    trained, elements = sum(groups), sum(each.numel for each in p.params)
    if stage == 0:
        p.keep(elements, trained, len(p.trained))
        p.move("inner", "all_reduce", trained * p.wire)
    elif stage < 3:
        flats = [-(-numel // (ALIGNED * n)) * ALIGNED for numel in groups]
        used = sum(map(min, groups, flats))
        p.keep(used, used, len(groups), (sum(flats) - used) * (1 + p.states))
        p.kept["main_grads"] = (trained if stage == 1 else used) * p.main
        p.kept["compute_weights"] = elements * p.compute
        p.kept["padding"] += (sum(flats) * n - trained) * p.compute
        is_plain = stage == 1 and p.compute < p.main  # BF16_Optimizer
        p.move("inner", "all_reduce", (sum(flats) * n if is_plain else trained) * p.wire, p.k if stage == 2 else 1)
        p.move("inner", "all_reduce", 4, 0 if is_plain else len(groups))
        p.move("inner", "all_reduce", 1, int(stage == 2 and p.compute < p.main))
        for flat in flats:
            p.move("inner", "all_gather", flat * p.compute)
    else:
        here, held = (sum(-(-each.numel // n) for each in params) for params in (p.params, p.trained))
        p.keep(here if p.compute == p.main else held, held, len(groups))
        small = sum(each.numel for each in p.params if each.numel <= WHOLE and p.config.cluster.device is Device.cuda)
        p.kept["compute_weights"] = (here * (p.compute != p.main) + small) * p.compute
        p.move("inner", "all_gather", here * p.compute, p.k)
        p.rows["inner", "all_gather", "count"] *= 2 if p.config.model.tie_embeddings else 1
        p.move("inner", "reduce_scatter", held * p.wire, p.k)
        p.move("inner", "all_reduce", NUMBER, len(groups))


PEERS: Mapping[EngineName, Callable[[Peer], None]] = {
    EngineName.single: replicated,
    EngineName.ddp: ddp,
    EngineName.fsdp1: fsdp1,
    EngineName.fsdp2: fsdp2,
    EngineName.megatron_fsdp: megatron_fsdp,
    EngineName.deepspeed: deepspeed,
}


def beyond(config: Config) -> Iterator[tuple[str, str]]:
    """Parts of a plan of other engines that formulas do not tell, and why."""
    if config.engine.name is EngineName.native:
        return
    yield "peak", f"engine={config.engine.name.name}: what it holds within a step is not planned"
    splits = config.engine.name is EngineName.deepspeed and config.sharding.strategy is Strategy.optim_grads_params
    if splits and config.cluster.device is Device.cuda:
        yield "wire", "engine=deepspeed on cuda: ZeRO-3 leaves small parameters whole"
    limit = GATHERED if splits else REDUCED
    if config.engine.name is EngineName.deepspeed and parameter_count(config) > limit:
        yield "wire", f"engine=deepspeed: more than {limit:,} weights travel in parts"
