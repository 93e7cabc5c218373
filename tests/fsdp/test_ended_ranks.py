"""A rank that ends or stops is told by all that live, and a program that ends without closing its models ends well."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.control import Control
from harness.engines.protocol import Ranks
from harness.fsdp import Observer, ShardedModel, fully_shard, fully_shard_optimizer
from harness.probe.collectives import CollectiveMeter
from harness.shm.transfer import Transport, Work
from tests.fsdp.test_api import Block, sgd
from tests.support.forking import fork_ranks

LIMIT_S = 1.0
GENEROUS_S = 20.0
"""On a loaded machine; alone it takes 2 to 5 seconds."""


class Stoppable(nn.Module):
    """Three units; `stop` is called in the forward of the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.stop: Callable[[], None] = lambda: None
        self.blocks[1].register_forward_pre_hook(lambda *_: self.stop())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build(
    group: dist.ProcessGroup | None, strategy: str, **kwargs: Any
) -> tuple[Stoppable, ShardedModel, torch.optim.Optimizer]:
    model = Stoppable()
    optimizer = sgd(model)
    wrapped = fully_shard(model, group=group, unit_modules=[Block], strategy=strategy, **kwargs)
    return model, wrapped, fully_shard_optimizer(wrapped, optimizer)


def step(wrapped: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    wrapped(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@dataclass(frozen=True)
class Told:
    error: str
    message: str
    seconds: float


def provoke(action: Callable[[], None]) -> Told:
    began = time.monotonic()
    try:
        action()
    except Exception as error:
        return Told(type(error).__name__, str(error), time.monotonic() - began)
    return Told("", "", time.monotonic() - began)


def agree(told: list[Told]) -> str:
    """One error on all ranks, in time."""
    assert {each.error for each in told} == {"CollectiveError"}, told
    assert len({each.message for each in told}) == 1, told
    assert max(each.seconds for each in told) < GENEROUS_S
    print(told[0].seconds, told[0].message)
    return told[0].message


# -- a rank that ends --------------------------------------------------------------------------------------------------


def ends_in_a_forward(rank: int, folder: str, transport: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 3), rank=rank, world_size=3)
    model, wrapped, optimizer = build(None, "optim_grads", watchdog_timeout_s=30.0, transport=transport)
    step(wrapped, optimizer)
    dist.barrier()  # others have read what rank 2 holds of the updated weights
    if rank == 2:
        model.stop = lambda: os._exit(0)
    told = provoke(lambda: step(wrapped, optimizer))
    Path(folder, f"{rank}.txt").write_text(f"{told.error}\n{told.seconds}\n{told.message}")
    os._exit(0)


@pytest.mark.parametrize("transport", ["backend", "auto"])
def test_a_rank_that_ends_is_named_at_once(transport: str, tmp_path: Path) -> None:
    assert fork_ranks(ends_in_a_forward, 3, str(tmp_path), transport) == [0, 0, 0]
    told = []
    for rank in (0, 1):
        error, seconds, message = (tmp_path / f"{rank}.txt").read_text().split("\n", 2)
        told.append(Told(error, message, float(seconds)))
    message = agree(told)
    assert "a collective failed" in message
    assert "rank 2 does not answer: ended" in message
    # Of ranks 0 and 1 one may wait for the other, and have no error of its own.
    assert any(f"the backend of rank {rank} said: " in message for rank in (0, 1))


# -- a rank that stops, and an exchange of the program's own -----------------------------------------------------------


def join(rank: int, folder: Path, keeper: int) -> None:
    """Join a group of two whose store lives in rank `keeper`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    port = folder / "port"
    if rank == keeper:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "writing").write_text(str(store.port))
        (folder / "writing").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


def stops(rank: int, path: str, keeper: int, where: str) -> None:
    """Rank 1 stops, as by SIGSTOP, in a forward or before an exchange; rank 0 writes what it is told, and ends it."""
    folder = Path(path)
    join(rank, folder, keeper)
    transport = "auto" if where == "forward, read" else "backend"
    model, wrapped, optimizer = build(None, "optim_grads_params", watchdog_timeout_s=LIMIT_S, transport=transport)
    own = dist.new_group(backend="gloo")
    step(wrapped, optimizer)
    if rank == 1:
        (folder / "pid").write_text(str(os.getpid()))
        dist.barrier()
        if where in BY_STEP:
            model.stop = lambda: os.kill(os.getpid(), signal.SIGSTOP)
            step(wrapped, optimizer)
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()

    def exchange() -> None:
        with Observer.waiting("exchange of how far each rank is", group=own):
            dist.barrier(own)

    def loop() -> None:
        with closing(CollectiveMeter()) as meter:
            Control(Ranks(rank, 2, rank, torch.device("cpu")), own, meter).begin_report([0.5], 7, 7, False)()

    forward = dict.fromkeys(BY_STEP, lambda: step(wrapped, optimizer))
    told = provoke((forward | {"exchange": exchange, "loop": loop})[where])
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    (folder / "told").write_text(f"{told.error}\n{told.seconds}\n{told.message}")
    os._exit(0)


BY_STEP = ("forward", "forward, read")
WAITS = {
    "forward": "in all_gather blocks.",
    "forward, read": "in all_gather blocks.",
    "exchange": "in exchange of how far each rank is",
    "loop": "in exchange of the loop's own numbers",
}


@pytest.mark.parametrize(
    ("keeper", "where"),
    [
        pytest.param(keeper, where, marks=pytest.mark.full if keeper and where not in ("forward", "loop") else ())
        for keeper in (0, 1)
        for where in WAITS
    ],
)
def test_a_rank_that_stops_is_told_also_where_it_keeps_the_store(keeper: int, where: str, tmp_path: Path) -> None:
    fork_ranks(stops, 2, str(tmp_path), keeper, where, seconds=60)
    error, seconds, message = (tmp_path / "told").read_text().split("\n", 2)
    assert (error, float(seconds) < GENEROUS_S) == ("CollectiveError", True), message
    assert "did not come about within 1 s" in message
    assert "rank 0 waits since" in message
    assert WAITS[where] in message
    if keeper == 0:
        assert "rank 1 does not answer: ended, stopped" in message
    else:
        assert "other ranks could not be asked: the store of the process group does not answer" in message


# -- all ranks end -----------------------------------------------------------------------------------------------------


def ends_unclosed(folder: str) -> None:
    """Two ranks, one forked from the other, that come to the interpreter's own end with models that are watched."""
    rank = 0 if os.fork() else 1
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    for _ in range(4):
        model, wrapped, optimizer = build(None, "optim_grads_params")
        step(wrapped, optimizer)
        atexit.register(len, [model, wrapped, optimizer])  # alive until the end
    watching = sum(thread.name == "watchdog" for thread in threading.enumerate())
    Path(folder, f"{rank}.txt").write_text(str(watching))
    if rank == 0:
        assert os.wait()[1] == 0


def test_a_program_that_never_closes_its_models_ends_well(tmp_path: Path) -> None:
    script = "import sys; from tests.fsdp.test_ended_ranks import ends_unclosed; ends_unclosed(sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=120, check=True)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["4", "4"]


def one_step(rank: int, folder: str) -> None:
    """Rank 1 ends after its step, at the end of which rank 0 is late in reading what it has updated."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    _, wrapped, optimizer = build(None, "optim")
    wrapped(torch.ones(2, 6)).sum().backward()
    if rank == 0:
        advance = Transport._advance

        def late(self: Transport, work: Work) -> None:
            time.sleep(0.2)
            advance(self, work)

        Transport._advance = late  # type: ignore[method-assign] # in this process
    optimizer.step()
    Path(folder, f"{rank} has ended").touch()


def two_programs(folder: str) -> None:
    """Two ranks, one forked from the other, that end as the interpreter does."""
    child = os.fork()
    one_step(0 if child else 1, folder)
    if child:
        assert os.waitpid(child, 0)[1] == 0


def test_a_rank_that_has_ended_leaves_its_weights_to_who_reads_them(tmp_path: Path) -> None:
    script = "import sys; from tests.fsdp.test_ended_ranks import two_programs; two_programs(sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=120, check=True)
    assert sorted(path.name for path in tmp_path.glob("* has ended")) == ["0 has ended", "1 has ended"]
