"""A model that is forgotten with something under way: nobody waits in vain, whatever was left."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from harness.fsdp import Transport, fully_shard_model
from tests.fsdp.checked import each_is_found, holds, of_slips

GONE_S = 7.0
WIDTH = 300


def collected_late(rank: int, strategy: str) -> list[str]:
    """A model whose group is destroyed, with a reduction under way that the second rank never came to, is collected
    without waiting for it: that may be in the middle of another program, whose ranks would wait in vain."""
    return [told for transport in Transport for told in _collected_late(rank, strategy, transport)]


def _collected_late(rank: int, strategy: str, transport: Transport) -> list[str]:
    group = dist.new_group(timeout=timedelta(seconds=GONE_S))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    model = fully_shard_model(
        module, zero_dp_strategy=strategy, device_mesh=mesh, dp_shard_dim="dp", transport=transport
    )
    loss = model(torch.full((2, WIDTH), float(rank))).sum()
    if rank == 0:
        with model.no_sync():
            loss.backward()
    dist.barrier()  # a group that is gone already would refuse the reduction
    dist.destroy_process_group(group)
    began = time.perf_counter()
    del model, module, loss
    gc.collect()
    return [] if time.perf_counter() - began < GONE_S / 2 else [f"{transport}: it waited for a rank that is gone"]


class Breaks(nn.Module):
    """Ends a forward while the next unit's weights are on their way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError


def collected_first(rank: int, strategy: str) -> list[str]:
    """The first rank's model is collected with a gather under way, while the second rank still has its own, and waits
    for the first one somewhere else."""
    group = dist.new_group(timeout=timedelta(seconds=GONE_S))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Breaks(), nn.Linear(WIDTH, WIDTH))
    model = fully_shard_model(
        module, zero_dp_strategy=strategy, device_mesh=mesh, dp_shard_dim="dp", fsdp_unit_modules=[nn.Linear]
    )
    with suppress(ArithmeticError):
        model(torch.full((2, WIDTH), float(rank)))
    began = time.perf_counter()
    if rank:
        dist.barrier()
    del model, module
    gc.collect()
    if rank == 0:
        dist.barrier()
    took = time.perf_counter() - began
    dist.barrier()
    return [] if took < GONE_S / 2 else [f"it waited {took:.1f} s for a rank that waited for it"]


CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    "collected late": collected_late,
    "collected first": collected_first,
}


MUTANTS = of_slips(
    """
    the collector waits: A model is collected, and what it has under way waited for there and then
        fsdp.build.abandon: if runtime.has_streams: => if True:
        collected first
    """
)


@pytest.mark.parametrize(
    ("strategy", "check"),
    [("optim_grads", "collected late"), ("optim_grads_params", "collected first")],
)
def test_what_a_rank_leaves_holds_nobody_up(strategy: str, check: str) -> None:
    holds(__name__, strategy, check)


test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "The engine, by how it is closed")
