"""Names for collectives in flight, so that a meter outside the engine can say which bucket its bytes belong to.

The engine announces each logical collective (a reduce-scatter may be many sends underneath); whoever counts reads the
label of the calling thread. In the same way it announces where the thread that computes stands still for a collective:
on a CPU that time is exposed communication. Nothing here counts, and nothing in the engine reads a label.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Label(NamedTuple):
    """kind: all_gather, reduce_scatter, all_reduce, broadcast.

    bucket: unit and dtype, or the purpose of one outside buckets (norm).
    """

    kind: str
    bucket: str


OUTER = " outer"
"""What a label adds to a bucket's name on the outer axis."""

CONTROL = Label("control", "")
"""Of messages about where data lies: nobody counts them, for the data itself is announced by `offer`."""

_local = threading.local()
_listeners: list[Callable[[Label], None]] = []
_offer_listeners: list[Callable[[Label | None, int], None]] = []
_wait_listeners: list[Callable[[float], None]] = []


def current() -> Label | None:
    """Label of the collective this thread is issuing, if any."""
    return getattr(_local, "label", None)


def on_begin(listener: Callable[[Label], None]) -> Callable[[], None]:
    """Call `listener` once for each logical collective; returns a function that ends it."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


@contextmanager
def begin(label: Label) -> Iterator[None]:
    """Announce a logical collective and label the operations it issues here."""
    for listener in _listeners:
        listener(label)
    with resume(label):
        yield


@contextmanager
def resume(label: Label) -> Iterator[None]:
    """Label further operations of a collective announced before (another thread, a second leg)."""
    before = current()
    _local.label = label
    try:
        yield
    finally:
        _local.label = before


def on_offer(listener: Callable[[Label | None, int], None]) -> Callable[[], None]:
    """Call `listener` with label and bytes of all that peers read from this process; returns a function to end it."""
    _offer_listeners.append(listener)
    return lambda: _offer_listeners.remove(listener)


def offer(num_bytes: int) -> None:
    """Announce bytes of the current collective that a peer fetches from here: sent, though by no operation of torch."""
    for listener in _offer_listeners:
        listener(current(), num_bytes)


def on_wait(listener: Callable[[float], None]) -> Callable[[], None]:
    """Call `listener` with the seconds of every wait for a collective; returns a function that ends it."""
    _wait_listeners.append(listener)
    return lambda: _wait_listeners.remove(listener)


@contextmanager
def waiting() -> Iterator[None]:
    """The body blocks the host until a collective is done."""
    if not _wait_listeners:
        yield
        return
    began = time.perf_counter()
    try:
        yield
    finally:
        for listener in _wait_listeners:
            listener(time.perf_counter() - began)
