"""Names for collectives in flight, so that a meter outside the engine can say which bucket its bytes belong to.

The engine announces each logical collective (a reduce-scatter may be many sends underneath); whoever counts reads the
label of the calling thread. It also announces where the host stands still for a collective: exposed communication, or
a hang for whoever watches. Nothing here counts, and no collective depends on a label.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

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


def marked(what: str, of: str) -> Any:
    """Begin a span in torch's profiler, named as FSDP2's are: `FSDP::all_gather (blocks.0/float32)`."""
    return record_function(f"FSDP::{what} ({of})" if of else f"FSDP::{what}").__enter__()


class _OfThread(threading.local):
    label: Label | None = None


_local = _OfThread()
_observers: list[Observer] = []


def current() -> Label | None:
    return _local.label


class begin:  # used as a function, as what follows: a class is entered in a third of a generator's time
    """Announce a logical collective and label the operations it issues here.

    data: tensors, or parts of them, of the same lengths and dtypes on all ranks; only watchdogs look at them.
    """

    __slots__ = ("_before", "_data", "_label", "_mark")
    announces = True

    def __init__(self, label: Label, data: Sequence[Any] = ()) -> None:
        self._label, self._data = label, data

    def __enter__(self) -> None:
        for observer in _observers if self.announces else ():
            observer.begin(self._label, self._data)
        self._before, _local.label = _local.label, self._label
        self._mark = marked(*self._label) if is_profiled() else None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _local.label = self._before
        if self._mark is not None:
            self._mark.__exit__(kind, error, trace)
        _raise_explained(error)


class resume(begin):
    """Label further operations of a collective announced before (another thread, a second leg)."""

    __slots__ = ()
    announces = False


def offer(num_bytes: int) -> None:
    """Announce bytes of the current collective that a peer fetches from here: sent, though by no operation of torch."""
    for observer in _observers:
        observer.sent(*(_local.label or ("send", "")), num_bytes)


def explained(error: Exception) -> Exception:
    """Error of a collective as observers explain it, or itself."""
    for observer in _observers:
        error = observer.explain(error)
    return error


def _raise_explained(error: BaseException | None) -> None:
    if isinstance(error, Exception) and (clearer := explained(error)) is not error:
        raise clearer from error


class waiting:
    """The body blocks the host until collectives are done: these, or the one that this thread is issuing.

    group: ranks of an exchange of the program's own, which is not counted as exposed communication. If it lasts too
    long, every rank raises CollectiveError, as for a collective of the engine.
    """

    __slots__ = ("_group", "_mark", "_tokens", "_waited")

    def __init__(self, *waited: Label | str, group: dist.ProcessGroup | None = None) -> None:
        self._waited, self._group = waited, group

    def __enter__(self) -> None:
        waited = self._waited or ((_local.label,) if _local.label is not None else ())
        self._tokens = [(observer, observer.enter(waited, self._group)) for observer in _observers]
        self._mark = marked("wait", ", ".join(map(str, waited))) if waited and is_profiled() else None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._mark is not None:
            self._mark.__exit__(kind, error, trace)
        try:
            _raise_explained(error)
        finally:
            for observer, token in self._tokens:
                observer.leave(token)


class Observer:
    """Base class of meters: told of each collective and each wait that an engine of this process announces.

    Our own engine announces all of them. An adapter of another engine uses the context managers `announce` and
    `waiting`. Methods are called on the thread that communicates, which may be one of autograd's.
    """

    waiting = waiting
    current = staticmethod(current)

    def __init_subclass__(cls) -> None:
        if hasattr(cls, "collective"):  # of the version before: it would never be called
            raise TypeError(f"{cls.__name__}.collective(kind, bucket) is now begin((kind, bucket), data)")

    @staticmethod
    def announce(kind: str, bucket: str) -> begin:
        """Context of one collective, however many operations it is built of; their bytes belong to this bucket."""
        return begin(Label(kind, bucket))

    def attach(self) -> None:
        _observers.append(self)

    def detach(self) -> None:
        """Observe no longer; a second call does nothing."""
        if self in _observers:
            _observers.remove(self)

    def sent(self, kind: str, bucket: str, num_bytes: int) -> None:
        """Called when other ranks read bytes of this process's memory, which no operation of torch sends.

        kind: "send", with the bucket "", outside any collective.
        """

    def waited(self, seconds: float) -> None:
        """Called when the host has stood still for a collective."""

    # -- these two may raise where a collective will not come about ----------------------------------------------------

    def begin(self, label: Label, data: Sequence[Any]) -> None:
        """Called when a collective begins; operations that this thread issues until it ends belong to it."""

    def enter(self, labels: Sequence[Label | str], group: dist.ProcessGroup | None) -> Any:
        """A wait begins; returns what `leave` is given when it ends."""
        return time.perf_counter() if group is None else None

    def leave(self, token: Any) -> None:
        if token is not None:
            self.waited(time.perf_counter() - token)

    def explain(self, error: Exception) -> Exception:
        return error
