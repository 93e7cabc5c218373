"""Mistakes that a review of the engine would think of first: each by the training of `trial` that shows it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.storage.memory import BucketMemory
from harness.fsdp.storage.param_group import ParamGroup
from tests.fsdp.checked import patched
from tests.fsdp.trial import Case
from tests.support.mutants import slips

COUNTED = 2
"""Steps of trainings whose traffic and memory are judged; those of others are more."""


@dataclass(frozen=True)
class Mutant:
    """breaks: the mistake. patch: makes it while it is entered. found: what a judge says of the training `case`."""

    breaks: str
    patch: Callable[[], Any]
    found: str
    case: Case


def case_of(words: str) -> Case:
    """A training by its strategy and whatever else differs, as `optim k=2`; its traffic is judged if that begins with
    `counted`. Else plain SGD trains: it shows the scale of a gradient, which Adam hides."""
    first, *more = words.removeprefix("counted ").split()
    given = {key: ast.literal_eval(value) for key, value in (each.split("=") for each in more)}
    usual = {"steps": COUNTED} if words.startswith("counted") else {"optimizer": "sgd", "steps": 3}
    return Case(**{"engine": "native", "strategy": first, "world_size": 2} | usual | given)


_prefetch, _refill = GatherPipeline._prefetch, BucketMemory.refill


def _blank_ahead(self: GatherPipeline) -> None:
    cast = ParamGroup.cast_shards
    with mock.patch.object(ParamGroup, "cast_shards", lambda *call: [torch.zeros_like(each) for each in cast(*call)]):
        _prefetch(self)


def _is_in_use(memory: BucketMemory, bucket: Tensor) -> bool:
    placed = memory._placed.get(id(bucket))
    return bucket.untyped_storage().nbytes() > 0 if placed is None else id(bucket) in placed[0].filled


def _slots_overlap(self: BucketMemory, bucket: Tensor) -> None:
    _refill(self, bucket)
    before = getattr(self, "_last_refilled", None)
    if before is not None and before is not bucket and _is_in_use(self, before):
        before.fill_(float("nan"))
    self._last_refilled = bucket


PATCHES: dict[str, tuple[str, Callable[[], Any], str, str]] = {
    "blank weights ahead": (
        "What is fetched ahead is not filled",
        patched(GatherPipeline, "_prefetch", _blank_ahead),
        "gradient:",
        "optim_grads_params",
    ),
    "slots overlap": (
        "A slot of the double buffer is handed out while the unit in it is in use",
        patched(BucketMemory, "refill", _slots_overlap),
        "gradient:",
        "optim_grads_params model='odd' options=(('double_buffer',True),)",
    ),
}

SLIPS = slips(
    r"""
    adds over the unreduced: A reduced gradient is added to the buffer that held the unreduced one
        fsdp.comm.reduction.Reduction.fold: if add: => if True:
        gradient:
        optim options=(('transport','backend'),)
    last microbatch alone: Each microbatch's sums replace those of the microbatches before
        fsdp.comm.reduction.Reduction.fold: if add: => if False:
        gradient:
        optim_grads k=2 options=(('transport','backend'),)
    scales twice: Gradients are divided by the number of microbatches twice
        fsdp.comm.reduction.Reduction.fold: scale_together([target], exchange.factor)
            => scale_together([target], exchange.factor**2)
        gradient:
        optim options=(('transport','backend'),)
    wrong contribution: The first rank's contribution stands for every rank's
        shm.transfer.sum_in_order: (term[begin:end] for term in terms) => (terms[0][begin:end] for _ in terms)
        gradient:
        optim_grads_params
    one contribution twice: The last rank's contribution counts twice
        shm.transfer.sum_in_order: for term in terms) => for term in [*terms, terms[-1]])
        gradient:
        no_shard
    sums in the wire's dtype: Sums over microbatches are kept in the wire's dtype
        fsdp.runtime.reduce.PendingReduction._reduce: for step in route[1:]:
            => [each.copy_(each.bfloat16()) for each in sums]\n    for step in route[1:]:
        gradient:
        optim_grads k=3
    the outer stage divides: The outer stage divides once more
        fsdp.comm.reduction.Reduction.exchange: Exchange(parts, label, factor)
            => Exchange(parts, label, factor * (0.5 if label.bucket.endswith("outer") else 1))
        gradient:
        optim_grads world_size=4 outer=2
    a lone rank doubles: A lone rank adds its sum to itself
        fsdp.comm.reduction.Reduction.fold: if add: => if add or self.comm.size == 1:
        gradient:
        optim_grads_params world_size=1
    unwritten gradients are sent: Where no gradient came, what lies in memory is sent
        fsdp.storage.gradients.Gradients.settle: zero_() => fill_(7.0)
        gradient:
        optim_grads_params model='odd'
    weights are not installed: The next forward computes with the weights from before the update
        fsdp.storage.param_group.ParamGroup.install: if self.kept is not None: => if False:
        gradient norm: step 2|update:
        optim
    norm misses a piece: The gradient norm leaves out a rank's last piece
        fsdp.update.norms.sum_of_squares: for tensor in tensors if => for tensor in list(tensors)[:-1] if
        gradient norm: step 1|update:
        optim clip=0.5
    local norm: Each rank clips by the norm of what it holds itself
        fsdp.update.norms._euclidean: everyone.sum_scalars(total, "norm") => pass
        gradient norm: step 1|update:
        optim_grads clip=0.5
    nothing is clipped: The norm is right and nothing is clipped
        fsdp.update.norms.clip_gradients: coefficient.clamp_(max=1.0) => coefficient.fill_(1.0)
        update:
        optim_grads_params clip=0.5
    gradients are kept: Gradients are not forgotten after the update, and the next step adds to them
        fsdp.storage.gradients.Gradients.forget: if self.is_in_place: => if False:
        gradient norm: step 2|update:
        no_shard
    empty shards end an update: A rank that holds nothing of one parameter leaves the rest of its bucket out, too
        fsdp.update.steps.LocalStep._local: None if grad is None else
            => None if grad is None or not all(p.to_local().numel() for p in location_of(param)[0].params) else
        update:
        optim_grads_params world_size=4 model='odd'
    the last one is not stepped: The last parameter of each bucket gets no gradient
        fsdp.storage.at_rest.ShardedParameters.install_grads: none = ( => none = param is self.params[-1] or (
        gradient:
        optim_grads_params
    rows are cut: Shards are cut at equal numbers of elements, wherever that falls
        fsdp.storage.layout._shard_numel: rows = -(-numel // (row_numel * num_ranks))
            => return -(-numel // num_ranks)\n    rows = 0
        size of the|invalid for input
        optim_grads_params world_size=4
    counters begin late: State is made by a step on zero gradients, whose step count stays
        fsdp.update.rules._first: FIRST.get(entry, 0.0) => FIRST.get(entry, float(entry == "step"))
        update:
        optim_grads_params optimizer='adamw'
    one group's settings: The first group's settings are taken for all
        fsdp.update.steps.LocalStep._begin: unfused=self.unfused)
            => unfused=self.unfused) | {"weight_decay": groups[0]["weight_decay"]}
        update:
        optim_grads_params optimizer='adamw'
    the root is forgotten: Only units are gathered
        fsdp.runtime.gather.GatherPipeline.pre_forward: for unit in self._roots: => for unit in ():
        sharded one
        optim_grads_params model='odd'
    tied to a unit: A tied parameter comes and goes with one of the units
        fsdp.runtime.units.plan_units: next(iter(units)) if len(units) == 1 else id(module)
            => next(each for each in (*units, *plans) if each != id(module))
        sharded one
        optim_grads_params model='odd'
    memory is not freed: A temporary bucket that is done with keeps its memory
        fsdp.storage.memory.BucketMemory.free: if nbytes := storage.nbytes(): => if nbytes := 0:
        at rest|at most
        counted optim_grads_params
    wide gradients: Main gradients are kept in fp64, whatever the policy says
        fsdp.policy.MixedPrecisionPolicy.resolve: return dtypes
            => return Dtypes(**vars(dtypes) | {"grads": torch.float64})
        of main gradients
        counted optim_grads_params dtype='bf16_comm'
    wide wire: Gradients travel in the dtype they are kept in
        fsdp.policy.MixedPrecisionPolicy.resolve: return dtypes
            => return Dtypes(**vars(dtypes) | {"wire": dtypes.grads})
        bytes of
        counted optim_grads world_size=4 outer=2 outer_strategy='optim' dtype='bf16_comm'
    one unit: The unit list is not looked at, so that everything is one unit
        fsdp.runtime.units.plan_units: tuple(unit_classes) => ()
        units
        counted optim_grads_params
    innermost units: The innermost modules with weights are the units
        fsdp.runtime.units.plan_units: tuple(unit_classes) => (nn.Linear,)
        units
        counted optim_grads_params
    the root is dropped: All weights are dropped between forward and backward, the root's too
        fsdp.runtime.gather.GatherPipeline.post_forward: if self._late: => self.reshard_all()\n    if self._late:
        collectives
        counted optim_grads_params k=2
    no_sync is ignored: no_sync is not asked, and every backward reduces
        fsdp.runtime.step.Step.pre_backward: self.sync or self.reduces_each, last=self.sync, => True, last=True,
        never reduced
        counted optim k=3 world_size=4 outer=2
    the outer axis is not cut: The outer strategy is accepted and ignored
        fsdp.build.BuildContext.placements: self.outer_strategy if => OuterStrategy.no_shard if
        what travels is not
        counted optim_grads_params world_size=4 outer=2 outer_strategy='optim'
    """
)
MUTANTS = {
    **{name: Mutant(breaks, patch, found, case_of(words)) for name, (breaks, patch, found, words) in PATCHES.items()},
    **{name: Mutant(slip.breaks, slip.patched, found, case_of(words)) for name, (slip, found, words) in SLIPS.items()},
}
