"""Reading another rank's memory: the same bits and bytes as messages, and what happens where it is not possible."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.fsdp import CollectiveError, MixedPrecisionPolicy, Numerics, fully_shard_model
from harness.fsdp.comm import cross_memory, events, notices, peer_memory
from harness.fsdp.comm.communicator import Communicator, Pending, _has_spare_cores
from harness.fsdp.comm.device import DeviceRuntime
from harness.fsdp.comm.events import Label
from harness.fsdp.comm.parts import Part
from harness.fsdp.comm.reduction import Exchange, make_reduction
from harness.probe.collectives import CollectiveMeter
from harness.store import failure
from tests.fsdp.trial import WAYS
from tests.support.mutants import each
from tests.support.spawn import run_ranks

CPU = torch.device("cpu")
ROOM = "The engine, by the copies it gives others to read"
LENGTHS = (0, 1, 3, 65_536 * 3 + 5)
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16 wire": MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16),
}


def communicator(eager_limit: int | None) -> Communicator:
    return Communicator(None, DeviceRuntime(CPU), eager_limit)


def values(rank: int, length: int, seed: int) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(100 * seed + rank))


def exchange_everything(rank: int, eager_limit: int | None) -> tuple[list[Tensor], list[object], int]:
    """A gather and a reduction of several parts of several lengths, in two dtype policies."""
    comm = communicator(eager_limit)
    assert (comm.memory is None) == (eager_limit is None), comm.why_messages
    meter = CollectiveMeter()
    results = []
    for name, policy in POLICIES.items():
        reduction = make_reduction(comm, policy.resolve(torch.float32), Numerics.fast)
        wholes = [Part.evenly(values(rank, n, seed), comm.size) for seed, n in enumerate(LENGTHS)]
        sums = [torch.ones_like(part.chunk(rank)) for part in wholes]
        wires = [Part(reduction.encode(part.tensor), part.cut) for part in wholes]
        folded: Exchange = reduction.exchange(wires, Label("reduce_scatter", name), 0.5)
        reduction.fold(folded, sums, add=True)
        folded.pending.wait()
        results += sums
        for ahead in (False, True):
            copies = [Part(part.tensor.clone(), part.cut) for part in wholes]
            comm.all_gather(copies, Label("all_gather", name), ahead=ahead).wait()
            results += [part.tensor for part in copies]
    rows: list[object] = [*meter.take()]
    meter.close()
    comm.close()
    return results, rows, 0 if comm.memory is None else comm.memory.bytes_read


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_reads_give_the_bits_of_messages_and_count_their_bytes(world_size: int) -> None:
    read, sent = (run_ranks(exchange_everything, world_size, limit) for limit in (0, None))
    for (left, left_rows, _), (right, right_rows, _) in zip(read, sent, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
        assert left_rows == right_rows
    announced = sum(row.bytes for _, rows, _ in read for row in rows)
    assert announced == sum(num_bytes for _, _, num_bytes in read) > 0


def refused_on_one_rank(rank: int) -> str:
    if rank == 1:
        cross_memory._READV = lambda *_: -1
    comm = communicator(0)
    assert comm.memory is None
    part = Part.evenly(torch.full((8,), float(rank)), comm.size)
    comm.all_gather([part], Label("all_gather", "x")).wait()
    assert part.tensor.tolist() == [0.0] * 4 + [1.0] * 4
    return comm.why_messages


def test_where_one_rank_may_not_read_all_send_and_say_why() -> None:
    assert run_ranks(refused_on_one_rank, 2) == ["process_vm_readv: Function not implemented"] * 2


def another_namespace(rank: int) -> str:
    peer_memory._host = lambda: rank
    return communicator(0).why_messages


def test_ranks_that_cannot_name_each_other_send() -> None:
    assert all("several hosts" in reason for reason in run_ranks(another_namespace, 2))


def wrong_bytes(rank: int) -> str:
    if rank == 0:
        peer_memory.CANARY += 1
    return communicator(0).why_messages


def test_a_read_that_gives_something_else_is_not_trusted() -> None:
    assert all("other bytes" in reason for reason in run_ranks(wrong_bytes, 2))


def read_a_dead_rank(rank: int, reads: bool) -> str:
    comm = communicator(0)
    assert comm.memory is not None
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    comm.memory.pids[1 - rank] = child
    with pytest.raises(RuntimeError) as caught:
        comm.memory.read(1 - rank, torch.zeros(1).data_ptr(), torch.zeros(1)) if reads else wait_in_vain(comm)
    dist.barrier()
    return str(caught.value)


def wait_in_vain(comm: Communicator, limit: timedelta | None = None) -> None:
    comm.peer_memory.wait(1 - comm.rank, lambda: False, limit)


@pytest.mark.parametrize("reads", [True, False])
def test_a_rank_that_has_ended_is_named(reads: bool) -> None:
    messages = run_ranks(read_a_dead_rank, 2, reads)
    assert "rank 1 of the group" in messages[0]
    assert "No such process" in messages[0]
    assert "rank 0 of the group" in messages[1]
    assert all(failure.is_echo(f"RuntimeError: {message}") for message in messages), "a cause would stand behind it"


def wait_too_long(rank: int) -> list[str]:
    """What is raised where a wait has a limit of its own, where the group has one, and where a watchdog knows more;
    and where rank 1
    gives the group up."""
    comm = Communicator(dist.new_group(timeout=timedelta(seconds=0.2)), DeviceRuntime(CPU), 0)
    knowing = mock.Mock(check=mock.Mock(side_effect=CollectiveError("it will not come about")))
    found = []
    for limit, watcher in ((timedelta(seconds=0.1), None), (None, None), (timedelta(days=1), knowing)):
        end = events.watch(watcher) if watcher is not None else lambda: None
        with pytest.raises(RuntimeError) as caught:
            wait_in_vain(comm, limit)
        end()
        found.append(str(caught.value))
    dist.barrier()
    if rank == 1:
        comm.runtime.abort(comm.group)
    with pytest.raises(RuntimeError) as caught:
        wait_in_vain(comm, timedelta(days=1))
    return [*found, str(caught.value)]


def test_no_wait_is_for_ever() -> None:
    (own, of_group, watched, by_other), (*_, given_up) = run_ranks(wait_too_long, 2)
    assert given_up.startswith("Connection closed: this process has given up the group in which it waits for rank 0")
    assert by_other.startswith("Connection closed: rank 1 of the group (process ")
    assert own.startswith("Timed out waiting 0.1 s for rank 1 of the group (process ")
    assert of_group.startswith("Timed out waiting 0.2 s for rank 1 of the group")
    assert watched == "it will not come about"
    assert all(failure.is_echo(f"RuntimeError: {each}") for each in (own, of_group, by_other, given_up))


def gather_beside_work(rank: int) -> bool:
    """With `ahead` the data arrives although nobody waits for it."""
    with WAYS[2].taken():
        comm = communicator(0)
    part = Part.evenly(torch.full((1 << 20,), float(rank)), 2)
    pending = comm.all_gather([part], Label("all_gather", "x"), ahead=True)
    deadline = time.monotonic() + 20
    while part.tensor[(1 - rank) << 19] != 1 - rank and time.monotonic() < deadline:
        time.sleep(0.01)
    arrived = bool(part.tensor[(1 - rank) << 19] == 1 - rank)
    pending.wait()
    comm.close()
    return arrived


def test_a_gather_ahead_needs_no_waiting() -> None:
    assert run_ranks(gather_beside_work, 2) == [True, True]


@pytest.mark.parametrize(("cores", "ranks", "threads", "spare"), [(2, 2, 1, False), (4, 2, 1, True), (5, 3, 1, False)])
def test_threads_are_for_cores_that_are_to_spare(
    cores: int, ranks: int, threads: int, spare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert _has_spare_cores(ranks) is spare


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.linear(x)
        return out


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x: Tensor, num_blocks: int) -> Tensor:
        for block in self.blocks[:num_blocks]:
            x = block(x)
        return x


def use_few_of_many(rank: int, way: int) -> list[float]:
    """Rank 0 uses one unit of eight: done with the others before rank 1 has their weights."""
    torch.manual_seed(3)
    with WAYS[way].taken():
        model = fully_shard_model(
            Chain(), fsdp_unit_modules=[Block], zero_dp_strategy=3, eager_limit_bytes=WAYS[way].eager_limit
        )
    losses = []
    for _ in range(2):
        loss = model(torch.full((2, 8), rank + 1.0), 1 if rank == 0 else 8).square().mean()
        loss.backward()
        losses += [loss.item(), model.grad_norm()]
        model.zero_grad()
    model.close()
    return losses


def forked_end(rank: int) -> int:
    """How much this rank is known to have heard, when a process forked from it has come to its end."""
    comm = communicator(0)
    comm.peer_memory.lay_out([torch.zeros(1)], 1 - rank, 7)
    dist.barrier()
    if (child := os.fork()) == 0:
        peer_memory._wait_for_last_reads()
        os._exit(0)
    os.waitpid(child, 0)
    heard: int = comm.peer_memory._notices._own[(1 - rank) * notices._PART + notices._HEARD]
    comm.laid_by(1 - rank, 7).finish()
    return heard


def test_a_forked_process_hears_nothing_in_place_of_its_parent() -> None:
    assert run_ranks(forked_end, 2) == [0, 0]


def far_ahead(rank: int) -> list[float]:
    """As `use_few_of_many`, with room for few notices: rank 0 waits until rank 1 has heard some."""
    notices.RING = 16
    return use_few_of_many(rank, 1)


def test_a_rank_that_is_far_behind_is_waited_for() -> None:
    assert run_ranks(far_ahead, 2) == run_ranks(use_few_of_many, 2, 1)


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_no_rank_waits_for_one_that_waits_for_it(way: int) -> None:
    one, other = run_ranks(use_few_of_many, 2, way)
    assert one[1] == other[1] == one[3] == other[3]
    assert one[0] != other[0]


def copies_alive(rank: int, *, is_asked: bool = True) -> list[int]:
    """Copies of its weights that this rank holds for others, at the forward of each of eight units and at the end of
    the backward; every rank has the weights of a unit before any goes on to the next."""
    torch.manual_seed(3)
    if not is_asked:
        Pending.let_go = lambda self: not self.keeps  # type: ignore[method-assign] # in this process
    with WAYS[1].taken():
        model = fully_shard_model(
            Chain().bfloat16(),
            fsdp_unit_modules=[Block],
            zero_dp_strategy=3,
            mixed_precision_policy=MixedPrecisionPolicy(torch.float32, torch.float32),
            prefetch=0,
            eager_limit_bytes=0,
        )
    gather, found = model._parts.gather, []

    def note(*_: object) -> None:
        dist.barrier()
        found.append(sum(bool(each._pending.keeps) for each in gather._copies))

    for block in model.module.blocks:
        block.register_forward_pre_hook(note)
    model(torch.full((2, 8), rank + 1.0, dtype=torch.bfloat16), 8).square().mean().backward()
    found.append(len(gather._copies))
    model.close()
    return found


def test_copies_for_others_go_as_soon_as_these_have_read_them() -> None:
    """One unit's part, and not that of every unit so far."""
    assert run_ranks(copies_alive, 2) == [[1] * 8 + [0]] * 2


@pytest.mark.parametrize("mutant", each(ROOM, [("copies stay", "They stay until the backward ends")]))
def test_a_mutant_is_found(mutant: str) -> None:
    assert run_ranks(partial(copies_alive, is_asked=False), 2) == [[*range(1, 9), 0]] * 2
