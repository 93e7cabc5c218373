"""Tensor-parallel ranks that are given different data are told so, also where embedding and head are cut."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from harness.fsdp import CopiesPart
from harness.fsdp.megatron import fully_shard
from tests.fsdp.checked import Check, each_holds, each_is_found, of_slips, said

VOCABULARY, WIDTH = 16, 8


class Net(nn.Module):
    """Token ids, or pixels, to classes; all matrices are cut."""

    def __init__(self, *, pixels: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed: nn.Module = nn.Linear(5, WIDTH, bias=False) if pixels else nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12, bias=False), nn.Linear(12, WIDTH, bias=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.down(F.gelu(self.up(x)))
        out: Tensor = self.head(self.norm(x))
        return out


def plan(*, pixels: bool, sequence: bool) -> dict[str, ParallelStyle]:
    along = Shard(1) if sequence else Replicate()
    rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=along)
    found: dict[str, ParallelStyle] = {
        "embed": ColwiseParallel(output_layouts=along) if pixels else rows,
        "up": ColwiseParallel(input_layouts=along),
        "down": RowwiseParallel(output_layouts=along),
        "head": ColwiseParallel(input_layouts=along, output_layouts=Replicate()),
    }
    return found | ({"norm": SequenceParallel()} if sequence else {})


def trained(strategy: str, seed: int, *, pixels: bool = False, sequence: bool = False) -> None:
    """Two steps, on data of this seed: token ids, or pixels of which a DTensor says that each rank has them all."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    module = Net(pixels=pixels)
    parallelize_module(module, mesh["tp"], plan(pixels=pixels, sequence=sequence))
    model, optimizer = fully_shard(
        module, torch.optim.SGD(module.parameters(), lr=0.1), device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp",
        zero_dp_strategy=strategy,
    )  # fmt: skip
    for step in (0, 10):
        generator = torch.Generator().manual_seed(step + seed)
        x = torch.randn(4, 8, 5, generator=generator) if pixels else torch.randint(9, (4, 8), generator=generator)
        given = DTensor.from_local(x, mesh["tp"], [Replicate()], run_check=False) if pixels else x
        classes = torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(step))
        F.cross_entropy(model(given).flatten(0, 1), classes.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def same_data(rank: int, strategy: str) -> list[str]:
    """Nothing is said of the same data, whatever is cut along."""
    for pixels in (False, True):
        for sequence in (False, True):
            trained(strategy, 0, pixels=pixels, sequence=sequence)
    return []


def other_tokens(rank: int, strategy: str) -> list[str]:
    return [
        each
        for sequence in (False, True)
        for each in said(partial(trained, strategy, rank, sequence=sequence), CopiesPart, "integers.*differ")
    ]


def other_pixels(rank: int, strategy: str) -> list[str]:
    return said(partial(trained, strategy, rank, pixels=True), CopiesPart, "whole DTensors.*differ")


CHECKS: dict[str, Check] = {each.__name__: each for each in (same_data, other_tokens, other_pixels)}


test_other_data_is_told = each_holds(__name__, CHECKS)


MUTANTS = of_slips(
    """
    inputs: What the model is given is not looked at
        fsdp.runtime.same_data.SameData._look: lambda *_, **__: None
        other_tokens
    whole floats: Of what the model is given, integers alone are compared
        fsdp.runtime.same_data.bit_hash: lambda x: was(torch.zeros_like(x) if x.is_floating_point() else x)
        other_pixels / optim
    length alone: Numbers of elements are compared, and not their bits
        fsdp.runtime.same_data.bit_hash: lambda given: torch.tensor(given.numel())
        other_tokens / no_shard
    """
)


test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "Tensor parallelism, by data")
