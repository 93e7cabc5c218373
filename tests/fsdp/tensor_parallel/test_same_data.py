"""Tensor-parallel ranks that are given different data are told so, also where embedding and head are cut."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate

from harness.fsdp import CopiesPart
from tests.fsdp.checked import Check, each_holds, each_is_found, of_slips, said
from tests.fsdp.tensor_parallel.training import Case, Shape, mesh_of, sharded


def trained(strategy: str, seed: int, *, pixels: bool = False, sequence: bool = False) -> None:
    """Two steps, on data of this seed: token ids, or pixels of which a DTensor says that each rank has them all."""
    shape = Shape(layers=1, sequence_parallel=sequence, pixels=pixels)
    case = Case(1, 2, strategy=strategy, shape=shape, dtype=torch.float32)
    mesh = mesh_of(case)
    model, optimizer = sharded(case, mesh)
    for step in (0, 10):
        given = torch.randint(9, (4, 8), generator=torch.Generator().manual_seed(step + seed))
        if pixels:
            shades = F.one_hot(given, shape.vocab).float()
            given = DTensor.from_local(shades, mesh["tp"], [Replicate()], run_check=False)
        classes = torch.randint(shape.vocab, (4, 8), generator=torch.Generator().manual_seed(step))
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
        fsdp.runtime.gradient_sync.SameData._look: lambda *_, **__: None
        other_tokens
    whole floats: Of what the model is given, integers alone are compared
        fsdp.runtime.gradient_sync.bit_hash: lambda x: was(torch.zeros_like(x) if x.is_floating_point() else x)
        other_pixels / optim
    length alone: Numbers of elements are compared, and not their bits
        fsdp.runtime.gradient_sync.bit_hash: lambda given: torch.tensor(given.numel())
        other_tokens / no_shard
    """
)


test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "Tensor parallelism, by data")
