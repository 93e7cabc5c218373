"""Matrices that torch's Muon steps are those of one process to the last bit, whoever has their rows, and whoever works.

Gradients are known exactly, under every strategy, split and dtype policy: so every mode of numerics has to agree with
torch on a plain model. Shapes are odd: tall, wide, of one row, of fewer rows than ranks; a stack, a frozen one.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from typing import Any

import pytest
import torch

from harness import muon
from harness.fsdp.tensor_parallel import values_here
from harness.probe.collectives import CollectiveMeter
from tests.fsdp.muon import nets
from tests.fsdp.muon.nets import MAKERS, STEPS, Case, sharded, train, trained
from tests.support.covering import Cover, once
from tests.support.mutants import each, slips
from tests.support.spawn import run_ranks

STRATEGIES = "no_shard", "optim", "optim_grads", "optim_grads_params"
MESHES = [
    *[(world, 1, "no_shard", tp) for world, tp in ((1, 1), (2, 1), (3, 1), (8, 1), (1, 2), (3, 2))],
    *[(world, 2, outer, tp) for world, tp in ((4, 1), (4, 2)) for outer in ("no_shard", "optim")],
]
"""Data-parallel ranks, how many of them the outer axis has and what it does, tensor-parallel ranks."""
OPTIONS = ((), (("numerics", "exact"),), (("offload_optimizer", True),))
CASES = Cover(
    (
        Case(
            world, strategy, outer, split, tp, k, maker, policy, options=options,
            worth=0 if k == 2 else 1 << 20,
        )
        for (world, outer, split, tp), strategy, k, maker, policy, options in itertools.product(
            MESHES, STRATEGIES, (1, 2), MAKERS, nets.POLICIES, OPTIONS
        )
    ),
    values=lambda c: ((c.world, c.outer, c.outer_strategy, c.tp), c.strategy, c.k, c.maker, c.policy, c.options),
    key=lambda c: c.world * c.tp,
)  # fmt: skip


@cache
def expected(maker: str) -> nets.Trained:
    return nets.plain(Case(1, maker=maker))


def run_all(rank: int, cases: list[Case]) -> list[list[str]]:
    """Differences of each case from torch on a plain model."""
    found = []
    for case in cases:
        model, optimizers = sharded(case)
        with nets.planned(case):
            train(model, optimizers, k=case.k)
        found.append(nets.differences(trained(model, optimizers), expected(case.maker)))
        model.close()
    return found


@once
def outcomes(cases: tuple[Case, ...]) -> dict[Case, list[str]]:
    told = run_ranks(run_all, cases[0].world * cases[0].tp, list(cases))
    return {case: [each for rank in told for each in rank[place]] for place, case in enumerate(cases)}


def name_of(case: Case) -> str:
    mesh = f"{case.world}x{case.tp}" if case.outer == 1 else f"{case.outer}x{case.world // case.outer}x{case.tp}"
    numerics = "-".join(str(value) for _, value in case.options) or "fast"
    return f"{mesh}-{case.outer_strategy}-{case.strategy}-{case.k}-{case.maker}-{case.policy}-{numerics}"


@pytest.mark.parametrize("case", CASES.params(name_of))
def test_bits_are_those_of_one_process(case: Case) -> None:
    assert outcomes(CASES.batch(case))[case] == []


# -- the rule that is held against: torch's own ------------------------------------------------------------------------


def stepped(optimizers: Sequence[torch.optim.Optimizer], params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    for step in range(STEPS):
        for place, param in enumerate(params):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + place))
        for optimizer in optimizers:
            optimizer.step()
    return [param.detach() for param in params]


SETTINGS: list[dict[str, Any]] = [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3}]


@pytest.mark.parametrize("settings", SETTINGS)
def test_muon_with_adamw_is_torchs_muon_and_torchs_adamw(settings: dict[str, Any]) -> None:
    def made() -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(torch.ones(shape)) for shape in (*nets.SHAPES, (7,))]

    ours, theirs = made(), made()
    rate: Any = torch.tensor(0.02)
    group: dict[str, Any] = {"params": ours[:-1], "muon": True, "lr": rate, **settings}
    both = [muon.MuonWithAdamW([group, {"params": ours[-1:]}], lr=0.01)]
    apart = [torch.optim.Muon(theirs[:-1], lr=rate, **settings), torch.optim.AdamW(theirs[-1:], lr=0.01)]
    assert all(map(torch.equal, stepped(both, ours), stepped(apart, theirs)))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_overflowed_is_left_out(fused: bool) -> None:
    matrix, vector = torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(3))
    optimizer = muon.MuonWithAdamW([{"params": [matrix], "muon": True}, {"params": [vector]}], lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor, moves in ((float("inf"), False), (1.0, True)):
        scaler.scale((matrix.sum() + vector.sum()) * factor).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert all((each != 1).any() == moves for each in (matrix, vector))


def test_blocks_and_stacks_are_matrices_of_their_own() -> None:
    whole = [torch.nn.Parameter(torch.ones(12, 5)), torch.nn.Parameter(torch.ones(2, 6, 5))]
    group: dict[str, Any] = {"params": whole, "muon": True, "blocks": 3}
    optimizer = muon.MuonWithAdamW([group], lr=0.02)
    blocks = [torch.nn.Parameter(torch.ones(4, 5)) for _ in range(3)]
    blocks += [torch.nn.Parameter(torch.ones(2, 5)) for _ in range(6)]
    torch_ones = torch.optim.Muon(blocks, lr=0.02)
    for step in range(STEPS):
        grad = torch.randn(24, 5, generator=torch.Generator().manual_seed(step))
        whole[0].grad, whole[1].grad = grad[:12], grad[12:].view(2, 6, 5)
        for block, part in zip(blocks, [*grad[:12].split(4), *grad[12:].split(2)], strict=True):
            block.grad = part
        optimizer.step()
        torch_ones.step()
    assert torch.equal(
        torch.cat([each.detach().view(-1, 5) for each in whole]), torch.cat([*map(torch.detach, blocks)])
    )


# -- bytes -------------------------------------------------------------------------------------------------------------


def traffic(rank: int, case: Case) -> tuple[int, list[tuple[int | None, int]]]:
    """Bytes of matrices that a rank sends in a step, counted outside the engine; owner and elements here of each."""
    model, optimizers = sharded(case)
    with nets.planned(case), closing(CollectiveMeter()) as meter:
        train(model, optimizers, range(1))
        meter.take()
        train(model, optimizers, range(1, 2))
        sent = sum(row.bytes for row in meter.take() if " matrices" in row.bucket and "gradients of" not in row.bucket)
    lanes = optimizers[0]._fsdp_local_step.matrices._lanes
    held = [(m.owner, m.here(rank, values_here(m.param)).numel()) for lane in lanes for m in lane.matrices]
    model.close()
    return sent, held


@pytest.mark.parametrize("case", [Case(4), Case(4, "optim", 2), Case(4, "no_shard", 2, "optim")], ids=name_of)
def test_bytes_follow_the_formula(case: Case) -> None:
    """16 bits an element to the owner, once; and back, to whoever keeps it; less what the owner has."""
    found = run_ranks(traffic, case.world, case)
    copies = {"optim_grads_params": 1, "optim": 2, "no_shard": 2}[case.strategy]
    elements = sum(rows * columns for rows, columns in nets.SHAPES)
    of_owners = sum(numel for rank, (_, held) in enumerate(found) for owner, numel in held if owner == rank)
    assert sum(sent for sent, _ in found) == 2 * ((1 + copies) * elements - 2 * of_owners)


# -- mistakes ----------------------------------------------------------------------------------------------------------

SPOILT = {"split": Case(3), "tensor": Case(2, tp=2, maker="one"), "square": Case(2, shapes=((64, 64),) * 3)}
"""Others are a maker's."""
TABLE = slips(
    """
    momentum of the gradient: Momentum and gradient are exchanged
        muon.mix: 1 - group => group
        split
    no Nesterov mix: Mixed
        muon.mix: if group["nesterov"] else momentum => if not group["nesterov"] else momentum
        split
    scale of tall matrices: Wide matrices are scaled as tall ones
        muon.add: rows / columns => columns / rows
        split
    scale of a piece: The rate is adjusted to the rows that lie here
        fsdp.update.matrices.MatrixStep.take: values, m.rows => values, rows.shape[0]
        split
    iteration on a cut matrix: Rows are orthogonalized
        fsdp.update.matrices.MatrixStep.work: whole.view(-1, m.rows, m.columns)
            => m.part(whole, lane.comm.rank).flatten(0, -2)[None]
        square
    an update that is not taken: One rank does not add what owners send
        fsdp.update.matrices.Lane.finish: strict=True): => strict=True) if self.comm.rank != 1 else ():
        split
    order of pieces: Ranks have other orders
        fsdp.update.matrices.MatrixStep.params: in group["params"]
            => in group["params"][:: -1 if torch.distributed.get_rank() else 1]
        split
    momentum that begins anew: Momentum is none
        fsdp.update.matrices.MatrixStep.give: if MOMENTUM not in held: => if True:
        split
    decay of a group: The first group's settings
        fsdp.update.matrices.Lane.finish: groups[m.group], m => groups[0], m
        split
    numbers of the first step: Others are told of a state once
        fsdp.update.steps.OwnStep._tell: _told(held) != _told(state.get(m.param, {})) => not state.get(m.param)
        SOAP
    a weight that stays: What an owner makes is not taken
        fsdp.update.steps.OwnStep.take: rows.copy_(values) => rows
        Shampoo
    gradients of weights: Weights are given as gradients
        fsdp.update.steps.OwnStep.give: values_here(cast(Tensor, grad_of(param))) => values_here(param)
        Adafactor
    columns of the first: Every tensor-parallel rank gives the first one's columns
        fsdp.update.matrices._box_here: chunks[0].offsets or => (chunks[0].offsets[:1] + (0, 0))[: param.dim()] or
        tensor
    blocks by stack: All stacks begin with the first
        muon.boxes: yield (begin, min => yield (0, min
        tensor
    """
)
MISTAKES = {name: (slip, SPOILT.get(case) or Case(2, maker=case)) for name, (slip, case) in TABLE.items()}


def slipped(rank: int, name: str, case: Case) -> list[str]:
    reference = nets.plain(case)
    with pytest.MonkeyPatch.context() as patch:
        MISTAKES[name][0].put(patch)
        try:
            model, optimizers = sharded(case)
            train(model, optimizers)
            return nets.differences(trained(model, optimizers), reference)
        except Exception:
            return [traceback.format_exc(limit=1)]


@pytest.mark.parametrize("name", each("steps of matrices", MISTAKES))
def test_a_mistake_is_found(name: str) -> None:
    case = MISTAKES[name][1]
    assert any(run_ranks(slipped, case.world * case.tp, name, case))
