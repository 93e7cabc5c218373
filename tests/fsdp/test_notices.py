"""What ranks tell each other on boards, and what it spares: nobody waits for a rank whose sums could have been made."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.fsdp import fully_shard_model
from harness.fsdp.comm.device import DeviceRuntime
from harness.fsdp.comm.events import Label
from harness.fsdp.comm.notices import RING, Notices
from harness.fsdp.comm.peer_memory import Laid
from harness.fsdp.comm.reduction import Exchange
from harness.fsdp.runtime.bucket_reduction import Job
from harness.fsdp.runtime.reduce import ReducePipeline
from harness.fsdp.runtime.units import Unit
from harness.fsdp.storage.placement import Axis
from tests.fsdp.test_peer_memory import Block
from tests.fsdp.trial import WAYS
from tests.support.mutants import Slip, each
from tests.support.spawn import run_ranks

ROOM = "The engine, by what ranks tell of what can be read"
WHEN_WANTED = WAYS[1]
BLOCKS = 4


# -- the board ---------------------------------------------------------------------------------------------------------


def boards(size: int = 2) -> list[Notices]:
    """Those of so many ranks, here in one process."""
    found = [Notices(rank, size) for rank in range(size)]
    for each_, peer in itertools.permutations(found, 2):
        each_.join(peer.rank, os.getpid(), peer.file)
    for board in found:
        board.close_file()
    return found


def check_the_board() -> None:
    """Everything that is told is heard, once, in its order, by the rank it is for."""
    one, other, third = boards(3)
    assert not other.has_news(0)
    assert other.hear(0) == []
    assert one.tell(1, [5, 6])
    assert one.tell(1, [-7])
    assert other.has_news(0)
    assert not third.has_news(0)
    assert not one.has_news(1)
    assert other.hear(0) == [[5, 6], [-7]]
    assert not other.has_news(0)
    assert other.hear(0) == []
    told, heard, lengths = list[list[int]](), list[list[int]](), random.Random(0)
    for number in range(RING):  # several times around, and the end of the ring is met in all ways
        told.append(list(range(number, number + lengths.randrange(13))))
        assert one.tell(1, told[-1])
        if number % 7 == 0:
            heard += other.hear(0)
    heard += other.hear(0)
    assert all(one == other for one, other in itertools.zip_longest(heard, told))


def check_a_full_board() -> None:
    """There is room for what was heard, and what was not is not lost."""
    one, other = boards()
    told = [number for number in range(RING) if one.tell(1, [number, 0, 0])]
    assert RING // 4 - 1 <= len(told) <= RING // 4
    assert not one.tell(1, [0, 0, 0])
    assert [first for first, *_ in other.hear(0)] == told
    assert one.tell(1, [1, 0, 0])
    assert other.hear(0) == [[1, 0, 0]]


class _Watched:
    """A board at which `look` is called before each change."""

    def __init__(self, words: Any, look: Callable[[], None]) -> None:
        self.words, self.look = words, look

    def __setitem__(self, place: Any, value: Any) -> None:
        self.look()
        self.words[place] = value


def check_what_is_half_told() -> None:
    """Nothing is heard of a notice before it is whole."""
    one, other = boards()
    heard = list[list[int]]()
    one._own = _Watched(one._own, lambda: heard.extend(other.hear(0)))  # type: ignore[assignment] # stands for it
    for number in range(RING // 4):
        assert one.tell(1, [number, 2, 3, 4])
        assert len(heard) == number, "it was heard before it was told"
    assert [*heard, *other.hear(0)] == [[number, 2, 3, 4] for number in range(RING // 4)]


CHECKS = {"told": check_the_board, "full": check_a_full_board, "whole": check_what_is_half_told}


def check_all() -> None:
    for check in CHECKS.values():
        check()


@pytest.mark.parametrize("check", CHECKS)
def test_what_is_told_is_heard(check: str) -> None:
    CHECKS[check]()


def test_what_is_too_long_for_a_ring_is_refused() -> None:
    with pytest.raises(ValueError, match="more than one notice may have"):
        boards()[0].tell(1, range(RING // 2))


def test_what_a_process_told_before_it_ended_is_heard() -> None:
    one, other = boards()
    if (child := os.fork()) == 0:
        one.tell(1, [5, 6])
        os._exit(0)
    os.waitpid(child, 0)
    assert other.hear(0) == [[5, 6]]


def test_a_file_that_is_no_board_is_not_joined() -> None:
    with pytest.raises(OSError, match="length is greater"), open("/proc/self/status", "rb") as file:
        Notices(0, 2).join(1, os.getpid(), file.fileno())


SLIPS = {
    "over the end": Slip(
        Notices, "tell", "own[part + _BEGIN + place] = 0", "pass", "the reader does not learn that the ring begins anew"
    ),
    "any room": Slip(Notices, "tell", "return False", "pass", "what was not heard yet is written over"),
    "never heard": Slip(
        Notices, "hear", "self._own[peer * _PART + _HEARD] = heard", "pass", "what was heard makes no room"
    ),
    "any rank": Slip(Notices, "hear", "self.rank * _PART\n", "0\n", "a rank hears what is for another one"),
    "twice": Slip(Notices, "hear", "self._heard[peer] = heard", "pass", "a notice is heard twice"),
    "counted first": Slip(
        Notices,
        "tell",
        "if skipped:",
        "own[part] = told + skipped + words\n    if skipped:",
        "a notice is counted before it is written",
    ),
}


@pytest.mark.parametrize("name", each(ROOM, [(name, slip.breaks) for name, slip in SLIPS.items()]))
def test_a_board_with_a_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SLIPS[name].put(monkeypatch)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        check_all()


# -- what it spares ----------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Blocks, and what is called when the backward comes to the outputs of each."""

    def __init__(self, come_to: Callable[[int], None]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.come_to = come_to

    def forward(self, x: Tensor) -> Tensor:
        for place, block in enumerate(self.blocks):
            x = block(x)
            x.register_hook(lambda _, place=place: self.come_to(place))
        return x


class Late:
    """Rank 1 goes into the backward of a block only when rank 0 has come out of it, and is done with the gradients of
    the one before. What rank 0 has done stands in the group's store; `missed`: what rank 1 has waited for in vain."""

    def __init__(self, rank: int, patience: float) -> None:
        self.rank, self.patience, self.step, self.missed = rank, patience, 0, list[str]()
        self.store = dist.distributed_c10d._get_default_store()
        land, issue = ReducePipeline._land, ReducePipeline._issue

        def landed(pipeline: ReducePipeline) -> None:
            unit = pipeline._in_flight[0][0]
            land(pipeline)
            self.tell(f"{unit.name} landed")

        def issued(pipeline: ReducePipeline, unit: Unit) -> None:
            issue(pipeline, unit)
            self.tell(f"{unit.name} issued")

        ReducePipeline._land, ReducePipeline._issue = landed, issued  # type: ignore[method-assign] # in this process

    def tell(self, what: str) -> None:
        if self.rank == 0:
            self.store.set(f"{self.step} {what}", "")

    def come_to(self, place: int) -> None:
        if self.rank == 1:
            self.wait_for(f"{self.step} blocks.{place} issued")
            if place < BLOCKS - 1:
                self.wait_for(f"{self.step} blocks.{place + 1} landed")

    def wait_for(self, key: str) -> None:
        until = time.monotonic() + self.patience
        while not self.store.check([key]):
            if time.monotonic() > until:
                self.missed.append(key)
                return
            time.sleep(0.002)


def train_beside_a_late_rank(rank: int, strategy: str, patience: float, early: bool) -> tuple[list[str], list[float]]:
    """What a late rank has waited for in vain, and the norms of two steps."""
    if not early:
        Job.sum_early = lambda self: None  # type: ignore[method-assign] # in this process
    late = Late(rank, patience)
    torch.manual_seed(3)
    with WHEN_WANTED.taken():
        model = fully_shard_model(
            Chain(late.come_to), fsdp_unit_modules=[Block], zero_dp_strategy=strategy, eager_limit_bytes=0
        )
    norms = []
    for late.step in range(2):
        model(torch.full((2, 8), rank + 1.0)).square().mean().backward()
        norms.append(model.grad_norm())
        model.zero_grad()
    model.close()
    return late.missed, norms


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_a_late_rank_holds_nobody_up_with_what_it_has(strategy: str) -> None:
    (_, norms), (missed, other) = run_ranks(train_beside_a_late_rank, 2, strategy, 20.0, True)
    assert missed == []
    assert norms == other


@pytest.mark.parametrize("mutant", each(ROOM, [("never early", "The rank that comes last sums one unit later")]))
def test_a_mutant_holds_others_up(mutant: str) -> None:
    (_, norms), (missed, _) = run_ranks(train_beside_a_late_rank, 2, "optim_grads_params", 0.3, False)
    assert {"0 blocks.3 landed", "1 blocks.3 landed"} <= {*missed}
    assert norms == run_ranks(train_beside_a_late_rank, 2, "optim_grads_params", 0.3, True)[0][1]


def train_in_step(rank: int, lets_go: bool) -> list[int]:
    """How many units of which the sums are made and taken still hold their gradients when a further one is summed."""
    if not lets_go:
        Job.is_over = property(lambda self: False)  # type: ignore[method-assign,assignment] # in this process
    found, issue = list[int](), ReducePipeline._issue

    def issued(pipeline: ReducePipeline, unit: Unit) -> None:
        found.append(len(pipeline._in_flight))
        issue(pipeline, unit)

    def come_to(place: int) -> None:
        dist.barrier()  # all have issued the block behind
        model._parts.reduce._sum_early()
        dist.barrier()  # all have summed it

    ReducePipeline._issue = issued  # type: ignore[method-assign] # in this process
    with WHEN_WANTED.taken():
        model = fully_shard_model(Chain(come_to), fsdp_unit_modules=[Block], zero_dp_strategy="optim_grads_params")
    model(torch.full((2, 8), rank + 1.0)).square().mean().backward()
    model.close()
    return found


def test_gradients_that_are_summed_and_taken_are_let_go_before_others_take_memory() -> None:
    assert run_ranks(train_in_step, 2, True) == [[0] * BLOCKS] * 2


@pytest.mark.parametrize("mutant", each(ROOM, [("held too long", "Gradients stay until there is no room for others")]))
def test_a_mutant_holds_what_is_taken(mutant: str) -> None:
    assert run_ranks(train_in_step, 2, False) == [[0, *[1] * (BLOCKS - 1)]] * 2


def two_microbatches(rank: int, in_order: bool) -> float:
    """The norm of gradients of two microbatches that rank 1 has laid out both before rank 0 has come to the first: it
    sees that the second one's are there and not that the first one's are, as if these had come between two looks."""
    is_there, looked = Exchange.is_there, list[Exchange]()

    def unseen(exchange: Exchange) -> bool:
        looked.append(exchange)
        return exchange is not looked[0] and is_there(exchange)

    Exchange.is_there = unseen  # type: ignore[method-assign] # in this process
    if not in_order:
        wrong = Slip(ReducePipeline, "_sum_early", "each is not behind", "True").made()
        ReducePipeline._sum_early = wrong  # type: ignore[method-assign] # in this process
    late = Late(1 - rank, 20.0)
    torch.manual_seed(3)
    with WHEN_WANTED.taken():
        model = fully_shard_model(
            Block(), fsdp_unit_modules=[nn.Linear], zero_dp_strategy="optim_grads", eager_limit_bytes=0
        )
    for late.step in range(2):
        if rank == 0 and late.step == 0:
            late.wait_for("1 linear issued")
        model.set_model_auto_sync(late.step == 1)
        model(torch.full((2, 8), rank + 1.0 + late.step)).square().mean().backward()
    norm = model.grad_norm()
    model.close()
    return norm


def test_microbatches_of_a_bucket_are_summed_in_their_order() -> None:
    torch.manual_seed(3)
    plain = Block()
    for value in (1.0, 2.0, 2.0, 3.0):
        plain(torch.full((2, 8), value)).square().mean().backward()
    norm = torch.cat([param.grad.flatten() for param in plain.parameters() if param.grad is not None]).norm().item()
    assert run_ranks(two_microbatches, 2, True) == [pytest.approx(norm / 2, rel=1e-5)] * 2


@pytest.mark.parametrize(
    "mutant", each(ROOM, [("out of order", "A microbatch's sum is made before that of the one before it")])
)
def test_a_mutant_sums_out_of_order(mutant: str) -> None:
    right, wrong = run_ranks(two_microbatches, 2, True)[0], run_ranks(two_microbatches, 2, False)[0]
    assert wrong != pytest.approx(right, rel=1e-3)


def test_what_fails_early_is_raised_where_the_sum_is_waited_for() -> None:
    job = Job.__new__(Job)
    job.label, job.runtime, job._stream = (
        Label("reduce_scatter", "a unit"),
        DeviceRuntime(torch.device("cpu")),
        "reduce",
    )
    job._route, job._failure, job.done, job.future = deque(), None, None, None

    def fail() -> None:
        raise RuntimeError("a rank cannot be read any more")

    job._stages = deque([fail])
    exchange = Exchange([], job.label, laid=[mock.create_autospec(Laid, is_there=lambda: True)])
    job._exchanges = {Axis.inner: exchange}
    job.sum_early()
    with pytest.raises(RuntimeError, match="cannot be read"):
        job.wait()
