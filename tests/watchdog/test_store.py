"""One process keeps the store of all ranks: nothing is asked of it while all is well, and little of a late rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from harness.fsdp import fully_shard
from harness.watchdog import CollectiveError, Watchdog, ranks_text
from harness.watchdog.store import RollCalls
from harness.watchdog.waits import Position, describe_hang
from tests.support.mutants import Slip, each, each_found_by
from tests.support.spawn import run_ranks
from tests.watchdog.ranks import Counted, together, watchdogs, without_threads

FEW, MANY = 4, 48
"""Ranks, each a thread of this process."""
MOST = 10
"""Requests of a rank, on average, for one collective that is compared or one message that is agreed on."""


def counted() -> Counted:
    return Counted(dist.HashStore())


def compared(ranks: int, *, differ: bool = False) -> tuple[int, list[Any]]:
    """Requests for a collective that ranks compare, and the error of each."""
    with without_threads():
        dogs = watchdogs(ranks, found := counted(), check=True)
    lengths = [3 if differ and rank == 1 else 2 for rank in range(ranks)]
    errors = together(
        [partial(dog.begin, "weights", [torch.zeros(length)]) for dog, length in zip(dogs, lengths, strict=True)]
    )
    for dog in dogs:
        dog.close()
    return len(found.requests), errors


def rolls(ranks: int, found: Counted) -> list[RollCalls]:
    return [RollCalls(found, found, range(ranks), rank, 0.1) for rank in range(ranks)]


def called(ranks: int) -> tuple[int, list[Any]]:
    """Requests for a message on which ranks agree, and the messages. Two ranks call the roll."""
    position = Position("in the forward", "all_gather (number 1)", 61.0, [(1, "all_gather")])
    made = rolls(ranks, found := counted())

    def answer(one: RollCalls) -> str:
        assert one.wait()
        return one.answer(position)

    def ask(one: RollCalls) -> bool:
        return one.ask(lambda positions: describe_hang(positions, range(ranks), 60.0))

    callers: Callable[[], Any] = lambda: sum(together([partial(ask, one) for one in made[:2]], 0))  # noqa: E731
    asked, *messages = together([callers, *(partial(answer, one) for one in made)])
    return len(found.requests), [asked, *messages]


def asking_too_much() -> list[str]:
    found = []
    for ranks in (FEW, MANY):
        requests, errors = compared(ranks)
        assert errors == [None] * ranks
        asked, (callers, *messages) = called(ranks)
        found += [] if callers == 1 else [f"{callers} ranks call one roll"]
        assert len(set(messages)) == 1
        assert f"{ranks_text(range(ranks))} wait since 61.0 s in all_gather" in messages[0]
        found += [
            f"{number} requests of {ranks} ranks for a {what}"
            for what, number in (("collective", requests), ("message", asked))
            if number > MOST * ranks
        ]
    return found


def test_a_rank_asks_a_few_times_however_many_there_are() -> None:
    assert asking_too_much() == []


def test_all_name_the_rank_that_differs() -> None:
    requests, errors = compared(MANY, differ=True)
    assert requests <= MOST * MANY
    assert {type(error) for error in errors} == {CollectiveError}
    (message,) = set(map(str, errors))
    assert f"of 2 elements float32 on {ranks_text([0, *range(2, MANY)])}" in message
    assert "of 3 elements float32 on rank 1" in message


def test_all_that_come_name_the_rank_that_does_not() -> None:
    dogs = watchdogs(3, counted(), 1.0, check=True, where=lambda: "here")
    errors = together([partial(dog.begin, "weights") for dog in dogs[:2]], 0)
    for dog in dogs:
        dog.close()
    assert {type(error) for error in errors} == {CollectiveError}
    (message,) = set(map(str, errors))
    assert "ranks 0, 1 wait since " in message
    assert "in a comparison of weights here; rank 2 has not come: it is here and has begun no collective" in message


test_who_asks_too_much_is_found = each_found_by(
    "What ranks ask of their store",
    """
    all read all: Each rank reads what each has told of a collective
        watchdog.store.CollectiveCheck.compare: # All have come
            => found = [self._store.get(f"{here}/{rank}") for rank in self.ranks]  #
    asked again: Who makes the message asks again and again who has answered
        watchdog.store.RollCalls.ask: voice.wait([f"{roll}/all answered"], timedelta(seconds=ANSWER_S))
            => while not voice.check([f"{roll}/all answered"]): pass
    """,
    test_a_rank_asks_a_few_times_however_many_there_are,
)
test_many_who_ask_are_found = each_found_by(
    "Deadlocks",
    """
    each rank asks: Every rank that waits says so, and not the first alone
        watchdog.store.RollCalls.ask: voice.add(f"{roll}/asked", 1) != 1 => False
    """,
    test_a_rank_asks_a_few_times_however_many_there_are,
)


# -- all is well -------------------------------------------------------------------------------------------------------


def idle(_: int, folder: str, kind: str) -> dict[str, list[str]]:
    """Requests of a rank while nothing is done, and while a model trains."""
    inner: Any = dist.FileStore(f"{folder}/store", 2) if kind == "file" else tcp_store()
    found = Counted(inner)
    with mock.patch.object(dist.ProcessGroup, "get_group_store", return_value=found):
        net = torch.nn.Linear(6, 6)
        model, optimizer = fully_shard(net, torch.optim.SGD(net.parameters(), 0.1), zero_dp_strategy="optim")
        dog = Watchdog(timeout_s=60.0)
    time.sleep(1.0)
    before = len(found.requests)
    time.sleep(2.5)
    resting = len(found.requests)
    until = time.monotonic() + 1.5
    while bool(torch.stack(gathered(time.monotonic() < until)).all()):  # alike on all ranks
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
    requests = {"first": found.requests[:before], "idle": found.requests[before:resting]}
    requests["training"] = found.requests[resting:]
    dist.barrier()
    dog.close()
    model.close()
    time.sleep(1.0)
    dist.barrier()
    return requests


def polling(rank: int, folder: str) -> dict[str, list[str]]:
    wait, polls = "self._ear.wait([key], timedelta(days=3650))", "while not self._ear.check([key]): time.sleep(0.5)"
    with pytest.MonkeyPatch.context() as patch:
        Slip(RollCalls, "wait", wait, polls).put(patch)
        return idle(rank, folder, "server")


def gathered(value: bool) -> list[torch.Tensor]:
    found = [torch.empty(1) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([float(value)]))
    return found


def tcp_store() -> Any:
    port = torch.zeros(1, dtype=torch.int64)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    if server is not None:
        port.fill_(server.port)
    dist.broadcast(port, 0)
    return server or dist.TCPStore("127.0.0.1", int(port), is_master=False)


@pytest.mark.parametrize("kind", ["server", "file"])
def test_while_all_is_well_a_rank_asks_nothing(kind: str, tmp_path: Path) -> None:
    for requests in run_ranks(idle, 2, str(tmp_path), kind):
        assert (requests["idle"], requests["training"]) == ([], [])
        assert kind == "file" or requests["first"] == ["wait", "wait"], "of the engine's watchdog and the other one"


@pytest.mark.parametrize(
    "name", each("What ranks ask of their store", [("polls", "A rank asks again and again while all is well")])
)
def test_who_polls_is_found(name: str, tmp_path: Path) -> None:
    assert all(len(requests["idle"]) > 4 for requests in run_ranks(polling, 2, str(tmp_path)))
