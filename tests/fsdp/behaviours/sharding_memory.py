"""Behaviours 1 to 11: what is stored where, and how long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn

from harness.fsdp import Dtypes, MixedPrecisionPolicy, build, megatron
from harness.fsdp.ragged.tensor import local_of
from harness.fsdp.runtime import units
from harness.fsdp.runtime.units import UnitPlan
from harness.fsdp.storage import layout
from harness.fsdp.storage.gradients import Gradients
from harness.fsdp.storage.memory import BucketMemory
from harness.fsdp.storage.param_group import ParamGroup
from harness.fsdp.update.flat_step import FlatStep
from tests.fsdp.behaviours.lab import ALL, FP32, Lab, Mutant, behaviour, live_bytes
from tests.fsdp.behaviours.models import (
    Block,
    Chain,
    Experts,
    Filled,
    FilledBlock,
    Layer,
    Mixture,
    Net,
    Single,
    SmallRows,
    Tied,
    partly_frozen,
    seeded,
)
from tests.fsdp.behaviours.subject import NotOffered, Setup, adamw, expert_mesh, sgd
from tests.fsdp.checked import patched

_plan_units, _fully_shard_model = units.plan_units, megatron.fully_shard_model


def _planning(replacement: Any) -> Any:
    return lambda: mock.patch.object(
        build, "plan_units", lambda module, classes, _min_elements: replacement(module, classes)
    )


NOTHING_IS_FREED = Mutant(
    "a temporary bucket that is done with keeps its memory",
    patched(BucketMemory, "free"),
)
ONE_UNIT = Mutant(
    "the unit list is not looked at: everything is one unit",
    _planning(lambda module, classes: _plan_units(module, ())),
)


# -- 1: the matrix of buffers ------------------------------------------------------------------------------------------

WHOLE = {
    "no_shard": (2 + 4 + 4 + 8, 0),
    "optim": (2 + 4, 4 + 8),
    "optim_grads": (2, 4 + 4 + 8),
    "optim_grads_params": (0, 2 + 4 + 4 + 8),
}
"""Bytes an element kept whole, and cut over the ranks: bf16 compute, fp32 main weights and gradients, Adam."""


_resolve = MixedPrecisionPolicy.resolve


def _wide_gradients(self: MixedPrecisionPolicy, compute: torch.dtype) -> Dtypes:
    return replace(_resolve(self, compute), grads=torch.float64)


@behaviour(
    "1",
    "Buffers are whole or cut as the strategy says; persistent bytes match the formula.",
    NOTHING_IS_FREED,
    Mutant(
        "main gradients are kept in fp64, whatever the policy says",
        patched(MixedPrecisionPolicy, "resolve", _wide_gradients),
    ),
)
def buffers(lab: Lab) -> str:
    lab.dim = 128
    make = seeded(Net, units=8, dim=128, hidden=192)
    numel = sum(p.numel() for p in make().parameters())
    told = []
    for strategy in lab.each(ALL):
        with lab.asking():
            before = live_bytes()
            setup = Setup(strategy, (Block,), compute=torch.bfloat16)
            subject = lab.build(make, setup, adamw())
            lab.train(subject, 1)
            lab.accumulate(subject)
            subject.finish()
            found = (live_bytes() - before) / numel
            whole, cut = WHOLE[strategy]
            most = whole + cut / lab.world
            # Compute weights need not be kept where they are gathered for each use.
            least = most - (2 if strategy in ("optim_grads", "optim_grads_params") else 0)
            told.append(f"{strategy} {found:.2f} (formula {most:g})")
            lab.claim(least * 0.98 < found < most * 1.02, f"{strategy} keeps {found:.2f} B an element, not {most:g}")
            lab.drop(subject)
            del subject
    return "bytes an element on 2 ranks: " + ", ".join(told) + lab.without


# -- 2 to 4: rows ------------------------------------------------------------------------------------------------------


@behaviour(
    "2",
    "A rank boundary never splits a row, also of small matrices.",
    Mutant(
        "shards are cut at equal numbers of elements, wherever that falls",
        patched(layout, "_shard_numel", lambda numel, row, ranks: -(-numel // ranks)),
    ),
)
def rows_are_whole(lab: Lab) -> str:
    make = seeded(lambda: Chain(SmallRows()))
    subject = lab.gradients(make, Setup(units=(SmallRows,)))
    held, rows = subject.held(), {name: p.shape[1] for name, p in make().named_parameters()}
    for name, numel in held.items():
        lab.claim(numel % rows[name] == 0, f"{name}: {numel} elements here, rows of {rows[name]}")
    return f"(3, 30) and (5, 8): this rank holds {held}"


_add_pieces = FlatStep._add_pieces


def _none_with_an_empty_one(self: FlatStep, bucket: Any, stepped: Any) -> None:
    _add_pieces(self, bucket, stepped if all(local_of(param).numel() for _, param, _ in stepped.values()) else {})


@behaviour(
    "4",
    "A parameter smaller than a chunk may lie on one rank; empty shards are legal and train.",
    Mutant(
        "a rank that holds nothing of one parameter leaves the rest of its bucket out of the update too",
        patched(FlatStep, "_add_pieces", _none_with_an_empty_one),
    ),
    ranks=4,
)
def empty_shards(lab: Lab) -> str:
    subject = lab.weights(seeded(lambda: Chain(Single())), Setup(units=(Single,)), sgd(momentum=0.9))
    held = lab.everywhere(subject.held()["blocks.0.row"])
    lab.claim(sum(held) == 16 and held.count(0) == lab.world - 1, f"elements of the one row on each rank: {held}")
    return lab.off(f"a parameter of one row lies on the ranks as {held}; weights after 3 steps")


# -- 5, 6: groups ------------------------------------------------------------------------------------------------------


def _mixed() -> Any:
    net: Any = partly_frozen()
    for block in net.blocks:
        block.up.weight.data = block.up.weight.data.bfloat16()
    return net


@behaviour(
    "5", "Parameters of different dtype, requires_grad or unit never share a buffer or travel together.", ONE_UNIT
)
def groups_are_apart(lab: Lab) -> str:
    make = seeded(_mixed)
    kinds = {name: (p.dtype, p.requires_grad, name.split(".")[1]) for name, p in make().named_parameters()}
    subject = lab.build(make, Setup(units=(Block,), as_it_is=True))
    groups = subject.groups()
    for group in groups:
        for place, what in enumerate(("dtype", "requires_grad", "unit")):
            found = {kinds[name][place] for name in group}
            lab.claim(len(found) == 1, f"what travels together has {what} {', '.join(sorted(map(str, found)))}")
    return f"{len(groups)} buffers, each of one dtype, requires_grad and unit"


@behaviour(
    "5-experts",
    "Expert parameters are never in one buffer with dense ones.",
    Mutant(
        "the mark of an expert is not looked at",
        _planning(lambda module, classes: _plan_units(_unmarked(module), classes)),
    ),
)
def experts_are_apart(lab: Lab) -> str:
    group = expert_mesh(2, tensor_axis=False)["ep"].get_group()
    subject = lab.build(lambda: Mixture(group, 2, lab.rank), Setup(units=(Experts,), expert_parallel=2))
    groups = subject.groups()
    for names in groups:
        lab.claim(len({".experts." in name for name in names}) == 1, f"one buffer holds {', '.join(names)}")
    return f"{len(groups)} buffers, experts in their own"


def _unmarked(module: nn.Module) -> nn.Module:
    for param in module.parameters():
        vars(param).pop("allreduce", None)
    return module


@behaviour(
    "6",
    "Of nested units, the outermost owns the parameters.",
    Mutant(
        "the innermost unit owns them",
        _planning(lambda module, classes: _plan_units(module, [c for c in classes if c is not Layer])),
    ),
)
def outermost_owns(lab: Lab) -> str:
    if lab.subject.name == "fsdp2":
        raise NotOffered("whoever wraps decides: a call takes what no call before it took")
    make = seeded(lambda: Chain(Layer(), Layer()))
    groups = sorted(sorted(group) for group in lab.build(make, Setup(units=(Block, Layer))).groups())
    want = [sorted(name for name, _ in make().named_parameters() if name.startswith(f"blocks.{i}.")) for i in range(2)]
    lab.claim(groups == want, f"{len(groups)} buffers, the first of {', '.join(groups[0][:3])}")
    return "two buffers, one for each outer unit"


# -- 7, 8: frozen and tied ---------------------------------------------------------------------------------------------

_point_at_weights = ParamGroup.point_at_weights


def _frozen_get_storage(self: ParamGroup) -> None:
    if not self.trainable and self.gradients is None:
        params = [param for _, param in self.params]
        self.gradients = Gradients(self.name, params, self.cuts, self.placements, self.dtypes, self.plan)
    _point_at_weights(self)


@behaviour(
    "7",
    "Frozen parameters have no gradient storage, and training around them works.",
    Mutant("frozen buckets get gradient storage too", patched(ParamGroup, "point_at_weights", _frozen_get_storage)),
)
def frozen(lab: Lab) -> str:
    make = seeded(partly_frozen)
    names = [name for name, param in make().named_parameters() if not param.requires_grad]
    for strategy in lab.each(ALL):
        with lab.asking():
            subject = lab.gradients(make, Setup(strategy, (Block,)), 2)
            kept = [name for name in names if subject.has_gradient_storage(name)]
            lab.claim(not kept, f"{strategy}: gradient storage for frozen {', '.join(kept[:2])}")
            before = {name: weight.clone() for name, weight in subject.weights().items()}
            subject.step()
            after = subject.weights()
            moved = [name for name in names if not before[name].equal(after[name])]
            lab.claim(not moved, f"{strategy}: frozen {', '.join(moved[:2])} moved")
    return lab.off("no storage for frozen ones, gradients of the others")


def _tied_to_a_unit(module: nn.Module, classes: Any) -> list[UnitPlan]:
    plans = _plan_units(module, classes)
    for key, members in list(plans[0].buckets.items()):
        plans[1].buckets[key] = [*plans[1].buckets.get(key, []), *members]
    plans[0].buckets.clear()
    return plans


@behaviour(
    "8",
    "Tied parameters are stored once, reduced once, and stay equal.",
    Mutant("a tied parameter comes and goes with one of the units", _planning(_tied_to_a_unit)),
)
def tied(lab: Lab) -> str:
    subject = lab.gradients(seeded(Tied), Setup(units=(Block,)))
    times = sum(name in ("embed.weight", "head.weight") for group in subject.groups() for name in group)
    lab.claim(times == 1, f"the tied matrix is stored {times} times")
    subject.step()
    lab.train(subject, 2)
    same = subject.module.head.weight is subject.module.embed.weight
    lab.claim(same, "head and embedding are no longer one parameter")
    return lab.off("stored once, one parameter after 3 steps, gradient of both uses")


# -- 9 to 11: meta device, hybrid state, memory returned ---------------------------------------------------------------


def _never_filled(module: nn.Module, **arguments: Any) -> Any:
    with mock.patch.object(Filled, "reset_parameters"):
        return _fully_shard_model(module, **arguments)


@behaviour(
    "9",
    "Meta-device initialisation by reset_parameters gives the values of an eager one.",
    Mutant("what was materialised is never filled", patched(megatron, "fully_shard_model", _never_filled)),
)
def meta_device(lab: Lab) -> str:
    def made() -> nn.Module:
        return Chain(*(FilledBlock() for _ in range(3)))

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return made()

    if lab.subject.name == "fsdp2":
        raise NotOffered("it shards on meta, and leaves filling the shards to the caller")
    subject = lab.build(on_meta, Setup(units=(FilledBlock,), options={"init_model_with_meta_device": True}))
    error = lab.error(subject.weights(), {name: p.detach() for name, p in made().named_parameters()})
    lab.claim(error == 0.0, f"weights off by {error:.1e}")
    lab.train(subject, 1)
    lab.within(FP32, lab.error(subject.weights(), lab.trained(made, sgd(), 1)), "weights after a step")
    return lab.off("weights equal to the bit, and after a step")


def _outer_is_ignored(module: nn.Module, **arguments: Any) -> Any:
    return _fully_shard_model(module, **{**arguments, "outer_dp_sharding_strategy": "no_shard"})


@behaviour(
    "10",
    "Optimizer state of a rank is 1/(inner x outer) of all under HFSDP, 1/inner under HSDP.",
    Mutant("the outer strategy is accepted and ignored", patched(megatron, "fully_shard_model", _outer_is_ignored)),
    ranks=4,
)
def hybrid_state(lab: Lab) -> str:
    make = seeded(Net)
    numel = sum(p.numel() for p in make().parameters())
    told = []
    for outer, share in lab.each((("no_shard", 2), ("optim", 4))):
        with lab.asking():
            subject = lab.build(make, Setup(units=(Block,), outer=2, outer_strategy=outer), adamw())
            lab.train(subject, 1)
            held = lab.everywhere(sum(subject.held().values()))
            told.append(f"outer {outer} {max(held)}/{numel}")
            fair = sum(held) * share == numel * lab.world and max(held) < 1.5 * numel / share
            lab.claim(fair, f"outer {outer}: the ranks' optimizers step {held} of {numel} elements")
    return "elements a rank's optimizer steps: " + ", ".join(told) + lab.without


@behaviour(
    "11",
    "Memory returns to its resting level after each step, and to the start when the engine is deleted.",
    NOTHING_IS_FREED,
)
def memory_returns(lab: Lab) -> str:
    lab.dim = 64
    make = seeded(Net, units=6, dim=64, hidden=96)
    numel = sum(p.numel() for p in make().parameters())
    empty = live_bytes()
    subject = lab.build(make, Setup(units=(Block,)))
    built, levels = live_bytes() - empty, []
    for _ in range(3):
        lab.train(subject, 1)
        levels.append((live_bytes() - empty) / numel)
    lab.drop(subject)
    del subject
    left = live_bytes() - empty
    told = f"built at {built / numel:.2f} bytes an element, rests at {', '.join(f'{level:.2f}' for level in levels)}"
    lab.claim(max(levels) - min(levels) < 0.01, told)
    lab.claim(levels[0] * numel < built + 2 * numel, told)
    lab.claim(left < 0.02 * 4 * numel, f"{left} of {built} bytes are left after it is deleted")
    return f"{told}; {left} bytes left when deleted"
