"""Bytes of two packages' engines, megatron-fsdp and DeepSpeed, as `harness.plan.peers` has those of torch's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from harness.config.derived import parameter_count
from harness.config.schema import Config, Device, EngineName, OuterStrategy, Strategy
from harness.fsdp.runtime.units import Unit
from harness.plan.activations import Mark
from harness.plan.peak import BUCKETS, SUMS, WAITING, WEIGHTS
from harness.plan.peers import ALL, Ddp, Fsdp1, Fsdp2, Peer, Replicated, elements, inside, numel_here
from harness.plan.wire import NUMBER

PREFETCHED = 500_000_000
"""Elements that megatron-fsdp gathers ahead at least."""
ALIGNED, REDUCED, GATHERED, SMALL = 2, 500_000_000, 50_000_000, 100_000
"""Elements by which DeepSpeed's parts end; most that it reduces at once, that ZeRO-3 gathers at once, and of a
parameter that stays whole on CUDA."""


class MegatronFsdp(Peer):
    """Buckets are those of the package's own planning, which pads them to whole rows on each rank.

    Units are gathered ahead until they have so many elements together, and gradients stay as they are sent until the
    backward's end, or until they have twice as many.
    """

    def count(self) -> None:
        package: Any = import_module("megatron_fsdp.param_and_grad_buffer")
        splits, self.reduces_each = self.stage, self.stage > 1
        is_split_twice = self.config.sharding.outer is OuterStrategy.optim and self.outer > 1
        over, axis = (self.ranks, "all") if is_split_twice else (self.inner, "inner")
        tied, padded = (
            self.config.model.tie_embeddings,
            SimpleNamespace(data_parallel_sharding_strategy=self.strategy.name),
        )
        policy = package.BucketingPolicy(None, list(self.model.workload.unit_classes), self.strategy.name)
        groups = package._get_parameter_groups(self.model.module, policy, {})[0]
        names = {p: unit.name for unit in self.units for bucket in unit.buckets for _, p in bucket.params}
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
            name = names[group.params[0]]
            if splits == 3 and not is_root:
                self.whole[name] = self.whole.get(name, 0) + numel * self.compute
            if group.requires_grad and (splits > 1 or self.wire != self.grads):
                self.sent[name] = self.sent.get(name, 0) + numel * self.wire
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
        ahead = max(PREFETCHED, elements(self.params) // max(1, len(self.units) - 1))
        self.ahead, self.most_sent = (-(-ahead * self.compute // min(self.whole.values(), default=1)),) * 2, 2 * ahead

    def beside_sums(self, sent: int) -> int:
        return self.gloo * sent if self.stage else 0

    def stays(self, unit: Unit) -> bool:
        return self.in_backward

    def on_done(self, mark: Mark, unit: Unit) -> None:
        while self.live[BUCKETS].total() - self.live[BUCKETS][WAITING] > self.most_sent * self.wire:
            self.free(BUCKETS, next(iter(self.live[BUCKETS])))
        super().on_done(mark, unit)
        self.free(WEIGHTS, unit.name)


class Deepspeed(Peer):
    """ZeRO-1 and 2 cut the flat tensor of each group of the optimizer, ZeRO-3 each parameter.

    ZeRO-1 and 2 copy gradients into a buffer as large as the model, from the first gradient to the reduction; ZeRO-3
    has it always, and gathers all weights at once. What is reduced is flattened, and cast, anew.
    """

    ahead = (2**30, 0)

    def count(self) -> None:
        stage, n = self.stage, self.ranks
        groups = [elements(each for each in self.trained if self.decays[each] is decays) for decays in (True, False)]
        groups = [numel for numel in groups if numel]
        trained, weights = sum(groups), elements(self.params)
        self.is_plain = stage == 1 and self.compute < self.main  # BF16_Optimizer
        self.flat, self.copies = trained * self.compute, stage in (1, 2) and not self.is_plain
        if stage < 3:
            flats = [-(-numel // (ALIGNED * n)) * ALIGNED for numel in groups]
            used = sum(map(min, groups, flats))
            self.keep(used, used, len(groups), (sum(flats) - used) * (1 + self.states))
            self.memory["main_grads"] = (trained if stage == 1 else used) * self.main
            self.memory["compute_weights"] = weights * self.compute
            self.memory["padding"] += (sum(flats) * n - trained) * self.compute
            self.sums[ALL] = 0 if self.is_plain else self.memory["main_grads"]
            reduced = (sum(flats) * n if self.is_plain else trained) * self.wire
            self.move("inner", "all_reduce", reduced, self.k if stage == 2 else 1)
            self.move("inner", "all_reduce", 4, 0 if self.is_plain else len(groups))
            self.move("inner", "all_reduce", 1, int(stage == 2 and self.compute < self.main))
            for flat in flats:
                self.move("inner", "all_gather", flat * self.compute)
        else:
            here, held = (sum(-(-numel_here(each) // n) for each in params) for params in (self.params, self.trained))
            self.keep(held, held, len(groups))
            small = elements(each for each in self.params if numel_here(each) <= SMALL and not self.gloo)
            self.memory["compute_weights"] = (here + small) * self.compute
            self.memory["buffers"] += weights * self.wire
            self.whole = {unit.name: elements(params) * self.compute for unit, params in self.owned}
            self.move("inner", "all_gather", here * self.compute, self.k)
            self.rows["inner", "all_gather", "count"] *= 2 if self.config.model.tie_embeddings else 1
            self.move("inner", "reduce_scatter", held * self.wire, self.k)
            self.move("inner", "all_reduce", NUMBER, len(groups))

    def beside_gather(self, size: int) -> int:
        return 0

    def stays(self, unit: Unit) -> bool:
        return not self.in_backward

    def on_forward(self, mark: Mark, unit: Unit) -> None:
        super().on_forward(mark, unit)
        if unit.is_root:
            self.take(WEIGHTS, ALL, sum(self.whole.values()))

    def on_left(self, mark: Mark, unit: Unit) -> None:
        if unit is self.order[-1]:
            self.free(WEIGHTS, ALL)

    def on_gradient(self, mark: Mark, unit: Unit) -> None:
        if self.copies:
            self.take(BUCKETS, ALL, self.flat)
        if self.is_plain or (self.stage == 1 and self.k > 1):  # autograd sums them
            most = self.flat if self.is_plain else self.sums[ALL]
            self.live[SUMS][ALL] = min(most, self.live[SUMS][ALL] + mark.given)

    def end(self) -> None:
        self.live[WEIGHTS].clear()
        if not self.last and self.stage < 2:
            return
        numel = self.flat // self.compute
        given, sent, part = numel * self.main, numel * self.wire, numel * self.main // self.ranks
        given = self.flat if self.copies else given
        if self.copies and self.stage == 1:
            self.live[SUMS].clear()
        if self.copies and given != sent:  # what is cast to be sent is alive while this rank's part is taken
            self.take(SUMS, ALL, part)
        self.note("reduction", 0, (1 + self.gloo) * sent if self.stage == 3 else given + (given != sent) * sent)
        self.live[BUCKETS].clear()
        if self.copies:
            self.take(SUMS, ALL, part)


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
    if config.engine.name is not EngineName.deepspeed:
        return
    splits = config.sharding.strategy is Strategy.optim_grads_params
    if splits and config.cluster.device is Device.cuda:
        yield "wire", "engine=deepspeed on cuda: ZeRO-3 leaves small parameters whole"
    limit = GATHERED if splits else REDUCED
    if parameter_count(config) > limit:
        for part in ("peak", "wire"):
            yield part, f"engine=deepspeed: more than {limit:,} weights travel in parts"
