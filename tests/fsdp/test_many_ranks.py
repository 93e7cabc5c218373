"""What a rank does does not grow with the number of ranks.

Thousands of ranks are believed in, of which one is there.

torch's fake process group has any number of ranks and moves nothing, so what ranks tell each other is left out here.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.fsdp import MixedPrecisionPolicy, build, fully_shard
from harness.fsdp.comm.communicator import Communicator, Pending
from tests.fsdp.pairs import STRATEGIES
from tests.support.mutants import each, slips
from tests.support.spawn import run_ranks

FEW, MANY = 16, 2048
"""Ranks."""
UNITS = 3
HYBRIDS = ("", "no_shard", "optim")
"""What hosts of eight ranks split between them; none: they are no axis."""
HOST = 8
A_RANK = {"built": 3 * UNITS, "a step": 0, "its state": 8}
"""Lines for each rank there is: of a model cuts and loads, once for each segment; of its state the numbers of ranks."""


@contextmanager
def believing_in(ranks: int) -> Iterator[None]:
    """A default group of so many ranks, this process one of them, in which nothing is moved."""
    dist.destroy_process_group()  # the one that this call was given; below it gets another one
    dist.init_process_group("fake", rank=ranks // 2 + 1, world_size=ranks, store=FakeStore())
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(build, "check_agreed"))
        patches.enter_context(mock.patch.object(build, "watch_groups", return_value=None))
        patches.enter_context(mock.patch.object(Communicator, "begin_sum", _as_if_alike))
        yield
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def _as_if_alike(self: Communicator, values: Tensor, *_: Any) -> Pending:
    """Every rank says the same."""
    values.mul_(self.size)
    return Pending([])


class Lines:
    """Lines of the engine that are run, also those of loops within one."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Lines:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, _: str, __: Any) -> Any:
        return self._run if "/harness/fsdp/" in frame.f_code.co_filename else None

    def _run(self, _: FrameType, event: str, __: Any) -> Any:
        self.count += event == "line"
        return self._run


def lines_of(ranks: int, strategy: str, outer: str, wire: torch.dtype) -> dict[str, int]:
    """Lines run to shard a model, in its third step, and to hand out its state."""
    module = nn.Sequential(*(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)) for _ in range(UNITS)))
    optimizer = torch.optim.AdamW(module.parameters())
    found = {}
    with believing_in(ranks):
        hosts = ranks // HOST if outer else 1
        mesh = init_device_mesh("cpu", (hosts, ranks // hosts), mesh_dim_names=("outer", "inner"))
        with Lines() as lines:
            model, optimizer = fully_shard(
                module,
                optimizer,
                device_mesh=mesh,
                dp_outer_dim="outer",
                dp_shard_dim="inner",
                outer_dp_sharding_strategy=outer or "no_shard",
                fsdp_unit_modules=[nn.Sequential],
                zero_dp_strategy=strategy,
                mixed_precision_policy=MixedPrecisionPolicy(grad_comm_dtype=wire),
            )
        found["built"] = lines.count
        for _ in range(3):
            with Lines() as lines:
                model(torch.ones(2, 64)).sum().backward()
                model.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
        found["a step"] = lines.count
        with Lines() as lines:
            model.sharded_state()
        found["its state"] = lines.count
        model.close()
    return found


def _growing(rank: int, strategy: str) -> list[str]:
    """What takes more than it may with many ranks."""
    told = []
    for outer, wire in itertools.product(HYBRIDS, (torch.float32, torch.bfloat16)):
        if (strategy, outer) == ("no_shard", "optim"):  # each of a host's ranks reduces a part of every host's shard
            continue
        few, many = (lines_of(ranks, strategy, outer, wire) for ranks in (FEW, MANY))
        told += [
            f"{what}, hosts {outer or 'no axis'}, {wire}: {few[what]} lines with {FEW} ranks, {many[what]} with {MANY}"
            for what, a_rank in A_RANK.items()
            if many[what] > 1.1 * few[what] + a_rank * MANY
        ]
    return told


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_rank_does_more_where_there_are_many(strategy: str) -> None:
    assert run_ranks(_growing, 1, strategy, apart=True)[0] == []


MUTANTS = slips(
    r"""
    asked each time: Whether chunks lie one after another is found for each collective
        fsdp.comm.communicator.Part.chunks: self.cut.covers => Cut(self.cut.spans).covers
    rows at once: Rows of all ranks are found for each tensor that is handed out
        fsdp.storage.dtensors.DTensorFactory._placements: self._found[slot.spec.name] = tuple(others)
            => self._found[slot.spec.name] = tuple(others)\n        getattr(others[-1], "spans", ())
    outer slices: What an inner shard holds is put together of one slice for each outer rank
        fsdp.storage.layout.BucketLayout.inner_slice: return
            => [self.local_slice(slot, inner_rank * self.outer + each) for each in range(self.outer)]\n    return
    """
)


def _with_mistake(rank: int, name: str) -> list[str]:
    with MUTANTS[name].patched():
        return _growing(rank, "optim_grads_params")


@pytest.mark.parametrize("name", each("What a step costs with many ranks", MUTANTS))
def test_what_grows_with_the_ranks_is_found(name: str) -> None:
    assert run_ranks(_with_mistake, 1, name, apart=True)[0]
