"""Mistakes that a review of the engine would think of first: each by the training of `trial` that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.fsdp import Dtypes, MixedPrecisionPolicy, build
from harness.fsdp.comm import reduction
from harness.fsdp.comm.communicator import Communicator
from harness.fsdp.comm.reduction import Reduction
from harness.fsdp.runtime import units
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.step import BackwardPlan, StepShape
from harness.fsdp.runtime.units import UnitPlan
from harness.fsdp.storage import layout
from harness.fsdp.storage.at_rest import ShardedParameters
from harness.fsdp.storage.gradients import Gradients
from harness.fsdp.storage.memory import BucketMemory
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.storage.parameter_access import put_grad
from harness.fsdp.update import norms
from harness.fsdp.update.flat_step import FlatStep
from harness.fsdp.vocabulary import OuterStrategy
from harness.shm import transfer
from harness.shm.transfer import sum_in_order
from tests.fsdp.checked import patched
from tests.fsdp.test_oracle import CLIP
from tests.fsdp.trial import Case

ZERO1, ZERO2, ZERO3 = "optim", "optim_grads", "optim_grads_params"


@dataclass(frozen=True)
class Mutant:
    """breaks: the mistake. patch: makes it while it is entered. found: what a judge says of the training `case`."""

    breaks: str
    patch: Callable[[], Any]
    found: str
    case: Case


def trained(strategy: str, k: int = 1, clip: float | None = None, ranks: int = 2, **more: Any) -> Case:
    """Plain SGD: it shows the scale of a gradient, which Adam hides."""
    return Case("native", strategy, ranks, k, clip=clip, **{"optimizer": "sgd", "steps": 3} | more)


COUNTED = 2
"""Steps of trainings whose traffic and memory are judged; those of others are more."""


def counted(strategy: str, k: int = 1, ranks: int = 2, **more: Any) -> Case:
    return Case("native", strategy, ranks, k, steps=COUNTED, **more)


# -- sums --------------------------------------------------------------------------------------------------------------

_sum_in_order, _fold = reduction._sum_in_order, Reduction.fold


def summing(change: Callable[..., dict[str, Any]]) -> Callable[[], Any]:
    """Sums over ranks with other arguments: `change` of `contributions`, `add` and `factor`."""

    def wrong(contributions: list[Tensor], target: Tensor, accum: torch.dtype, **given: Any) -> None:
        arguments = {"contributions": contributions, "factor": 1.0, **given}
        arguments |= change(**arguments)
        _sum_in_order(arguments.pop("contributions"), target, accum, **arguments)

    return patched(reduction, "_sum_in_order", wrong)


def summing_in_memory(change: Callable[[list[Tensor]], list[Tensor]]) -> Callable[[], Any]:
    """Sums of other contributions, of those that lie in shared memory."""

    def wrong(terms: list[Tensor], out: Tensor, dtype: torch.dtype, **given: Any) -> None:
        sum_in_order(change(list(terms)), out, dtype, **given)

    return patched(transfer, "sum_in_order", wrong)


def of_sums(change: Callable[[Reduction, Tensor], Any]) -> Callable[[], Any]:
    """What is summed is changed in place."""

    def wrong(self: Reduction, exchange: Any, into: list[Tensor], *, add: bool) -> None:
        _fold(self, exchange, into, add=add)
        for target in into:
            change(self, target)

    return patched(Reduction, "fold", wrong)


def _halve_outside(self: Reduction, target: Tensor) -> None:
    ranks = dist.get_process_group_ranks(self.comm.group)
    target.mul_(0.5 if ranks[-1] - ranks[0] == len(ranks) else 1)


def _adds_where_alone(self: Reduction, exchange: Any, into: list[Tensor], *, add: bool) -> None:
    _fold(self, exchange, into, add=add or self.comm.size == 1)


def _sent_as_it_lies(self: Gradients) -> None:
    self.copy_in_waiting()
    for index in self._unwritten:
        self._views[index].fill_(7.0)  # as memory that nobody cleared may hold
    self._unwritten = set()


# -- norms and updates -------------------------------------------------------------------------------------------------

_sum_of_squares, _sum_scalars = norms.sum_of_squares, Communicator.sum_scalars
_init, _add_pieces, _install_grads = FlatStep.__init__, FlatStep._add_pieces, ShardedParameters.install_grads


def _all_but_the_last(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    return _sum_of_squares(list(tensors)[:-1], device)


def _own_norm(self: Communicator, values: Tensor, purpose: str) -> Tensor:
    return values if purpose == "norm" else _sum_scalars(self, values, purpose)


def _forgotten(self: ParamGroup) -> None:
    self.installed_version = self.main_version


def _steps_before(self: FlatStep, optimizer: Any, *others: Any) -> None:
    _init(self, optimizer, *others)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    type(optimizer).step(optimizer, None)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()


def _one_setting(self: FlatStep, optimizer: Any, *others: Any) -> None:
    _init(self, optimizer, *others)
    for group in optimizer.param_groups:
        group["weight_decay"] = 10 * optimizer.param_groups[0]["weight_decay"]


def _none_with_an_empty_one(self: FlatStep, bucket: Any, stepped: Any) -> None:
    whole = all(param.to_local().numel() for _, param, _ in stepped.values())
    _add_pieces(self, bucket, stepped if whole else {})


def _last_is_left_out(self: ShardedParameters, *args: Any, **named: Any) -> None:
    _install_grads(self, *args, **named)
    put_grad(self.params[-1], None)


# -- units, gathers and memory -----------------------------------------------------------------------------------------

_plan_units, _plan, _post_forward = units.plan_units, StepShape.plan, GatherPipeline.post_forward
_prefetch, _refill, _resolve = GatherPipeline._prefetch, BucketMemory.refill, MixedPrecisionPolicy.resolve


def planning(plan: Callable[[nn.Module, Any], list[UnitPlan]]) -> Callable[[], Any]:
    return patched(build, "plan_units", plan)


def resolving(change: Callable[[Dtypes], dict[str, torch.dtype]]) -> Callable[[], Any]:
    """Dtypes of a policy, some changed."""

    def resolve(self: MixedPrecisionPolicy, compute: torch.dtype) -> Dtypes:
        found = _resolve(self, compute)
        return replace(found, **change(found))

    return patched(MixedPrecisionPolicy, "resolve", resolve)


def _tied_to_a_unit(module: nn.Module, classes: Any) -> list[UnitPlan]:
    root, first, *more = _plan_units(module, classes)
    for key, members in root.buckets.items():
        first.buckets[key] = [*first.buckets.get(key, []), *members]
    root.buckets.clear()
    return [root, first, *more]


def _always_last(self: StepShape, *, sync: bool, adds: bool) -> BackwardPlan:
    return replace(_plan(self, sync=sync, adds=adds), reduce_units=True, last=True)


def _root_is_dropped(self: GatherPipeline, *, backward_follows: bool, inside: bool = False) -> None:
    _post_forward(self, backward_follows=backward_follows, inside=inside)
    self.reshard_all()


def _root_is_forgotten(self: GatherPipeline) -> None:
    self._begin([unit for unit in self.order if not unit.is_root])
    self._ran, self._late = [], False


def _blank_ahead(self: GatherPipeline) -> None:
    cast = ParamGroup.cast_shards
    with mock.patch.object(ParamGroup, "cast_shards", lambda *call: [torch.zeros_like(each) for each in cast(*call)]):
        _prefetch(self)


def _is_in_use(memory: BucketMemory, bucket: Tensor) -> bool:
    turn = memory._placed.get(id(bucket))
    return bucket.untyped_storage().nbytes() > 0 if turn is None else id(bucket) in turn.filled


def _slots_overlap(self: BucketMemory, bucket: Tensor) -> None:
    _refill(self, bucket)
    before = getattr(self, "_last_refilled", None)
    if before is not None and before is not bucket and _is_in_use(self, before):
        before.fill_(float("nan"))
    self._last_refilled = bucket  # type: ignore[attr-defined]


MUTANTS = {
    "adds over the unreduced": Mutant(
        "A reduced gradient is added to the buffer that held the unreduced one",
        summing(lambda **_: {"add": True}),
        "gradient of",
        trained(ZERO1),
    ),
    "last microbatch alone": Mutant(
        "Each microbatch's sums replace those of the microbatches before",
        summing(lambda **_: {"add": False}),
        "gradient of",
        trained(ZERO2, k=2),
    ),
    "scales twice": Mutant(
        "Gradients are divided by the number of microbatches twice",
        summing(lambda factor, **_: {"factor": factor * factor}),
        "gradient of",
        trained(ZERO1),
    ),
    "wrong contribution": Mutant(
        "The first rank's contribution stands for every rank's",
        summing_in_memory(lambda terms: terms[:1] * len(terms)),
        "gradient of",
        trained(ZERO3),
    ),
    "one contribution twice": Mutant(
        "The last rank's contribution counts twice",
        summing_in_memory(lambda terms: [*terms, terms[-1]]),
        "gradient of",
        trained("no_shard"),
    ),
    "sums in the wire's dtype": Mutant(
        "Sums over microbatches are kept in the wire's dtype",
        of_sums(lambda self, target: target.copy_(target.bfloat16())),
        "gradient of",
        trained(ZERO2, k=3),
    ),
    "the outer stage divides": Mutant(
        "The outer stage divides once more",
        of_sums(_halve_outside),
        "gradient of",
        trained(ZERO2, ranks=4, outer=2),
    ),
    "a lone rank doubles": Mutant(
        "A lone rank adds its sum to itself",
        patched(Reduction, "fold", _adds_where_alone),
        "gradient of",
        trained(ZERO3, ranks=1),
    ),
    "unwritten gradients are sent": Mutant(
        "Where no gradient came, what lies in memory is sent",
        patched(Gradients, "settle", _sent_as_it_lies),
        "gradient of",
        trained(ZERO3, model="odd"),
    ),
    "weights are not installed": Mutant(
        "The next forward computes with the weights from before the update",
        patched(ParamGroup, "install", _forgotten),
        "gradient norm at step 2|update of",
        trained(ZERO1),  # no_shard in one dtype computes with its main weights
    ),
    "norm misses a piece": Mutant(
        "The gradient norm leaves out a rank's last piece",
        patched(norms, "sum_of_squares", _all_but_the_last),
        "gradient norm at step 1|update of",
        trained(ZERO1, clip=CLIP),
    ),
    "local norm": Mutant(
        "Each rank clips by the norm of what it holds itself",
        patched(Communicator, "sum_scalars", _own_norm),
        "gradient norm at step 1|update of",
        trained(ZERO2, clip=CLIP),
    ),
    "nothing is clipped": Mutant(
        "The norm is right and nothing is clipped",
        patched(norms, "clip_gradients"),
        "update of",
        trained(ZERO3, clip=CLIP),
    ),
    "gradients are kept": Mutant(
        "Gradients are not forgotten after the update: the next step adds to them",
        patched(Gradients, "forget"),
        "gradient norm at step 2|update of",
        trained("no_shard"),
    ),
    "counters begin late": Mutant(
        "State is made by a step on zero gradients, whose step count stays",
        patched(FlatStep, "__init__", _steps_before),
        "update of",
        trained(ZERO3, optimizer="adamw"),
    ),
    "one group's settings": Mutant(
        "The first group's settings are taken for all",
        patched(FlatStep, "__init__", _one_setting),
        "update of",
        trained(ZERO3, optimizer="adamw"),
    ),
    "empty shards end an update": Mutant(
        "A rank that holds nothing of one parameter leaves the rest of its bucket out of the update too",
        patched(FlatStep, "_add_pieces", _none_with_an_empty_one),
        "update of",
        trained(ZERO3, ranks=4, model="odd"),
    ),
    "the last one is not stepped": Mutant(
        "The last parameter of each bucket gets no gradient",
        patched(ShardedParameters, "install_grads", _last_is_left_out),
        "gradient of",
        trained(ZERO3),
    ),
    "rows are cut": Mutant(
        "Shards are cut at equal numbers of elements, wherever that falls",
        patched(layout, "_shard_numel", lambda numel, row, ranks: -(-numel // ranks)),
        "size of the|invalid for input",
        trained(ZERO3, ranks=4),
    ),
    "the root is forgotten": Mutant(
        "Only units are gathered",
        patched(GatherPipeline, "pre_forward", _root_is_forgotten),
        "sharded one",
        trained(ZERO3, model="odd"),
    ),
    "blank weights ahead": Mutant(
        "What is fetched ahead is not filled",
        patched(GatherPipeline, "_prefetch", _blank_ahead),
        "gradient of",
        trained(ZERO3),
    ),
    "slots overlap": Mutant(
        "A slot of the double buffer is handed out while the unit in it is in use",
        patched(BucketMemory, "refill", _slots_overlap),
        "gradient of",
        trained(ZERO3, model="odd", options=(("double_buffer", True),)),
    ),
    "tied to a unit": Mutant(
        "A tied parameter comes and goes with one of the units",
        planning(_tied_to_a_unit),
        "sharded one",
        trained(ZERO3, model="odd"),
    ),
    # -- what travels, and what is kept
    "memory is not freed": Mutant(
        "A temporary bucket that is done with keeps its memory",
        patched(BucketMemory, "free"),
        "at rest|at most",
        counted(ZERO3),
    ),
    "wide gradients": Mutant(
        "Main gradients are kept in fp64, whatever the policy says",
        resolving(lambda _: {"grads": torch.float64}),
        "of main gradients",
        counted(ZERO3, dtype="bf16_comm"),
    ),
    "wide wire": Mutant(
        "Gradients travel in the dtype they are kept in",
        resolving(lambda found: {"wire": found.grads}),
        "bytes of",
        counted(ZERO2, ranks=4, outer=2, outer_strategy="optim", dtype="bf16_comm"),
    ),
    "one unit": Mutant(
        "The unit list is not looked at: everything is one unit",
        planning(lambda module, _: _plan_units(module, ())),
        "units",
        counted(ZERO3),
    ),
    "innermost units": Mutant(
        "The innermost modules with weights are the units",
        planning(lambda module, _: _plan_units(module, (nn.Linear,))),
        "units",
        counted(ZERO3),
    ),
    "the root is dropped": Mutant(
        "All weights are dropped between forward and backward, the root's too",
        patched(GatherPipeline, "post_forward", _root_is_dropped),
        "collectives",
        counted(ZERO3, k=2),
    ),
    "no_sync is ignored": Mutant(
        "no_sync is not asked: every backward reduces",
        patched(StepShape, "plan", _always_last),
        "never reduced",
        counted(ZERO1, k=3, ranks=4, outer=2),
    ),
    "the outer axis is not cut": Mutant(
        "The outer strategy is accepted and ignored",
        patched(OuterStrategy, "parse", lambda *_: OuterStrategy.no_shard),
        "what travels is not",
        counted(ZERO3, ranks=4, outer=2, outer_strategy="optim"),
    ),
}
