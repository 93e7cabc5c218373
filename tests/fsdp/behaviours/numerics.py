"""Behaviours 21 to 27: is it the gradient of the whole batch."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from harness.fsdp import megatron
from harness.fsdp.comm.reduction import Reduction
from harness.fsdp.runtime.gather import GatherPipeline
from harness.fsdp.runtime.reduce import ReducePipeline
from harness.fsdp.storage.param_group import ParamGroup
from tests.fsdp.behaviours.lab import ALL, BF16, FP32, Lab, Mutant, behaviour, first_line, relative
from tests.fsdp.behaviours.models import Block, Experts, Mixture, Net, batch, loss_of, seeded
from tests.fsdp.behaviours.subject import NotOffered, Setup, expert_mesh
from tests.fsdp.checked import patched

NET = seeded(Net)

_fold, _fold_exchange, _finish = Reduction._take_sums, Reduction._sum_received, ReducePipeline.finish


def _folding(replacement: Any) -> Any:
    return patched(Reduction, "_take_sums", replacement)


def _always_adds(self: Reduction, exchange: Any, into: list[Tensor], *, add: bool) -> None:
    _fold(self, exchange, into, add=True)


def _adds_where_alone(self: Reduction, exchange: Any, into: list[Tensor], *, add: bool) -> None:
    _fold_exchange(self, exchange, into, add=add or self.comm.size == 1)


def _halves_outside(self: Reduction, exchange: Any, into: list[Tensor], *, add: bool) -> None:
    _fold(self, exchange, into, add=add)
    ranks = dist.get_process_group_ranks(self.comm.group)
    if len(ranks) == 2 and ranks[1] - ranks[0] == 2:
        for target in into:
            target.mul_(0.5)


def _experts_doubled(self: Reduction, exchange: Any, into: list[Tensor], *, add: bool) -> None:
    _fold(self, exchange, into, add=add)
    if self.comm.size < dist.get_world_size():
        for target in into:
            target.mul_(2.0)


def _finishes_twice(self: ReducePipeline) -> None:
    _finish(self)
    _finish(self)


ADDS_TO_LOCAL = Mutant("a reduced gradient is added to the local one it replaces", _folding(_always_adds))
SCALED_TWICE = Mutant("the divisor is applied twice", patched(ReducePipeline, "finish", _finishes_twice))


@behaviour(
    "21", "ZeRO-1 with a wire of its own dtype: the shard never includes the local gradient twice.", ADDS_TO_LOCAL
)
def local_gradient_counts_once(lab: Lab) -> str:
    lab.gradients(NET, Setup("optim", (Block,), comm=torch.bfloat16), 2, bound=BF16)
    return lab.off("gradients with a bf16 wire and k = 2")


def _sums_in_wire(self: Reduction, exchange: Any, into: list[Tensor], *, add: bool) -> None:
    _fold(self, exchange, into, add=add)
    for target in into:
        target.copy_(target.to(self.dtypes.wire))


@behaviour(
    "22",
    "ZeRO-2 and ZeRO-3: microbatches add up in the main gradients' dtype, whatever the wire's.",
    Mutant("sums over microbatches are kept in the wire's dtype", _folding(_sums_in_wire)),
)
def accumulates_wide(lab: Lab) -> str:
    """One gradient, then fifteen of a 1024th of it: each below what bf16 adds to the first."""
    told = []
    for strategy in ("optim_grads", "optim_grads_params"):
        sums = []
        for scales in ((1.0,), (1.0, *[2.0**-10] * 15)):
            subject = lab.build(seeded(Net), Setup(strategy, (Block,), comm=torch.bfloat16))
            for place, scale in enumerate(scales):
                subject.microbatch(lambda m, s=scale: loss_of(m, batch(0)) * s, last=place == len(scales) - 1)
            sums.append(subject.gradients())
        grown = max(abs((sums[1][n] / sums[0][n]).nanmedian().item() - 1 - 15 / 1024) for n in sums[0])
        told.append(f"{strategy} {grown:.1e}")
        lab.claim(grown < 2e-3, f"{strategy}: the small ones' share is off by {grown:.1e} of the sum (it is 1.5e-02)")
    return "fifteen microbatches of 1/1024 of the first are missing by " + ", ".join(told)


@behaviour(
    "23",
    "1/DP is applied once: gradients do not depend on the number of microbatches, nor on how the average is made.",
    SCALED_TWICE,
)
def divided_once(lab: Lab) -> str:
    for strategy in lab.each(ALL):
        with lab.asking():
            for k in (1, 2, 4):
                lab.gradients(NET, Setup(strategy, (Block,)), k)
    return f"{lab.off('k = 1, 2, 4: gradients')}; {_averaging(lab)}"


def _averaging(lab: Lab) -> str:
    """What `average_in_collective` does."""
    try:
        lab.gradients(NET, Setup(units=(Block,), options={"average_in_collective": True}))
    except (NotOffered, NotImplementedError):
        return "average_in_collective is refused"
    except Exception as failure:  # whatever it is, it is no refusal
        told = f"{type(failure).__name__}: {first_line(failure)}"
        lab.claim(False, f"k = 1, 2, 4 are right, but average_in_collective: {told}")
    return "average_in_collective is among them"


_shard = megatron.shard


@behaviour(
    "24",
    "calculate_per_token_loss scales nothing: gradients are the sum.",
    Mutant(
        "it is accepted and ignored",
        lambda: mock.patch.object(
            megatron, "shard", lambda *args, **kwargs: _shard(*args, **{**kwargs, "grad_divisor": None})
        ),
    ),
)
def per_token(lab: Lab) -> str:
    want = {name: value * lab.world for name, value in lab.plain(NET, 2).items()}
    for strategy in lab.each(ALL):
        with lab.asking():
            subject = lab.build(NET, Setup(strategy, (Block,), options={"calculate_per_token_loss": True}))
            lab.accumulate(subject, 2)
            lab.within(FP32, lab.error(subject.gradients(), want), f"{strategy}: the sum over ranks is")
    return lab.off(f"gradients are {lab.world} x the averaged ones,")


def _mixtures(lab: Lab, strategies: tuple[str, ...], ks: tuple[int, ...]) -> str:
    """Claim that dense gradients and this rank's expert's are those of all experts in one process."""
    mesh = expert_mesh(2, tensor_axis=False)
    group, own = mesh["ep"].get_group(), mesh.get_local_rank("ep")
    for strategy in lab.each(strategies):
        with lab.asking():
            for k in ks:
                subject = lab.build(lambda: Mixture(group, 2, own), Setup(strategy, (Experts,), expert_parallel=2))
                lab.accumulate(subject, k)
                have, want = subject.gradients(), lab.plain(lambda: Mixture(None, 2, 0), k)
                expert = relative(have["layer.experts.0.weight"], want[f"layer.experts.{own}.weight"])
                dense = max(relative(have[name], want[name]) for name in have if ".experts." not in name)
                lab.within(FP32, dense, f"{strategy}, k = {k}: dense gradients")
                lab.within(FP32, max(lab.everywhere(expert)), f"{strategy}, k = {k}: gradients of experts")
    return lab.off(f"EP 2 of {lab.world} ranks, k = {', '.join(map(str, ks))}: gradients")


@behaviour(
    "25",
    "Expert gradients have the right divisor: those of all experts on one process.",
    Mutant("experts are divided by the size of their own group", patched(Reduction, "_take_sums", _experts_doubled)),
    ranks=4,
)
def experts_are_divided_right(lab: Lab) -> str:
    return _mixtures(lab, ("no_shard", "optim_grads_params"), (1,))


ADDS_ALONE = Mutant("a lone rank adds its sum to itself", patched(Reduction, "_sum_received", _adds_where_alone))


@behaviour(
    "26",
    "A group of one rank: gradients are those of one process, for 1, 2 and 4 microbatches and any wire.",
    ADDS_ALONE,
    ranks=1,
)
def lone_rank(lab: Lab) -> str:
    for strategy in lab.each(ALL):
        with lab.asking():
            for comm, bound in ((torch.float32, FP32), (torch.bfloat16, BF16)):
                for k in (1, 2, 4):
                    lab.gradients(NET, Setup(strategy, (Block,), comm=comm), k, bound=bound)
    return lab.off("gradients with fp32 and bf16 wires")


@behaviour(
    "26-experts",
    "Expert groups of one rank (EP = DP): gradients are those of all experts on one process.",
    ADDS_ALONE,
)
def lone_experts(lab: Lab) -> str:
    return _mixtures(lab, ("no_shard", "optim", "optim_grads_params"), (1, 2, 4))


@behaviour(
    "27",
    "HSDP gives FSDP's gradients; replicas stay identical; HFSDP too.",
    Mutant("the outer stage divides once more", _folding(_halves_outside)),
    ranks=4,
)
def hybrid_equals_flat(lab: Lab) -> str:
    for strategy, outer in lab.each([(s, o) for s in ALL for o in ("no_shard", "optim")]):
        with lab.asking():
            try:
                _hybrid(lab, Setup(strategy, (Block,), outer=2, outer_strategy=outer))
            except (NotOffered, NotImplementedError):
                raise
            except ValueError as refusal:
                lab.claim(lab.subject.name != "native", f"{strategy}, outer {outer}: {first_line(refusal)}")
                raise NotOffered(f"{strategy} with outer {outer} is refused") from refusal
            except RuntimeError as error:
                lab.claim(False, f"{strategy}, outer {outer}: {first_line(error)[:120]}")
    return lab.off("replicas equal to the bit, gradients")


def _hybrid(lab: Lab, setup: Setup) -> None:
    subject = lab.gradients(NET, setup, 2)
    subject.step()
    lab.train(subject, 2)
    digests = lab.everywhere({n: w.double().sum().item() for n, w in subject.weights().items()})
    told = f"{setup.strategy}, outer {setup.outer_strategy}: replicas differ after 3 steps"
    lab.claim(all(d == digests[0] for d in digests), told)


_prefetch = GatherPipeline._prefetch


def _blank_ahead(self: GatherPipeline) -> None:
    given = ParamGroup.given
    with mock.patch.object(ParamGroup, "given", lambda *call: [torch.zeros_like(each) for each in given(*call)]):
        _prefetch(self)


@behaviour(
    "27-overlap",
    "Results do not depend on whether communication overlaps.",
    Mutant("what is fetched ahead is not filled", patched(GatherPipeline, "_prefetch", _blank_ahead)),
)
def overlap_changes_nothing(lab: Lab) -> str:
    for strategy in lab.each(ALL):
        with lab.asking():
            found = []
            for overlap in (True, False):
                subject = lab.build(NET, Setup(strategy, (Block,), overlap=overlap))
                lab.train(subject, 3)
                found.append(subject.weights())
            lab.within(FP32, lab.error(*found), f"{strategy}: weights of 3 steps without overlap")
    return lab.off("weights of 3 steps with and without overlap")
