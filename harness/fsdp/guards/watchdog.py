"""Turning a hang, or ranks that issue different collectives, into one error on every rank.

[Note: How a hang is told] Every rank numbers the collectives it announces through `harness.fsdp.comm.events` and notes
what it waits for. A thread looks a few times a second; when a wait has lasted longer than the limit, or the backend has
failed one, it raises an alarm in the process group's store. Every rank's thread sees the alarm, also where the program
still computes, and answers with its position. One rank makes one message of all positions, each rank reads it, and only
then are the groups aborted: waits on this rank and, through closed connections, on others fail, and what they raise is
replaced by `CollectiveError` with that message. A rank that waits for nothing raises it at its next collective.

[Note: Waits on a device] On CUDA a wait blocks a stream and not the host, so what `labels.waiting` announces is over at
once. There an event is left behind it, and lasts as long as the stream has not come to it.

[Note: Check before data moves] `CollectiveCheck` compares all ranks' next collective through the store, not through the
group: NCCL would take mismatched calls for one collective and mix up their data.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist

from harness.fsdp.comm import events
from harness.fsdp.comm.device import DeviceRuntime, Event
from harness.fsdp.comm.events import Label
from harness.fsdp.guards.hang_report import Position, by_value, ranks_text, tell

TICK_S = 0.5
"""Seconds between two looks, at most; a quarter of the limit where that is less."""
ANSWER_S = 2.0
"""Seconds that other ranks are given to tell where they are, beyond two looks."""
READ_S = 2.0
"""Seconds that other ranks are given to read the verdict before this one fails and perhaps ends."""
HISTORY = 256
"""Collectives remembered, to find the first one in which ranks differ."""
CHECK_LIMIT_S = 300.0
"""Seconds `CollectiveCheck` waits for the others where no limit is set."""

_ALARM, _COMPOSER, _VERDICT, _READERS = "alarm", "composer", "verdict", "readers"
_WATCHDOGS: dict[str, Iterator[int]] = {}
"""Numbers the users of each group's store in order of construction, which is the same on all its ranks."""


class CollectiveError(RuntimeError):
    """A collective did not come about; the same message on every rank that could be told."""


@dataclass
class _Wait:
    """One wait of one thread; `reached` tells of a wait on a device whether it is over."""

    labels: tuple[Label, ...]
    since: float
    reached: Event | None = None


@dataclass
class _Verdict:
    """What all ranks raise, and how many of them answered."""

    message: str
    answered: int = 0


@dataclass
class _Log:
    """The collectives this process has begun."""

    number: int = 0
    recent: deque[tuple[int, Label]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    last: dict[Label, int] = field(default_factory=dict)

    def add(self, label: Label) -> None:
        self.number += 1
        self.recent.append((self.number, label))
        self.last[label] = self.number


class Watchdog:
    """Watches the collectives of this process for one model.

    Args:
        groups: process groups the model communicates in; the first has all its ranks, and its store carries the alarm.
        runtime: of the device the buckets live on.
        timeout_s: seconds a wait for a collective may last.
        where: tells where the program is; called from another thread.

    Raises:
        ValueError: the limit is not positive.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        runtime: DeviceRuntime,
        timeout_s: float,
        where: Callable[[], str],
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"watchdog_timeout_s={timeout_s} must be above 0 seconds, or None for no watchdog")
        self.timeout_s = timeout_s
        self.tick_s = min(TICK_S, timeout_s / 4)
        self.ranks = dist.get_process_group_ranks(groups[0])
        self.rank = dist.get_rank()
        self._groups = groups
        self._runtime = runtime
        self._where = where
        self._log = _Log()
        self._tokens = count()
        self._waits: dict[int, _Wait] = {}
        self._on_device: deque[_Wait] = deque()
        self._failure: str | None = None
        self._message: str | None = None
        self._closed = False
        self._wake = threading.Event()
        self._told = threading.Event()
        self._ends: list[Callable[[], None]] = []
        if len(self.ranks) > 1:
            self._store = store_of(groups[0], timeout_s=ANSWER_S + self.timeout_s)
            self._ends = [events.on_begin(self._begun), events.watch(self)]
            threading.Thread(target=self._watch, name="fsdp-watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop watching; a second call does nothing."""
        self._closed = True
        self._wake.set()
        while self._ends:
            self._ends.pop()()

    # -- what the program's threads tell ---------------------------------------------------------------------------

    def _begun(self, label: Label) -> None:
        self._raise_if_over()
        self._log.add(label)

    def enter(self, waited: tuple[Label, ...]) -> int:
        """A wait begins.

        Raises:
            CollectiveError: the alarm is over, and the groups are of no use.
        """
        self._raise_if_over()
        token = next(self._tokens)
        self._waits[token] = _Wait(waited, time.monotonic())
        return token

    def leave(self, token: int) -> None:
        """Note that a collective is over for the host; on a device it may just begin."""
        wait = self._waits.pop(token)
        if self._runtime.has_streams:
            wait.reached = self._runtime.record()
            self._on_device.append(wait)

    def explain(self, error: Exception) -> Exception:
        """The alarm's message for an error of the backend; raises the alarm if nobody has."""
        if isinstance(error, CollectiveError) or not _is_of_backend(error):
            return error
        if self._failure is None:
            self._failure = str(error).strip().splitlines()[0].split(". This is")[0]
        self._wake.set()
        patience = 2 * self.tick_s + ANSWER_S + READ_S + 5.0
        if not self._told.wait(patience) or self._message is None:
            return error
        return CollectiveError(self._message)

    def _raise_if_over(self) -> None:
        if self._message is not None:
            raise CollectiveError(self._message)

    # -- the watching thread -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closed:
            try:
                alarmed = self._is_alarmed()
            except Exception:  # the store is gone: the run is over, or a wait will fail and say why
                alarmed = self._failure is not None or self._overdue() is not None
                if self._closed:
                    return
            if alarmed:
                self._conclude()
                return
            self._wake.wait(self.tick_s)

    def _is_alarmed(self) -> bool:
        return self._failure is not None or self._overdue() is not None or self._store.check([_ALARM])

    def _overdue(self) -> _Wait | None:
        """The innermost wait that has lasted too long."""
        limit = time.monotonic() - self.timeout_s
        late = [wait for wait in self._all_waits() if wait.since < limit]
        return late[-1] if late else None

    def _all_waits(self) -> list[_Wait]:
        """Waits that are not over, the oldest first."""
        while self._on_device and self._on_device[0].reached is not None and self._on_device[0].reached.is_reached:
            self._on_device.popleft()
        return [*list(self._on_device)[:1], *list(self._waits.values())]

    def position(self) -> Position:
        """Where this rank is now."""
        waits = self._all_waits()
        wait = self._overdue() or (waits[-1] if waits else None)
        log = self._log
        history = [(number, _text(label)) for number, label in list(log.recent)]
        return Position(
            where=self._where(),
            waits=None if wait is None else (" and ".join(map(_text, wait.labels)) or "a collective begun before"),
            number=None if wait is None else min((log.last.get(label, 0) for label in wait.labels), default=0),
            seconds=0.0 if wait is None else time.monotonic() - wait.since,
            history=history,
            failure=self._failure,
        )

    def _conclude(self) -> None:
        position = self.position()
        try:
            verdict = self._agree(position)
        except Exception as error:
            alone = tell({self.rank: position}, [self.rank], self.timeout_s)
            verdict = _Verdict(f"{alone}; other ranks could not be asked: {str(error).splitlines()[0]}")
        self._message = verdict.message
        for group in self._groups:
            self._runtime.abort(group)
        self._told.set()

    def _agree(self, position: Position) -> _Verdict:
        store = self._store
        store.set(_place(self.rank), json.dumps(asdict(position)))
        store.set(_ALARM, "1")
        if store.add(_COMPOSER, 1) == 1:
            positions = self._collect()
            message = tell(positions, self.ranks, self.timeout_s)
            store.set(_VERDICT, json.dumps(asdict(_Verdict(message, len(positions)))))
        store.wait([_VERDICT], timedelta(seconds=2 * self.tick_s + ANSWER_S + 2.0))
        verdict = _Verdict(**json.loads(store.get(_VERDICT)))
        readers = store.add(_READERS, 1)
        deadline = time.monotonic() + READ_S
        while readers < verdict.answered and time.monotonic() < deadline:
            time.sleep(0.02)
            readers = store.add(_READERS, 0)
        return verdict

    def _collect(self) -> dict[int, Position]:
        """Positions of the ranks that answer in time."""
        found: dict[int, Position] = {}
        deadline = time.monotonic() + 2 * TICK_S + ANSWER_S
        while True:
            for rank in self.ranks:
                if rank not in found and self._store.check([_place(rank)]):
                    found[rank] = Position(**json.loads(self._store.get(_place(rank))))
            if len(found) == len(self.ranks) or time.monotonic() > deadline:
                return found
            time.sleep(0.02)


class CollectiveCheck:
    """Compares every collective over all ranks before its data moves. Slow: each one then waits for all ranks.

    Args:
        group: has all ranks of the model.
        timeout_s: seconds to wait for the others; None is `CHECK_LIMIT_S`.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float | None) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank()
        self._limit_s = CHECK_LIMIT_S if timeout_s is None else timeout_s
        self._number = 0
        self._ends: list[Callable[[], None]] = []
        if len(self.ranks) > 1:
            self._store = store_of(group, timeout_s=self._limit_s)
            self._ends = [events.on_check(self._check)]

    def close(self) -> None:
        """Stop checking; a second call does nothing."""
        while self._ends:
            self._ends.pop()()

    def _check(self, label: Label, data: Sequence[Any]) -> None:
        self._number += 1
        number, mine = self._number, f"{_text(label)} of {_contents(data)}"
        self._store.set(f"{number}/{self.rank}", mine)
        keys = {rank: f"{number}/{rank}" for rank in self.ranks}
        try:
            self._store.wait(list(keys.values()), timedelta(seconds=self._limit_s))
        except (RuntimeError, dist.DistError) as error:
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
            raise CollectiveError(
                f"check_collectives: collective {number} is {mine} on rank {self.rank}; {ranks_text(missing)} came to"
                f" no collective {number} within {self._limit_s:g} s"
            ) from error
        texts = {rank: self._store.get(key).decode() for rank, key in keys.items()}
        if len(set(texts.values())) > 1:
            told = "; ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in by_value(texts).items())
            raise CollectiveError(
                f"check_collectives: ranks are about to issue different collectives as number {number}: {told}. No data"
                " of it has moved. All ranks must run the same modules in the same order"
            )
        # All have come here, so all have read what they compared before.
        self._store.delete_key(f"{number - 1}/{self.rank}")


class Watches:
    """What watches one model's collectives; `close` ends it."""

    def __init__(self, watching: Sequence[Watchdog | CollectiveCheck]) -> None:
        self.watching = watching

    def close(self) -> None:
        """Stop watching; a second call does nothing."""
        for each in self.watching:
            each.close()


def watch_groups(
    groups: Sequence[dist.ProcessGroup],
    runtime: DeviceRuntime,
    timeout_s: float | None,
    check: bool,
    where: Callable[[], str],
) -> Watches:
    """Watch what is asked for; see `Watchdog` and `CollectiveCheck`. The first group has all ranks of the model.

    Raises:
        ValueError: the limit is not positive.
    """
    watching: list[Watchdog | CollectiveCheck] = []
    if timeout_s is not None:
        watching.append(Watchdog(groups, runtime, timeout_s, where))
    if check:
        watching.append(CollectiveCheck(groups[0], timeout_s))
    return Watches(watching)


def store_of(group: dist.ProcessGroup, timeout_s: float) -> Any:
    """A store of all ranks of a group, with a connection of its own and keys that nobody else uses."""
    index = next(_WATCHDOGS.setdefault(group.group_name, count()))
    # A clone does not wait for what another thread asks of the store; torch's annotations leave it out.
    store: Any = dist.distributed_c10d._get_process_group_store(group)
    store = store.clone()
    store.set_timeout(timedelta(seconds=timeout_s))
    return dist.distributed_c10d.PrefixStore(f"fsdp-watchdog/{index}", store)


def _is_of_backend(error: Exception) -> bool:
    """Whether an error says that a collective failed, rather than that something is wrong with the program."""
    if isinstance(error, dist.DistError):
        return True
    words = ("gloo", "NCCL", "pair closure", "Connection", "cannot be read any more", "imed out")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def _contents(data: Sequence[Any]) -> str:
    """Lengths and dtypes of tensors, or of parts of them."""
    tensors = [getattr(each, "tensor", each) for each in data]
    kinds = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    lengths = "+".join(str(tensor.numel()) for tensor in tensors)
    return f"{lengths or 'unknown'} elements {', '.join(kinds)}".rstrip()


def _text(label: Label) -> str:
    return f"{label.kind} {label.bucket}"


def _place(rank: int) -> str:
    return f"position/{rank}"
