"""Expert parameters: reduced over the ranks that share an expert, divided as everything else, counted once in the norm.

Four ranks, two or four groups of experts. A rank holds its experts only; tokens for the others come from other ranks
by an all-to-all, here played by giving each rank the inputs of every rank whose tokens its experts serve. The reference
is one process with all experts and all tokens, in fp64.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from harness.fsdp import MixedPrecisionPolicy, fully_shard
from tests.fsdp.checked import each_is_found, of_slips
from tests.support.covering import once
from tests.support.spawn import run_ranks

WORLD, WIDTH, STEPS = 4, 6, 3
STRATEGIES = (0, 1, 2, 3)
SPLITS = (2, 4)
"""Sizes of expert parallelism: each expert on two ranks, or on one."""
CASES = list(itertools.product(STRATEGIES, SPLITS, (1, 2), ("fast", "exact")))


class Layer(nn.Module):
    """A dense matrix, then one expert a group; the experts of other ranks are absent."""

    def __init__(self, experts: list[int]) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleDict({str(each): nn.Linear(WIDTH, WIDTH) for each in experts})
        for param in self.experts.parameters():
            param.allreduce = False

    def forward(self, own: Tensor, served: dict[str, Tensor]) -> Tensor:
        """The dense loss of this rank's tokens, and that of what its experts serve."""
        expert = sum(self.experts[name](rows).pow(2).sum() for name, rows in served.items())
        total: Tensor = self.dense(own).tanh().sum() + expert
        return total


def values(module: nn.Module) -> None:
    with torch.no_grad():
        for name, param in module.named_parameters():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) / 3)


def tokens(step: int, microbatch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + rank)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def served_by(rank: int, ep: int, step: int, microbatch: int) -> dict[str, Tensor]:
    """Rows for this rank's expert: of the ranks of its expert-parallel group, a share of each one's tokens."""
    expert, first = rank % ep, rank // ep * ep
    rows = [tokens(step, microbatch, peer)[expert::ep] for peer in range(first, first + ep)]
    return {str(expert): torch.cat(rows)}


def train(rank: int, cases: list[tuple[Any, ...]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    found = {}
    flat = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    meshes = {ep: init_device_mesh("cpu", (WORLD // ep, ep), mesh_dim_names=("dp", "ep")) for ep in SPLITS}
    for strategy, ep, k, numerics in cases:
        module = Layer([rank % ep]).double()
        values(module)
        module.float()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        model, optimizer = fully_shard(
            module, optimizer, device_mesh=flat, dp_shard_dim="dp", expt_device_mesh=meshes[ep]["dp"],
            zero_dp_strategy=strategy, fsdp_unit_modules=[Layer], numerics=numerics, grad_divisor=float(WORLD * k),
            mixed_precision_policy=MixedPrecisionPolicy(),
        )  # fmt: skip
        apart = all(len({".experts." in f".{n}" for n, _ in b.params}) == 1 for b in model.engine.buckets)
        norms = []
        for step in range(STEPS):
            for microbatch in range(k):
                model.set_model_auto_sync(microbatch == k - 1)
                own = tokens(step, microbatch, rank).float()
                served = {n: rows.float() for n, rows in served_by(rank, ep, step, microbatch).items()}
                model(own, served).backward()
            norms.append(float(model.clip_grad_norm_(1.0)))
            optimizer.step()
            optimizer.zero_grad()
        found[strategy, ep, k, numerics] = {"norms": norms, "weights": dict(model.full_weights()), "apart": apart}
        model.close()
    dist.barrier()
    return found


@once
def trained() -> list[dict[tuple[Any, ...], dict[str, Any]]]:
    return run_ranks(train, WORLD, CASES)


@cache
def reference(ep: int, k: int) -> dict[str, Any]:
    module = Layer(list(range(ep))).double()
    values(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    norms = []
    for step in range(STEPS):
        for microbatch, rank in itertools.product(range(k), range(WORLD)):
            loss = module(tokens(step, microbatch, rank), served_by(rank, ep, step, microbatch))
            (loss / (WORLD * k)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "weights": dict(module.named_parameters())}


def check(case: tuple[Any, ...], ranks: list[dict[tuple[Any, ...], dict[str, Any]]]) -> None:
    right = reference(*case[1:3])
    for rank, found in enumerate(ranks):
        assert found[case]["apart"], "a bucket holds experts and others"
        assert found[case]["norms"] == pytest.approx(right["norms"], rel=1e-6), f"rank {rank}"
        assert len(found[case]["weights"]) == 4
        for name, weight in found[case]["weights"].items():
            torch.testing.assert_close(weight.double(), right["weights"][name].detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"zero{c[0]}-ep{c[1]}-k{c[2]}-{c[3]}")
def test_experts_train_as_on_one_process(case: tuple[Any, ...]) -> None:
    check(case, trained())


def _trained_rightly(rank: int, _: str) -> list[str]:
    case = 3, 2, 1, "fast"
    check(case, [train(rank, [case])])
    return []


CHECKS = {"trained": _trained_rightly}
MUTANTS = of_slips(
    """
    unmarked: The mark of an expert is not looked at
        fsdp.runtime.units.is_expert: lambda _: False
        trained
    divided by their own: Experts are divided by the size of their own group
        fsdp.comm.reduction.Reduction.fold: scale_together(into, exchange.factor)
            => scale_together(into, exchange.factor * (2 if self.comm.size < 4 else 1))
        trained
    """
)
test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "The engine, by its experts")


def test_exact_experts_have_one_set_of_bits() -> None:
    for rank, (ep, k) in itertools.product(trained(), itertools.product(SPLITS, (1, 2))):
        first = rank[0, ep, k, "exact"]
        for strategy in STRATEGIES[1:]:
            other = rank[strategy, ep, k, "exact"]
            assert other["norms"] == first["norms"]
            assert all(torch.equal(other["weights"][n], w) for n, w in first["weights"].items())
