"""Programs of torch alone under a watchdog: a rank that stops calling is named by one error on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from harness.watchdog import CollectiveError, Watchdog
from tests.support.spawn import run_ranks

LIMIT_S = 1.0
GENEROUS_S = 20.0
STOPS_AT = 3


def ddp() -> nn.Module:
    return DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), bucket_cap_mb=1e-4)


def fsdp2() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for part in (*model, model):
        fully_shard(part)
    return model


PROGRAMS: dict[str, Callable[[], nn.Module]] = {"DDP": ddp, "FSDP2": fsdp2}


def stops_calling(step: int) -> None:
    until = time.monotonic() + 4 * LIMIT_S
    while time.monotonic() < until:
        time.sleep(0.1)


def train(model: nn.Module, stops: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2 * STOPS_AT):
        if stops and step == STOPS_AT:
            stops_calling(step)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def hang(rank: int, program: str) -> tuple[str, float]:
    model = PROGRAMS[program]()
    began = time.monotonic()
    with pytest.raises(CollectiveError) as caught, Watchdog(timeout_s=LIMIT_S):
        train(model, rank == 2)
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_rank_that_stops_calling_is_named_on_all_ranks(program: str) -> None:
    found = run_ranks(hang, 3, program)
    ((message, _),) = {(message, 0) for message, _ in found}
    assert max(seconds for _, seconds in found) < GENEROUS_S
    print(message)
    assert message.startswith("a collective did not come about within 1 s: ")
    assert "ranks 0, 1 wait since" in message
    assert "rank 2 has not come: it is in stops_calling (test_programs.py:" in message
    assert "the last collective it began is" in message
    assert "runs one with its loss times 0. Where a rank is only slow, set watchdog_timeout_s higher" in message
