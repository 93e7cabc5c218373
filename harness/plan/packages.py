"""Bytes kept and sent by two packages' engines, megatron-fsdp and DeepSpeed, as `harness.plan.peers` has torch's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from harness.config.derived import parameter_count
from harness.config.schema import Config, Device, EngineName, OuterStrategy, Strategy
from harness.plan.peers import Ddp, Fsdp1, Fsdp2, Peer, Replicated, elements, inside, numel_here
from harness.plan.wire import NUMBER

ALIGNED, REDUCED, GATHERED, SMALL = 2, 500_000_000, 50_000_000, 100_000
"""Elements by which DeepSpeed's parts end; most that it reduces at once, that ZeRO-3 gathers at once, and of a
parameter that stays whole on CUDA."""


class MegatronFsdp(Peer):
    """Buckets are those of the package's own planning, which pads them to whole rows on each rank."""

    def count(self) -> None:
        package: Any = import_module("megatron_fsdp.param_and_grad_buffer")
        splits = self.stage
        is_split_twice = self.config.sharding.outer is OuterStrategy.optim and self.outer > 1
        over, axis = (self.ranks, "all") if is_split_twice else (self.inner, "inner")
        tied = self.config.model.tie_embeddings
        padded = SimpleNamespace(data_parallel_sharding_strategy=self.strategy.name)
        policy = package.BucketingPolicy(None, list(self.model.workload.unit_classes), self.strategy.name)
        groups = package._get_parameter_groups(self.model.module, policy, {})[0]
        for number, group in enumerate(groups):
            shapes, factor = [param.shape for param in group.params], group.chunk_size_factor
            placed, bucket, _ = package.build_data_parallel_buffer_index(
                shapes, 0, over, False, padded, chunk_size_factor=factor
            )
            items, numel = [(item.global_data_index, item.size) for item in placed.values()], bucket.size
            main, part, is_root = numel // (over if splits else 1), numel // self.inner, group.fsdp_unit_id is None
            kept = [("compute_weights", part if splits == 3 else numel, self.compute)] if splits else []
            self.memory["compute_weights"] += (not splits) * sum(size for _, size in items) * self.compute
            if group.requires_grad:
                kept += [("main_weights", main, self.main), ("main_grads", part if splits > 1 else numel, self.grads)]
                counted = sum(inside([item], main) > 0 for item in items)
                self.memory["optimizer"] += self.states * inside(items, main) * self.main + self.counts * counted
            for role, size, width in kept:
                self.memory[role] += inside(items, size) * width
                self.memory["padding"] += (size - inside(items, size)) * width
            self.memory["compute_weights"] += (splits == 3 and self.inner > 1 and is_root) * numel * self.compute
            # of sharded weights the first unit stays from a backward to the next forward, the root for the step
            again = self.k + 1 if number == 0 else 2 * self.k
            gathers = (1 if is_root else again) if splits == 3 else 1 if tied or number == len(groups) - 1 else 2
            self.move("inner", "all_gather", part * self.compute, gathers * (splits > 0))
            self.move("outer", "all_gather", numel // self.ranks * self.compute, 2 * is_split_twice)
            if not splits:
                self.move("inner", "all_reduce", numel * self.wire)
                continue
            self.move("inner", "reduce_scatter", part * self.wire, self.k if splits > 1 else 1)
            if is_split_twice:
                self.move("outer", "reduce_scatter", numel // self.ranks * self.wire)
            else:
                self.move("outer", "all_reduce", (part if splits > 1 else numel) * self.wire)
        if splits:
            self.move(axis, "all_reduce", NUMBER)


class Deepspeed(Peer):
    """ZeRO-1 and 2 cut the flat tensor of each group of the optimizer, ZeRO-3 each parameter."""

    def count(self) -> None:
        stage, n = self.stage, self.ranks
        groups = [elements(each for each in self.trained if self.decays[each] is decays) for decays in (True, False)]
        groups = [numel for numel in groups if numel]
        trained, weights = sum(groups), elements(self.params)
        is_plain = stage == 1 and self.compute < self.main  # BF16_Optimizer
        if stage < 3:
            flats = [-(-numel // (ALIGNED * n)) * ALIGNED for numel in groups]
            used = sum(map(min, groups, flats))
            self.keep(used, used, len(groups), (sum(flats) - used) * (1 + self.states))
            self.memory["main_grads"] = (trained if stage == 1 else used) * self.main
            self.memory["compute_weights"] = weights * self.compute
            self.memory["padding"] += (sum(flats) * n - trained) * self.compute
            reduced = (sum(flats) * n if is_plain else trained) * self.wire
            self.move("inner", "all_reduce", reduced, self.k if stage == 2 else 1)
            self.move("inner", "all_reduce", 4, 0 if is_plain else len(groups))
            self.move("inner", "all_reduce", 1, int(stage == 2 and self.compute < self.main))
            for flat in flats:
                self.move("inner", "all_gather", flat * self.compute)
        else:
            here, held = (sum(-(-numel_here(each) // n) for each in params) for params in (self.params, self.trained))
            self.keep(held, held, len(groups))
            small = elements(each for each in self.params if numel_here(each) <= SMALL and not self.gloo)
            self.memory["compute_weights"] = (here + small) * self.compute
            self.memory["buffers"] += weights * self.wire
            self.move("inner", "all_gather", here * self.compute, self.k)
            self.rows["inner", "all_gather", "count"] *= 2 if self.config.model.tie_embeddings else 1
            self.move("inner", "reduce_scatter", held * self.wire, self.k)
            self.move("inner", "all_reduce", NUMBER, len(groups))


PEERS: Mapping[EngineName, type[Peer]] = {
    EngineName.single: Replicated,
    EngineName.ddp: Ddp,
    EngineName.fsdp1: Fsdp1,
    EngineName.fsdp2: Fsdp2,
    EngineName.megatron_fsdp: MegatronFsdp,
    EngineName.deepspeed: Deepspeed,
}


def beyond(config: Config) -> Iterator[tuple[str, str]]:
    """Parts of a plan of other engines that formulas do not tell, and why."""
    if config.engine.name in (EngineName.megatron_fsdp, EngineName.deepspeed):
        yield "peak", f"engine={config.engine.name.name}: of this package what it keeps and sends is planned"
    if config.engine.name is not EngineName.deepspeed:
        return
    splits = config.sharding.strategy is Strategy.optim_grads_params
    if splits and config.cluster.device is Device.cuda:
        yield "wire", "engine=deepspeed on cuda: ZeRO-3 leaves small parameters whole"
    limit = GATHERED if splits else REDUCED
    if parameter_count(config) > limit:
        yield "wire", f"engine=deepspeed: more than {limit:,} weights travel in parts"
