"""What stands on a rank's board, and what it spares: nobody waits for a rank whose sums could have been made."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.fsdp import fully_shard_model
from harness.fsdp.comm import notices
from harness.fsdp.comm.device import DeviceRuntime
from harness.fsdp.comm.events import Label
from harness.fsdp.comm.notices import LONGEST, PLACES, Notices, notice_of
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

ROOM = "The engine, by what ranks note of what can be read"
WHEN_WANTED = WAYS[1]
BLOCKS = 4


# -- the board ---------------------------------------------------------------------------------------------------------


def look(board: Notices, tag: int, count: int, rank: int = 0) -> tuple[int, ...] | None:
    return notice_of(os.getpid(), board.address, rank, tag, count)


def check_the_board() -> None:
    """Everything a reader may find."""
    board = Notices(2)
    assert look(board, 7, 1) is None, "nothing was posted"
    board.post(0, 7, [5, 6])
    assert look(board, 7, 1) == (5, 6)
    assert look(board, 7, 2) is None, "it was posted once"
    assert look(board, 7, 1, rank=1) is None, "it was for another rank"
    assert look(board, 8, 1) is None, "it was under another tag"
    board.post(0, 7, [9])
    assert look(board, 7, 2) == (9,)
    assert look(board, 7, 1) is None, "a later one has taken its place"
    board.post(0, 7 + PLACES, [11])
    assert look(board, 7, 2) is look(board, 7, 1) is None, "another tag has taken its place"
    assert look(board, 7 + PLACES, 1) == (11,)
    board.post(0, 7 + PLACES, range(LONGEST + 1))
    assert look(board, 7 + PLACES, 2) is None, "it is too long"
    assert look(board, 7 + PLACES, 1) is None, "and is not the one before it"
    board.post(0, 7 + PLACES, range(LONGEST))
    assert look(board, 7 + PLACES, 3) == (*range(LONGEST),)


def test_a_notice_is_taken_for_nothing_else() -> None:
    check_the_board()


def test_of_a_process_that_has_ended_there_is_none() -> None:
    board, child = Notices(2), os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    board.post(0, 7, [5])
    assert notice_of(child, board.address, 0, 7, 1) is None


SLIPS = {
    "any count": Slip(notices, "_stamp", "| count", "| 1", "a notice is taken for an earlier or later one of its tag"),
    "any tag": Slip(notices, "_stamp", "tag << _COUNT_BITS |", "", "a notice is taken for one of another tag"),
    "any rank": Slip(notices, "_place", "rank * PLACES +", "", "a notice is taken for one to another rank"),
    "stamp stays": Slip(
        Notices, "post", "self._words[begin] = 0", "pass", "one that is too long leaves the one before"
    ),
}


@pytest.mark.parametrize("name", each(ROOM, [(name, slip.breaks) for name, slip in SLIPS.items()]))
def test_a_board_with_a_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SLIPS[name].put(monkeypatch)
    with pytest.raises(AssertionError):
        check_the_board()


def test_a_notice_that_changes_while_it_is_read_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    board, read = Notices(2), notices.words_from
    board.post(0, 7, [5, 6])

    def late(*where: int) -> tuple[int, ...]:
        found = read(*where)
        board.post(0, 7, [8, 9])
        return found

    monkeypatch.setattr(notices, "words_from", late)
    assert look(board, 7, 1) is None


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


def two_microbatches(rank: int, in_order: bool) -> float:
    """The norm of gradients of two microbatches that rank 1 has laid out both before rank 0 has come to the first: it
    sees the second one's notice and not the first one's."""
    if not in_order:
        _issue = Slip(ReducePipeline, "_issue", "each is not behind", "True").made()
        ReducePipeline._issue = _issue  # type: ignore[method-assign] # in this process
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
