"""Names for collectives in flight, so that a meter outside the engine can say which bucket its bytes belong to.

The engine announces each logical collective (a reduce-scatter may be many sends underneath); whoever counts reads the
label of the calling thread. In the same way it announces where the thread that computes stands still for a collective:
on a CPU that time is exposed communication, and what lasts too long is a hang for whoever watches
(`Watcher`). Nothing here counts, and no collective depends on a label.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch.profiler import record_function

from harness.private_torch import is_profiled


class Label(NamedTuple):
    """kind: all_gather, reduce_scatter, all_reduce, broadcast.

    bucket: unit and dtype, or the purpose of one outside buckets (norm).
    """

    kind: str
    bucket: str

    def __str__(self) -> str:
        """`all_gather blocks.0/float32`."""
        return f"{self.kind} {self.bucket}"

    @property
    def is_traffic(self) -> bool:
        """False for messages about where data lies: the data itself is announced by `offer`."""
        return self is not CONTROL


OUTER = " outer"
"""Suffix of a label on the outer axis."""

CONTROL = Label("control", "")
"""Label of messages about where data lies."""


class Watcher(Protocol):
    """Observer of collectives before they begin, and of waits before they are over. It may raise in `begin` and
    `enter` where a collective will not come about."""

    def begin(self, label: Label, data: Sequence[Any] = ()) -> None:
        """Called before each logical collective. data: see `begin`."""

    def enter(self, labels: tuple[Label, ...], group: dist.ProcessGroup | None = None) -> int:
        """A wait for these collectives begins on this thread; returns a token for `leave`.

        group: waited for by the host alone, where it is no group of the engine's.
        """

    def leave(self, token: int) -> None:
        """Called when the wait is over, also by an exception."""

    def explain(self, error: Exception) -> Exception:
        """The error to raise for one that ended a wait: itself, or one that names ranks."""


def marked(what: str, of: str) -> record_function:
    """Span in torch's profiler, named as FSDP2's are: `FSDP::all_gather (blocks.0/float32)`."""
    return record_function(f"FSDP::{what} ({of})" if of else f"FSDP::{what}")


_local = threading.local()
_observers: list[Observer] = []
_watchers: list[Watcher] = []


def current() -> Label | None:
    """Label of the collective this thread is issuing, if any."""
    return getattr(_local, "label", None)


class resume:  # used as a function, as what follows: a class is entered in a third of a generator's time
    """Label further operations of a collective announced before (another thread, a second leg)."""

    __slots__ = ("_before", "_label", "_mark")

    def __init__(self, label: Label) -> None:
        self._label = label

    def __enter__(self) -> None:
        self._before = current()
        _local.label = self._label
        self._mark = marked(*self._label) if is_profiled() else None
        if self._mark is not None:
            self._mark.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _local.label = self._before
        if self._mark is not None:
            self._mark.__exit__(kind, error, trace)


class begin(resume):
    """Announce a logical collective and label the operations it issues here.

    data: tensors, or parts of them, of the same lengths and dtypes on all ranks; only watchers look at them.
    """

    __slots__ = ("_data",)

    def __init__(self, label: Label, data: Sequence[Any] = ()) -> None:
        super().__init__(label)
        self._data = data

    def __enter__(self) -> None:
        for watcher in _watchers:
            watcher.begin(self._label, self._data)
        for observer in _observers:
            observer.collective(*self._label)
        super().__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        super().__exit__(kind, error, trace)
        _raise_explained(error)


def offer(num_bytes: int) -> None:
    """Announce bytes of the current collective that a peer fetches from here: sent, though by no operation of torch."""
    for observer in _observers:
        observer.sent(*(current() or ("send", "")), num_bytes)


def watch(watcher: Watcher) -> Callable[[], None]:
    """Let `watcher` observe collectives and waits; returns a function that ends it, also if called again."""
    _watchers.append(watcher)

    def end() -> None:
        if watcher in _watchers:
            _watchers.remove(watcher)

    return end


def explained(error: Exception) -> Exception:
    """Error of a collective as watchers explain it, or itself."""
    for watcher in _watchers:
        error = watcher.explain(error)
    return error


def _raise_explained(error: BaseException | None) -> None:
    """Raise what watchers make of an error of a collective, where they know more than it says."""
    told = explained(error) if isinstance(error, Exception) else error
    if told is not None and told is not error:
        raise told from error


class waiting:
    """The body blocks the host until collectives are done: these, or the one that this thread is issuing."""

    __slots__ = ("_began", "_mark", "_waited", "_watching")

    def __init__(self, *waited: Label) -> None:
        self._waited = waited
        self._watching: _watched | None = None
        self._mark: record_function | None = None

    def __enter__(self) -> None:
        if not (_observers or _watchers or is_profiled()):
            return
        label = current()
        self._began = time.perf_counter()
        waited = self._waited or ((label,) if label is not None else ())
        self._watching = _watched(waited, None)
        self._watching.__enter__()
        if waited and is_profiled():
            self._mark = marked("wait", ", ".join(map(str, waited)))
            self._mark.__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self._mark is not None:
            self._mark.__exit__(*raised)
        if self._watching is None:
            return
        try:
            self._watching.__exit__(*raised)
        finally:
            seconds = time.perf_counter() - self._began
            for observer in _observers:
                observer.waited(seconds)


@contextmanager
def watched(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Let the engine's watcher observe a wait of your own program, which is the body of the `with` statement.

    If the wait lasts too long, every rank raises, as for a collective of the engine. The wait is not counted as exposed
    communication of the engine.

    Args:
        what: name of the exchange, for the error.
        group: ranks that take part in it.

    Raises:
        CollectiveError: the exchange, or a collective of the engine, did not complete in time.
    """
    with _watched((Label("exchange of", what),), group):
        yield


class _watched:
    """Watchers know of the wait that is the body."""

    __slots__ = ("_group", "_tokens", "_waited")

    def __init__(self, waited: tuple[Label, ...], group: dist.ProcessGroup | None) -> None:
        self._waited = waited
        self._group = group

    def __enter__(self) -> None:
        self._tokens = [(watcher, watcher.enter(self._waited, self._group)) for watcher in _watchers]

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            _raise_explained(error)
        finally:
            for watcher, token in self._tokens:
                watcher.leave(token)


class Observer:
    """Base class of meters: told of each collective and each wait that an engine of this process announces.

    Our own engine announces all of them. An adapter of another engine uses the context managers `announce` and
    `waiting`. Methods are called on the thread that communicates, which may be one of autograd's.
    """

    waiting = waiting
    watched = staticmethod(watched)
    current = staticmethod(current)

    @staticmethod
    def announce(kind: str, bucket: str) -> begin:
        """Context of one collective, however many operations it is built of; their bytes belong to this bucket."""
        return begin(Label(kind, bucket))

    def attach(self) -> None:
        """Begin to observe."""
        _observers.append(self)

    def detach(self) -> None:
        """Observe no longer; a second call does nothing."""
        if self in _observers:
            _observers.remove(self)

    def collective(self, kind: str, bucket: str) -> None:
        """Called when a collective begins; operations that this thread issues until it ends belong to it."""

    def sent(self, kind: str, bucket: str, num_bytes: int) -> None:
        """Called when other ranks read bytes of this process's memory, which no operation of torch sends.

        kind: "send", with the bucket "", outside any collective.
        """

    def waited(self, seconds: float) -> None:
        """Called when the host has stood still for a collective."""
