"""The backend alone against gloo on random collectives, ranks that end, and what torch's own wrappers do over it."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import reduce
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import harness.shm
from harness.shm import ShmGroup, group, segment, shared, transfer
from tests.support.forking import fork_ranks
from tests.support.mutants import each, kills
from tests.support.spawn import RankFailed, run_ranks

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
LENGTHS = (0, 1, 3, 17, 1000, 65_536 * 2 + 5)
Issue = Callable[[], tuple[harness.shm.Work, list[Tensor]]]


def made() -> ShmGroup:
    world = dist.group.WORLD
    assert world is not None
    group_, why = shared(world, world.rank(), world.size())
    assert group_ is not None, why
    return group_


def random_collectives(rank: int, seed: int, count: int) -> list[str]:
    """What differs from gloo, of so many collectives that this rank waits for in an order of its own."""
    shm, alike, own = made(), random.Random(seed), random.Random(100 * seed + rank)
    todo = [of_random(shm, alike, own) for _ in range(count)]
    dist.barrier()
    under_way, told = [], list[str]()
    for number, (issue, right) in enumerate(todo):
        under_way.append((number, *issue(), right))
        own.shuffle(under_way)
        while under_way and (own.random() < 0.6 or number == count - 1):
            place, work, found, expected = under_way.pop()
            work.wait()
            told += [f"collective {place}" for a, b in zip(found, expected, strict=True) if not torch.equal(a, b)]
    return told


def of_random(shm: ShmGroup, alike: random.Random, own: random.Random) -> tuple[Issue, list[Tensor]]:
    """A collective to be issued, with its outputs; and what these are by gloo."""
    rank, size = shm.rank(), shm.size()
    dtype, is_gather = alike.choice(DTYPES), alike.random() < 0.5
    lengths = [[alike.choice(LENGTHS) for _ in range(size)] for _ in range(alike.randrange(1, 4))]
    if is_gather:
        inputs = [values(shm, own, row[rank], dtype) for row in lengths]
        outputs = [[torch.empty(length, dtype=dtype) for length in row] for row in lengths]
        right = [each for row in zip(*of_all(inputs), strict=True) for each in row]
        return lambda: (shm.allgather(outputs, inputs), [each for row in outputs for each in row]), right
    wider = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    rows = [[values(shm, own, length, dtype) for length in row] for row in lengths]
    sums = [torch.empty(row[rank], dtype=wider) for row in lengths]
    everyone = of_all([each for row in rows for each in row])
    right = []
    for index in range(len(rows)):
        terms = [each[index * size + rank].to(wider) for each in everyone]
        right.append(reduce(torch.add, terms))
    return lambda: (shm.reduce_scatter(sums, rows), sums), right


def values(shm: ShmGroup, source: random.Random, numel: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose sum depends on its order, in memory that peers read in place or in other memory."""
    generator = torch.Generator().manual_seed(source.randrange(1 << 30))
    made_ = (torch.randint(0, 9, (numel,), generator=generator) / (3 if dtype.is_floating_point else 1)).to(dtype)
    return made_ if source.random() < 0.5 else shm.allocate(numel, dtype).copy_(made_)


def of_all(mine: list[Tensor]) -> list[list[Tensor]]:
    """What every rank has, by rank, over gloo."""
    found: list[list[Tensor]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, [each.clone() for each in mine])
    return found


@pytest.mark.parametrize(("size", "count"), [(2, 40), (3, 40), (8, 12)])
def test_random_collectives_are_those_of_gloo(size: int, count: int) -> None:
    assert run_ranks(random_collectives, size, size, count) == [[]] * size


# -- memory ------------------------------------------------------------------------------------------------------------


def in_place(rank: int) -> tuple[bool, int, int]:
    """True if peers read in place; bytes that the heap grows by with that, and without."""
    shm = made()
    shm.register()
    segment = shm.transport.segment
    given, total = shm.allocate(1 << 20, torch.float32).fill_(rank), torch.empty(1 << 19)
    before = segment._reserved
    shm.reduce_scatter_single(total, given).wait()
    after = segment._reserved
    shm.reduce_scatter_single(total, given.clone()).wait()
    return shm.holds(given), after - before, segment._reserved - after


def test_memory_of_the_backend_is_read_in_place_and_all_else_is_copied_once() -> None:
    assert run_ranks(in_place, 2) == [(True, 0, 1 << 21)] * 2


def inputs_may_change(rank: int) -> list[float]:
    """The input of a gather changes as soon as the gather is issued, that of a sum when it was waited for."""
    shm, found = made(), list[float]()
    for number in range(20):
        own, out = torch.full((5000,), float(number)), torch.empty(10_000)
        work = shm.all_gather_single(out, own)
        own.fill_(-1.0)
        if rank:
            time.sleep(0.002)
        work.wait()
        found.append(out.sum().item() / 10_000 - number)
    given, total = shm.allocate(1 << 16, torch.float32), torch.empty(1 << 15)
    for number in range(20):
        given.fill_(float(number))
        shm.reduce_scatter_single(total, given).wait()
        found.append(total.sum().item() / (1 << 16) - number)
    return found


def test_inputs_may_change_when_they_may_with_gloo() -> None:
    assert run_ranks(inputs_may_change, 2) == [[0.0] * 40] * 2


def left_in_place(rank: int) -> list[float]:
    """Rank 0 has what it gathers before rank 1 has read, and changes its input when it has settled."""
    shm, store = made(), dist.distributed_c10d._get_default_store()
    own, out = shm.allocate(1 << 16, torch.float32).fill_(rank + 1.0), torch.empty(2, 1 << 16)
    work = shm.allgather([list(out)], [own], until_settled=True)
    if rank == 0:
        work.wait(timedelta(seconds=10))
        store.set("rank 0 has waited", "")
        shm.settle()
        own.fill_(-1.0)
    else:
        store.wait(["rank 0 has waited"])
        time.sleep(0.1)
        work.wait()
    return out.mean(dim=1).tolist()


def test_an_input_left_in_place_is_waited_for_where_it_may_change() -> None:
    assert run_ranks(left_in_place, 2) == [[1.0, 2.0]] * 2


def without_room(rank: int, how: str) -> tuple[str, list[float]]:
    if rank == 1 and how == "a limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    if rank == 1 and how == "no memfd":
        del os.memfd_create
    if how == "hosts":
        group._host = lambda: rank
    found, why = shared(dist.group.WORLD, rank, dist.get_world_size(), 1 << 16 if how == "too small" else None)
    assert found is None
    harness.shm.register()
    out = torch.empty(dist.get_world_size())
    dist.all_gather_into_tensor(out, torch.full((1,), float(rank)), group=dist.new_group(backend="shm"))
    return why, out.tolist()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("a limit", "rank 1: shared memory could not be made: [Errno 27] File too large"),
        ("no memfd", "rank 1: shared memory could not be made: module 'os' has no attribute 'memfd_create'"),
        ("too small", "rank 0: shared memory could not be made: "),
        ("hosts", "the ranks are on several hosts, or in several PID namespaces"),
    ],
)
def test_without_room_all_ranks_use_gloo_and_say_why(how: str, says: str) -> None:
    for why, out in run_ranks(without_room, 2, how):
        assert why.startswith(says), why
        assert out == [0.0, 1.0]


# -- ranks that end ----------------------------------------------------------------------------------------------------


def is_killed(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 3), rank=rank, world_size=3)
    shm, first, out = made(), torch.ones(4), torch.empty(12)
    shm.allocate(1 << 20, torch.float32).fill_(1.0)
    shm.all_gather_single(out, first).wait()
    left = shm.all_gather_single(out, first)  # a rank that has issued it has given its part
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    left.wait()
    began = time.monotonic()
    try:
        shm.reduce_scatter_single(torch.empty(4), torch.ones(12)).wait()
    except RuntimeError as error:
        Path(folder, f"{rank}.txt").write_text(f"{time.monotonic() - began}\n{error}")
    time.sleep(1.0)  # the other one is to find rank 2, and not this one
    os._exit(0)


def test_a_rank_that_is_killed_is_named_within_a_second_and_leaves_nothing(tmp_path: Path) -> None:
    fork_ranks(is_killed, 3, str(tmp_path))
    for rank in range(2):
        seconds, message = (tmp_path / f"{rank}.txt").read_text().split("\n", 1)
        assert float(seconds) < 1.0
        assert message.startswith("Connection closed: rank 2 of the group (process ")
        assert "it has ended unless its log says otherwise" in message
    assert not [name for name in os.listdir("/dev/shm") if "shm-group" in name]


def waits_too_long(rank: int) -> list[str]:
    """What is raised where a wait has a limit of its own, where the group has one; and where rank 1 gives up."""
    (shm, why), found = shared(dist.new_group(timeout=timedelta(seconds=3)), rank, 2), list[str]()
    assert shm is not None, why
    for limit in (timedelta(seconds=0.1), None):
        if rank == 0:
            with pytest.raises(RuntimeError) as caught:
                shm.all_gather_single(torch.empty(2), torch.ones(1)).wait(limit)
            found.append(str(caught.value))
    dist.barrier()
    if rank == 1:
        shm.abort()
    with pytest.raises(RuntimeError) as caught:
        shm.all_gather_single(torch.empty(2), torch.ones(1)).wait(timedelta(days=1))
    return [*found, str(caught.value)]


def test_no_wait_is_for_ever() -> None:
    (own, of_group, by_other), (given_up,) = run_ranks(waits_too_long, 2)
    assert own.startswith("Timed out waiting 0.1 s for rank 1 of the group (process ")
    assert of_group.startswith("Timed out waiting 3.0 s for rank 1 of the group")
    assert by_other.startswith("Connection closed: rank 1 of the group (process ")
    assert given_up.startswith("Connection closed: this process has given up the group")


def issues_others(rank: int) -> str:
    shm = made()
    with pytest.raises(RuntimeError) as caught:
        shm.all_gather_single(torch.empty(4 + 4 * rank), torch.ones(2 + 2 * rank)).wait(timedelta(seconds=5))
    dist.barrier()
    return str(caught.value)


def test_ranks_that_issue_different_collectives_are_told() -> None:
    one, other = run_ranks(issues_others, 2)
    assert "all-gather of 8 bytes from rank 1 of the group" in one
    assert "there all-gather of 16 bytes" in one
    assert "all-gather of 16 bytes from rank 0 of the group" in other


def far_ahead(rank: int) -> float:
    """Rank 0 issues more than rank 1 has room to be told of."""
    segment.RING = 64
    shm, outs, works = made(), list[Tensor](), list[harness.shm.Work]()
    for number in range(200):
        outs.append(torch.empty(2))
        works.append(shm.all_gather_single(outs[-1], torch.full((1,), float(number))))
        if rank:
            time.sleep(0.001)
            works.pop().wait()
    for work in works:
        work.wait()
    return float(sum(out.sum() for out in outs))


def test_a_rank_that_is_far_behind_is_waited_for() -> None:
    assert run_ranks(far_ahead, 2) == [199 * 200.0] * 2


def read_from_another_wait(rank: int, alone: bool) -> float:
    """Seconds for which rank 0 waits for its sums; rank 1, which has them to read, waits in another group meanwhile."""
    with mock.patch.object(transfer.Transport, "_all", mock.MagicMock()) if alone else nullcontext():
        one, other = made(), made()
        row = [other.allocate(2, torch.float32).fill_(rank) for _ in range(2)]
        time.sleep(0.3 * (rank == 0))  # it has nothing to read yet where the other one issues its own
        sums = other.reduce_scatter([torch.empty(2)], [row])
        began = time.monotonic()
        if rank == 0:
            sums.wait(timedelta(seconds=2))
        one.allgather([[torch.empty(1), torch.empty(1)]], [torch.ones(1)]).wait(timedelta(seconds=5))
        return time.monotonic() - began


def test_a_wait_in_one_group_completes_what_came_in_another() -> None:
    assert run_ranks(read_from_another_wait, 2, False)[0] < 1.0


@kills("Shared memory", "one group at a time", "Who waits in one group completes nothing that came in another")
def test_waits_in_one_group_alone_are_found() -> None:
    with pytest.raises(RankFailed, match="Timed out waiting"):
        run_ranks(read_from_another_wait, 2, True)


def beside_a_late_rank(rank: int, completes: bool) -> bool:
    """True if rank 0 gets its first sum when rank 1 has issued two, and waits for neither."""
    shm, store = made(), dist.distributed_c10d._get_default_store()
    given = [shm.allocate(1 << 10, torch.float32).fill_(1.0) for _ in range(2)]
    totals = [torch.empty(1 << 9) for _ in range(2)]
    if rank == 0:
        works = [shm.reduce_scatter_single(total, each_) for total, each_ in zip(totals, given, strict=True)]
        dist.barrier()
        try:
            works[0].wait(timedelta(seconds=10 if completes else 0.3))
        except RuntimeError:
            return False
        finally:
            store.set("rank 0 has waited", "")
        return True
    if not completes:
        transfer.Transport._advance_ready = lambda self, kind=None: None  # type: ignore[method-assign] # here alone
    works = [shm.reduce_scatter_single(totals[0], given[0])]
    dist.barrier()
    works.append(shm.reduce_scatter_single(totals[1], given[1]))
    store.wait(["rank 0 has waited"])
    return True


def test_a_late_rank_holds_nobody_up_with_what_it_has() -> None:
    assert run_ranks(beside_a_late_rank, 2, True) == [True, True]


LATE = [("never early", "A rank that issues a sum does not complete those before it")]


@pytest.mark.parametrize("mutant", each("Shared memory, by ranks that come late", LATE))
def test_a_mutant_holds_others_up(mutant: str) -> None:
    assert run_ranks(beside_a_late_rank, 2, False) == [False, True]


# -- torch's own wrappers ----------------------------------------------------------------------------------------------


def trained(rank: int, backend: str, wrap: str) -> list[Tensor]:
    """Weights after one step."""
    harness.shm.register()
    ranks = dist.new_group(backend=backend)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
    model: nn.Module = module
    if wrap == "ddp":
        model = DistributedDataParallel(module, process_group=ranks)
    else:
        fully_shard(module, mesh=DeviceMesh.from_group(ranks, "cpu"))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    issue = transfer.Transport._issue
    with mock.patch.object(transfer.Transport, "_issue", autospec=True, side_effect=issue) as seen:
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))).square().mean().backward()
    assert bool(seen.call_count) == (backend == "shm" and wrap == "fsdp2")
    optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in module.parameters()]


def both(rank: int, wrap: str) -> tuple[list[Tensor], list[Tensor]]:
    return trained(rank, "shm", wrap), trained(rank, "gloo", wrap)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_torchs_wrappers_train_over_it_as_over_gloo(wrap: str) -> None:
    for ours, theirs in run_ranks(both, 2, wrap):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
