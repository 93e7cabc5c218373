"""Tensor-parallel ranks that are given different data are told so, also where embedding and head are cut."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from harness.fsdp import CopiesPart
from harness.fsdp.megatron import fully_shard
from harness.fsdp.runtime.same_data import SameData
from tests.fsdp.checked import Check, Mutant, each_holds, each_is_found, patched, said

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
    first = (
        ColwiseParallel(output_layouts=along)
        if pixels
        else RowwiseParallel(input_layouts=Replicate(), output_layouts=along)
    )
    found: dict[str, ParallelStyle] = {
        "embed": first,
        "up": ColwiseParallel(input_layouts=along),
        "down": RowwiseParallel(output_layouts=along),
        "head": ColwiseParallel(input_layouts=along, output_layouts=Replicate()),
    }
    return found | ({"norm": SequenceParallel()} if sequence else {})


def trained(strategy: str, inputs: int, labels: int, *, pixels: bool = False, sequence: bool = False) -> None:
    """Two steps, on data of these seeds."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    module = Net(pixels=pixels)
    parallelize_module(module, mesh["tp"], plan(pixels=pixels, sequence=sequence))
    model, optimizer = fully_shard(
        module, torch.optim.SGD(module.parameters(), lr=0.1), device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp",
        zero_dp_strategy=strategy,
    )  # fmt: skip
    for step in (0, 10):
        generator = torch.Generator().manual_seed(step + inputs)
        shape = (4, 8)
        x = torch.randn(*shape, 5, generator=generator) if pixels else torch.randint(9, shape, generator=generator)
        classes = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(step + labels))
        F.cross_entropy(model(x).flatten(0, 1), classes.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def same_data(rank: int, strategy: str) -> list[str]:
    """Nothing is said of the same data, whatever is cut along."""
    for pixels in (False, True):
        for sequence in (False, True):
            trained(strategy, 0, 0, pixels=pixels, sequence=sequence)
    return []


def other_tokens(rank: int, strategy: str) -> list[str]:
    return [
        each
        for sequence in (False, True)
        for each in said(partial(trained, strategy, rank, 0, sequence=sequence), CopiesPart, "embed", "input differs")
    ]


def other_pixels(rank: int, strategy: str) -> list[str]:
    return said(partial(trained, strategy, rank, 0, pixels=True), CopiesPart, "embed", "input differs")


def other_labels(rank: int, strategy: str) -> list[str]:
    return said(partial(trained, strategy, 0, rank), CopiesPart, "of head.*other labels")


CHECKS: dict[str, Check] = {each.__name__: each for each in (same_data, other_tokens, other_pixels, other_labels)}


test_other_data_is_told = each_holds(__name__, CHECKS)


_add = SameData._add
_of_data = partial(Mutant, area="Tensor parallelism, by data")
MUTANTS = {
    "inputs": _of_data(
        "What cut modules are given is not looked at", patched(SameData, "_look", lambda *_: None), "other_tokens"
    ),
    "sums of inputs": _of_data(
        "Of inputs, integers alone are compared",
        patched(SameData, "_add", lambda self, place, kind, values: _add(self, place, kind, values) if kind else None),
        "other_pixels",
        "optim",
    ),
    "outputs": _of_data(
        "Gradients of what cut modules give are not looked at",
        patched(SameData, "_follow", lambda *_: None),
        "other_labels",
        "no_shard",
    ),
}


test_a_mutant_is_found = each_is_found(__name__, MUTANTS)
