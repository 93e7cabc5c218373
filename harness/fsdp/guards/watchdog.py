"""Turning a hang, or ranks that issue different collectives, into one error on every rank.

[Note: How a hang is told] Every rank numbers the collectives it announces through `harness.fsdp.comm.events` and notes
what it waits for. A thread looks a few times a second; when a wait has lasted longer than the limit, or the backend has
failed one, it raises an alarm in the process group's store (`harness.fsdp.guards.alarm`). Every rank hears the alarm,
also where the program still computes, and answers with its position. One rank makes one message of all positions, each
rank reads it, and only then are the groups aborted: waits on this rank and, through closed connections, on others fail,
and what they raise is replaced by `CollectiveError` with that message. A rank that waits for nothing raises it at its
next collective. Ranks that wait for each other are found sooner (`harness.fsdp.guards.deadlock`).

[Note: A store that is silent] The store lives in some process, often rank 0, which may be the one that has stopped. So
the thread that looks at this rank's waits never asks the store itself: another one listens, a third one asks and is
given a limit, after which the rank tells what it knows alone.

[Note: Waits on a device] On CUDA a wait blocks a stream and not the host, so what `labels.waiting` announces is over at
once. There an event is left behind it, and the wait lasts as long as the stream has not come to it. A host runs ahead
of its device: so a wait lasts no longer than since the stream was seen to have passed the one before it.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

import torch.distributed as dist

from harness.fsdp.comm import events
from harness.fsdp.comm.device import DeviceRuntime, Event
from harness.fsdp.comm.events import Label
from harness.fsdp.guards import deadlock, long_wait
from harness.fsdp.guards.alarm import PATIENCE_S, TICK_S, Alarm
from harness.fsdp.guards.deadlock import Stand, Stands
from harness.fsdp.guards.hang_report import CollectiveError, Position, tell, tell_long_wait, text_of
from harness.fsdp.guards.long_wait import LongWaits

LOG = logging.getLogger(__name__)
HISTORY = 256
"""Collectives remembered, to find the first one in which ranks differ."""
_MAIN = threading.main_thread().ident
EXIT_S = 1.0
"""Seconds that the program's end waits for a thread; one that came back later would abort the interpreter."""


@dataclass
class _Wait:
    """One wait of one thread; `reached` tells of a wait on a device whether it is over.

    group: of an exchange of the program's own, which is aborted too. is_main: whether the program's main thread waits.
    is_told: whether this rank's position was told while it lasted.
    """

    labels: tuple[Label, ...]
    since: float
    group: dist.ProcessGroup | None = None
    reached: Event | None = None
    is_main: bool = False
    is_told: bool = False


@dataclass
class _Log:
    """The collectives this process has begun."""

    number: int = 0
    recent: deque[tuple[int, Label]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    last: dict[Label, int] = field(default_factory=dict)
    counts: dict[Label, int] = field(default_factory=dict)
    is_of_one_model: bool = True
    """Whether no other model was watched when any of them began: names of models may be alike."""

    def add(self, label: Label) -> None:
        self.number += 1
        self.is_of_one_model &= events.num_watchers() == 1
        self.counts[label] = self.counts.get(label, 0) + 1
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
        self._is_deadlock = False
        self._message: str | None = None
        self._closed = False
        self._wake = threading.Event()
        self._heard = threading.Event()
        self._told = threading.Event()
        self._looking = threading.Lock()
        self._ends: list[Callable[[], None]] = []
        self._threads: list[threading.Thread] = []
        if len(self.ranks) > 1:
            self._alarm = Alarm(groups[0], timeout_s, self.tick_s)
            self._stands = Stands(self._alarm.ear, self.ranks, self.rank) if self._can_suspect() else None
            self._long_waits = LongWaits(self._alarm.ear, self.ranks, self.rank)
            self._ends = [events.on_begin(self._begun), events.watch(self)]
            self._threads = [_start(self._watch, "fsdp-watchdog"), _start(self._listen, "fsdp-watchdog-store")]
            atexit.register(self._leave)

    def close(self) -> None:
        """Stop watching; a second call does nothing."""
        self._closed = True
        self._wake.set()
        atexit.unregister(self._leave)
        while self._ends:
            self._ends.pop()()

    @property
    def is_over(self) -> bool:
        """Whether the alarm is over: what was waited for will not come about."""
        return self._message is not None

    def _leave(self) -> None:
        self.close()
        for thread in self._threads:
            thread.join(EXIT_S)

    # -- what the program's threads tell ---------------------------------------------------------------------------

    def _begun(self, label: Label) -> None:
        self.check()
        self._log.add(label)

    def enter(self, waited: tuple[Label, ...], group: dist.ProcessGroup | None = None) -> int:
        """A wait begins; `group` is that of an exchange of the program's own.

        Raises:
            CollectiveError: the alarm is over, and the groups are of no use.
        """
        self.check()
        token = next(self._tokens)
        is_main = threading.get_ident() == _MAIN
        self._waits[token] = _Wait(waited, time.monotonic(), group, is_main=is_main)
        return token

    def leave(self, token: int) -> None:
        """Note that a collective is over for the host; on a device it may just begin."""
        wait = self._waits.pop(token)
        if self._runtime.has_streams and wait.group is None:
            wait.reached = self._runtime.record()
            self._on_device.append(wait)

    def explain(self, error: Exception) -> Exception:
        """The alarm's message for an error of the backend; raises the alarm if nobody has."""
        if isinstance(error, CollectiveError) or not _is_of_backend(error):
            return error
        if self._failure is None:
            self._failure = str(error).strip().splitlines()[0].split(". This is")[0]
        self._wake.set()
        if not self._told.wait(2 * self.tick_s + PATIENCE_S + 3.0) or self._message is None:
            return error
        return CollectiveError(self._message)

    def check(self) -> None:
        """Raise CollectiveError where the alarm is over: what is waited for will not come about."""
        if self._message is not None:
            raise CollectiveError(self._message)

    # -- the threads -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closed and not self._is_alarmed():
            self._wake.wait(self.tick_s)
        if not self._closed:
            self._conclude()

    def _is_alarmed(self) -> bool:
        return self._failure is not None or self._heard.is_set() or self._overdue() is not None

    def _listen(self) -> None:
        while not self._wake.wait(self.tick_s):
            with suppress(Exception):  # the store is gone: the run is over, or a wait will fail and say why
                is_called = self._alarm.is_called()
                if (is_called and self._alarm.is_raised()) or self._finds_deadlock():
                    self._heard.set()
                    self._wake.set()
                self._tell_long_wait(is_called)

    def _tell_long_wait(self, is_called: bool) -> None:
        """See [Note: A long wait]."""
        limit = time.monotonic() - long_wait.NOTICE_S
        waits = self._all_waits()
        is_long = any(wait.since < limit and not wait.is_told for wait in waits)
        if (is_long or is_called) and self._long_waits.look(self.position, asks=is_long):
            for wait in waits:
                wait.is_told = True
        if positions := self._long_waits.answers():
            LOG.warning(tell_long_wait(positions, self.ranks, self.timeout_s))

    def _can_suspect(self) -> bool:
        """See [Note: Mutual waits]."""
        everywhere = all(dist.get_process_group_ranks(group) == self.ranks for group in self._groups)
        return everywhere and self.timeout_s > 2 * deadlock.SUSPECT_S

    def _finds_deadlock(self) -> bool:
        if self._stands is None:
            return False
        self._stands.tell(self._stand())
        self._is_deadlock = self._stands.is_deadlock()
        return self._is_deadlock

    def _stand(self) -> Stand | None:
        """Where this rank stands, if its main thread has waited for long enough to be asked."""
        waits, limit = dict(self._waits), time.monotonic() - deadlock.SUSPECT_S
        if not any(wait.is_main and wait.since < limit for wait in waits.values()) or not self._log.is_of_one_model:
            return None
        begun = {text_of(label): count for label, count in list(self._log.counts.items())}
        if dict(self._waits).keys() != waits.keys():  # it has gone on between the two looks
            return None
        return Stand([list(map(text_of, wait.labels)) for wait in waits.values()], begun)

    def _overdue(self) -> _Wait | None:
        """The innermost wait that has lasted too long."""
        limit = time.monotonic() - self.timeout_s
        late = [wait for wait in self._all_waits() if wait.since < limit]
        return late[-1] if late else None

    def _all_waits(self) -> list[_Wait]:
        """Waits that are not over, the oldest first."""
        with self._looking:
            while self._on_device and self._on_device[0].reached is not None and self._on_device[0].reached.is_reached:
                self._on_device.popleft()
                if self._on_device:
                    self._on_device[0].since = time.monotonic()
        return [*list(self._on_device)[:1], *list(self._waits.values())]

    def position(self) -> Position:
        """Where this rank is now."""
        waits = self._all_waits()
        wait = self._overdue() or (waits[-1] if waits else None)
        log = self._log
        history = [(number, text_of(label)) for number, label in list(log.recent)]
        return Position(
            where=self._where(),
            waits=None if wait is None else (" and ".join(map(text_of, wait.labels)) or "a collective begun before"),
            number=None if wait is None else min((log.last.get(label, 0) for label in wait.labels), default=0),
            seconds=0.0 if wait is None else time.monotonic() - wait.since,
            history=history,
            failure=self._failure,
            is_deadlock=self._is_deadlock,
        )

    def _conclude(self) -> None:
        self._message = self._asked(self.position())
        for group in (*self._groups, *(wait.group for wait in list(self._waits.values()) if wait.group is not None)):
            self._runtime.abort(group)
        self._told.set()

    def _asked(self, position: Position) -> str:
        """The message all ranks agree on; what this one knows alone where they could not be asked."""
        answer: list[str] = []
        reason = [f"the store of the process group does not answer within {PATIENCE_S:g} s: who keeps it has stopped"]

        def ask() -> None:
            try:
                answer.append(self._alarm.agree(position))
            except Exception as error:
                reason.append(str(error).splitlines()[0])

        _start(ask, "fsdp-watchdog-asks").join(PATIENCE_S)
        if answer:
            return answer[0]
        return (
            f"{tell({self.rank: position}, [self.rank], self.timeout_s)}; other ranks could not be asked: {reason[-1]}"
        )


def _start(target: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


def _is_of_backend(error: Exception) -> bool:
    """Whether an error says that a collective failed, rather than that something is wrong with the program."""
    if isinstance(error, dist.DistError):
        return True
    words = ("gloo", "NCCL", "pair closure", "Connection", "cannot be read any more", "imed out")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
