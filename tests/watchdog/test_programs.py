"""Programs of torch alone under a watchdog: a rank that stops calling is named by one error on all ranks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

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
    return DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), bucket_cap_mb=1e-4)  # type: ignore[arg-type]


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


ENDS = """
import sys, time
from contextlib import suppress
from datetime import timedelta
import torch.distributed as dist
from harness.watchdog import watchdog

class Slow:
    def __init__(self):
        self.sleep = time.sleep

    def __del__(self):
        self.sleep(1.5)  # the interpreter is being taken down meanwhile

store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
other = store.clone()

def waits():
    with suppress(Exception):
        other.wait(["never"], timedelta(seconds=1))

sys.slow = Slow()
watchdog._thread(waits, "waits")
time.sleep(0.1)
"""
"""A thread comes back from a wait of torch while the program ends."""


def test_the_end_of_a_program_waits_for_threads_of_the_watchdog() -> None:
    """A model that is closed, or collected, in the last line must not abort its process, as another thread would."""
    command = [sys.executable, "-c", ENDS]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
