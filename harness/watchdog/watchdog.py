"""Turning a hang, or ranks that issue different collectives, into one error on every rank.

One thread looks at this rank's waits a few times a second and asks no store. If a wait is over the limit, or the
backend has failed one, it calls a roll of all ranks (`harness.watchdog.store`); and once a wait after SUSPECT_S, when
ranks may wait for each other, [Note: Mutual waits]. A second thread answers it, also while the program computes. One
rank makes one message of all positions, and each rank reads it before the groups are aborted. Then waits fail, here and
through closed connections on other ranks; `explain` replaces their error by CollectiveError with that message. A rank
that waits for nothing raises it at its next collective.

The store lives in some process, which may be the one that has stopped. So a third thread asks. If it comes to nothing
within PATIENCE_S, the rank raises what it knows alone.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.private_torch import backends_of, timeout_of
from harness.watchdog.store import CollectiveCheck, RollCalls, stores_of
from harness.watchdog.waits import CollectiveError, FlightRecorder, Position, Waits, all_stuck, describe_hang

LOG = logging.getLogger(__name__)
TICK_S = 0.5
"""Seconds between two looks at this rank's waits, at most; a quarter of the limit where that is less."""
PATIENCE_S = 10.0
"""Seconds that ranks may take to agree: more than a roll and the one before it do."""
SUSPECT_S = 5.0
EXIT_S = 5.0
"""Seconds that the program's end waits for a thread: one that leaves a call of torch later aborts the interpreter."""
BACKEND = ("gloo", "NCCL", "pair closure", "Connection", "different collectives", "imed out", "Wait timeout")
"""Words of errors that say a collective failed, rather than the program is wrong."""


def default_timeout_s(groups: Sequence[dist.ProcessGroup], *devices: torch.device) -> float:
    """The shortest timeout of the groups' backends, less 30 seconds to agree on a message, a tenth of it at most: torch
    would end a wait no later."""
    given = timeout_of(*(each for group in groups for each in backends_of(group, *devices))).total_seconds()
    return given - min(30.0, given / 10)


def abort_group(group: dist.ProcessGroup) -> None:
    """Make all waits of this process in a group fail; the group is of no use afterwards.

    gloo's own abort ends no wait, but a receive that times out closes the connections under all of them.
    """
    for backend in backends_of(group):
        with suppress(RuntimeError):  # closed already
            if backend.name() != "gloo":
                backend.abort()
            elif group.size() > 1:
                nothing, peer = torch.empty(1, dtype=torch.uint8), (group.rank() + 1) % group.size()
                group.recv([nothing], peer, (1 << 31) - 3).wait(timedelta(milliseconds=1))  # a tag that nobody sends


def _main_thread_place() -> tuple[str, str]:
    """Line outside torch of the main thread, and the function of torch.distributed that it called, if any."""
    frame, called = sys._current_frames().get(threading.main_thread().ident or 0), ""
    while frame is not None and frame.f_code.co_filename.startswith(str(Path(torch.__file__).parent)):
        called = frame.f_code.co_name if frame.f_code.co_filename == dist.distributed_c10d.__file__ else called
        frame = frame.f_back
    if frame is None:
        return "", called
    return f"in {frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})", called


def _is_registered(group: dist.ProcessGroup) -> bool:
    with suppress(ValueError, RuntimeError):
        return bool(dist.get_backend(group))
    return False


class Watchdog:
    """Watches the collectives of this process in some groups, from its construction to `close` or the end of `with`.

    Args:
        groups: the first has all ranks, and its store is used. None: the default group.
        timeout_s: seconds a wait may last; None: `default_timeout_s`.
        where: place in the program, for the message; called from another thread.
        abort: makes the waits in a group fail.
        mark: leaves an event on the current stream, with `is_reached`; None where the host waits.
        records: watch what c10d's flight recorder has; False: only announced collectives and waits.
        check: compare each announced collective over all ranks before its data moves.

    Raises:
        ValueError: the limit is not positive.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup] | None = None,
        timeout_s: float | None = None,
        *,
        where: Callable[[], str] = lambda: _main_thread_place()[0],
        abort: Callable[[dist.ProcessGroup], None] = abort_group,
        mark: Callable[[], Any] | None = None,
        records: bool = True,
        check: bool = False,
    ) -> None:
        self.groups: Any = [dist.group.WORLD] if groups is None else list(groups)
        self.timeout_s = default_timeout_s(self.groups) if timeout_s is None else timeout_s
        if not self.timeout_s > 0:
            raise ValueError(f"watchdog_timeout_s={timeout_s} must be above 0 seconds, or None")
        self.tick_s = min(TICK_S, self.timeout_s / 4)
        self.ranks, self.rank = dist.get_process_group_ranks(self.groups[0]), dist.get_rank()
        self._was_registered = _is_registered(self.groups[0])
        self._where, self._abort = where, abort
        everywhere = all(dist.get_process_group_ranks(group) == self.ranks for group in self.groups)
        self._suspects = not records and everywhere and self.timeout_s > 2 * SUSPECT_S
        self._failure: str | None = None
        self.message: str | None = None  # once the alarm is over: no wait in the groups will complete
        self._silence = (
            f"the store of the process group does not answer within {PATIENCE_S:g} s: who keeps it has stopped"
        )
        self._is_closed = self._is_answering = False
        self._judged_at = 0.0  # when ranks were asked last
        self._wake, self._concluded = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._check: CollectiveCheck | None = None
        self.waits = Waits(mark, FlightRecorder(self.groups) if records else None)
        if len(self.ranks) == 1:
            return
        ear, voice, *others = stores_of(self.groups[0], clones=2 + check)
        self._rolls = RollCalls(ear, voice, self.ranks, self.rank, self.tick_s)
        self._check = CollectiveCheck(others[0], self.ranks, self.rank) if check else None
        Waits.live.add(self.waits)
        self._threads = [_thread(self._watch, "watchdog"), _thread(self._listen, "watchdog-store")]
        atexit.register(self.close)

    def close(self) -> None:
        """Stop watching; a second call does nothing."""
        self._is_closed = True
        self._wake.set()
        atexit.unregister(self.close)
        Waits.live.discard(self.waits)

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._raise_explained(error)
        finally:
            self.close()

    # -- called by the program's threads -----------------------------------------------------------------------------

    def begin(self, label: Hashable, data: Sequence[Any] = ()) -> None:
        """Announce a collective. data: its tensors, which only `check` looks at."""
        self.check()
        if self._check is not None:
            with self.waiting(f"a comparison of {label}"):
                self._check.compare(label, data, self.timeout_s)
        self.waits.begin(label)

    def enter(self, labels: tuple[Hashable, ...], group: dist.ProcessGroup | None = None) -> int:
        """Begin a wait; returns a token for `leave`, which ends it. group: see `waiting`."""
        self.check()
        return self.waits.enter(labels, group)

    def leave(self, token: int) -> None:
        self.waits.leave(token)

    @contextmanager
    def waiting(self, *labels: Hashable, group: dist.ProcessGroup | None = None) -> Iterator[None]:
        """The body waits for these collectives. group: aborted too, if it is none of the watchdog's."""
        token = self.enter(labels, group)
        try:
            yield
        except Exception as error:
            self._raise_explained(error)
            raise
        finally:
            self.leave(token)

    def check(self) -> None:
        """Raise CollectiveError where the alarm is over, unless the program has destroyed the groups since."""
        is_destroyed = self._was_registered and not _is_registered(self.groups[0])
        if self.message is not None and not is_destroyed:
            raise CollectiveError(self.message)

    def explain(self, error: Exception) -> Exception:
        """CollectiveError for an error of the backend, which raises the alarm; other errors as they are."""
        of_backend = isinstance(error, RuntimeError) and any(word in str(error) for word in BACKEND)
        if isinstance(error, CollectiveError) or not (of_backend or isinstance(error, dist.DistError)):
            return error
        self._failure = self._failure or str(error).strip().splitlines()[0].split(". This is")[0]
        self._wake.set()
        if not self._concluded.wait(2 * self.tick_s + PATIENCE_S + 3.0) or self.message is None:
            return error
        return CollectiveError(self.message)

    def _raise_explained(self, error: BaseException | None) -> None:
        if isinstance(error, Exception) and self._threads and (clearer := self.explain(error)) is not error:
            raise clearer from error

    # -- threads of the watchdog -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        asking, alone_at = threading.Thread(), float("inf")
        while not self._is_closed and self.message is None:
            is_late = self._failure is not None or bool(self.waits.late(self.timeout_s))
            alone_at = min(alone_at, time.monotonic() + PATIENCE_S) if is_late else float("inf")
            if time.monotonic() >= alone_at:
                known = describe_hang({self.rank: self.position()}, [self.rank], self.timeout_s)
                self._conclude(f"{known}; other ranks could not be asked: {self._silence}")
            elif (is_late or self._may_be_stuck()) and not self._is_answering and not asking.is_alive():
                asking = _thread(self._ask, "watchdog-asks")
            self._wake.wait(self.tick_s)
            self._wake.clear()
        if asking.ident is not None:
            asking.join(EXIT_S)
        with suppress(Exception):  # the store is gone
            self._rolls.close()

    def _listen(self) -> None:
        with suppress(Exception):  # the store is gone: the run is over, or a wait will fail and say why
            while not self._is_closed and self._rolls.wait():
                self._is_answering, self._judged_at = True, time.monotonic()
                if message := self._rolls.answer(self.position()):
                    return self._conclude(message)
                self._is_answering = False

    def _ask(self) -> None:
        if self._failure is not None:
            self._concluded.wait(self.tick_s)  # other ranks see errors of their own
        try:
            self._rolls.ask(self._verdict)
        except Exception as error:
            self._silence = str(error).splitlines()[0]

    def _may_be_stuck(self) -> bool:
        # Later than a wait counts, so that ranks which began about now need not ask again.
        judged, limit = self._judged_at - SUSPECT_S, time.monotonic() - 1.2 * SUSPECT_S
        return self._suspects and any(wait.is_main and judged <= wait.since < limit for wait in self.waits.all())

    def position(self) -> Position:
        *_, wait = [None, *(self.waits.late(self.timeout_s) or self.waits.all())]
        line, called = _main_thread_place()
        is_elsewhere = wait is None and called  # in a collective of the program's own, which nobody announced
        return Position(
            where=f"in torch's {called}, {line}" if is_elsewhere else self._where(),
            waits=None if wait is None else self.waits.name_of(wait),
            seconds=0.0 if wait is None else time.monotonic() - wait.since,
            history=self.waits.history(),
            failure=self._failure,
            is_blocked=self._suspects and self.waits.are_blocked(SUSPECT_S),
        )

    def _verdict(self, positions: dict[int, Position]) -> str:
        """The message that all ranks raise; "" if they go on."""
        is_deadlock = len(positions) == len(self.ranks) and all_stuck(positions)
        if is_deadlock or any(each.failure or each.seconds > self.timeout_s for each in positions.values()):
            return describe_hang(positions, self.ranks, self.timeout_s, is_deadlock=is_deadlock)
        return ""

    def _conclude(self, message: str) -> None:
        with self._lock:
            if self._is_closed or self.message is not None:
                return
            self.message = message
        if not any(wait.is_main for wait in self.waits.all()):
            LOG.error(message)  # a collective of the program's own will fail in torch's words
        for group in (*self.groups, *(wait.group for wait in self.waits.all() if wait.group is not None)):
            self._abort(group)
        self._concluded.set()
        self._wake.set()


def _thread(target: Callable[[], None], name: str) -> threading.Thread:
    """A started thread that the program's end waits for, also after `close`."""

    def run() -> None:
        try:
            target()
        finally:
            atexit.unregister(thread.join)

    thread = threading.Thread(target=run, name=name, daemon=True)
    atexit.register(thread.join, EXIT_S)
    thread.start()
    return thread
