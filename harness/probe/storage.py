"""Bytes of tensor storage on the CPU at every step, as torch's own allocator reports them, outside every engine.

The resident set says little about an engine: heaps keep what was freed, and libraries come along. Torch's CPU
allocator reports each block it hands out or takes back to the profiler, whoever asked for it: the model, an optimizer,
DDP's reducer in C++. The meter keeps the profiler on, for these reports alone, from before the engine is built to the
end of the warm-up, and adds them up. Timed steps run without it.

[Note: Threads] The profiler is a matter of a thread: torch hands it on to autograd's and gloo's threads, not to
Python's own. A thread that starts while the meter runs is joined to it by torch's C++ interface for that (exported,
without a Python name); torch warns about it in the log.

[Note: Frees elsewhere] A tensor may be let go by a thread that tells nobody, such as gloo's after a collective. Torch
keeps the running total for every thread while its flag `caffe2_report_cpu_memory_usage` is set, so the total that comes
with each report is used, not the sum of the reports: what such a thread did shows with the next report of another.

Blocks of shared memory (`harness.shm`), which torch does not allocate, are told of by those and added.

[Note: Not counted] Memory that is not the storage of a tensor: numpy's, gloo's and oneDNN's own buffers, Python's heap.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C._autograd import (  # type: ignore[attr-defined]
    _clear_callbacks,
    _disable_profiler,
    _enable_profiler,
    _prepare_profiler,
)
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _EventType,
    _ExperimentalConfig,
)
from torch.autograd.profiler import record_function

from harness.shm import memory_observers

STEP = "harness.probe.storage.step"
ENABLE = "_ZN5torch8autograd8profiler27enableProfilerInChildThreadEv"
FLAG = "FLAGS_caffe2_report_cpu_memory_usage"
DISABLE = "_ZN5torch8autograd8profiler28disableProfilerInChildThreadEv"


class StepBytes(NamedTuple):
    persistent: int
    """Bytes at the step's begin."""
    peak: int
    left: int
    """Bytes at its end, above `persistent` while something still grows."""


class Event(NamedTuple):
    """Allocation or free; or an edge of a step: no total, size 1 at its begin and -1 at its end; or shared memory."""

    time_ns: int
    size: int
    """Bytes of the block, negative for a free."""
    total: int | None
    is_shared: bool = False


class StorageMeter:
    """Follows the CPU allocator from its construction to `finish` or `close`. One is active at a time."""

    def __init__(self) -> None:
        """Raises `RuntimeError`: another profiler is active on this thread."""
        self._flag = ctypes.c_bool.in_dll(_library("libc10"), FLAG)
        self._flag.value = True
        config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig(), "")
        activities = {ProfilerActivity.CPU}
        _prepare_profiler(config, activities)
        # Of operations nothing is recorded, only the marks of `step`: memory is reported whatever the scope.
        _enable_profiler(config, activities, {RecordScope.USER_SCOPE})  # type: ignore[call-arg]
        self._threads: _Threads | None = _Threads()
        self._shared: list[tuple[int, int]] = []
        memory_observers.append(self._note_shared)

    def _note_shared(self, size: int) -> None:
        self._shared.append((time.time_ns(), size))

    @contextmanager
    def step(self) -> Iterator[None]:
        with record_function(STEP):
            yield

    def finish(self) -> list[StepBytes]:
        """Stop, and return every step's bytes."""
        if self._threads is None:
            raise RuntimeError("this meter was stopped before")
        result = self._stop(self._threads)
        return summed([*_events(result.experimental_event_tree())], self._shared)

    def close(self) -> None:
        if self._threads is not None:
            self._stop(self._threads)

    def _stop(self, threads: _Threads) -> Any:
        threads.leave()
        self._threads = None
        memory_observers.remove(self._note_shared)
        result = _disable_profiler()
        self._flag.value = False
        _clear_callbacks()  # a thread that joined took the place of ours, which would stay and slow what follows
        return result


def summed(events: Sequence[Event], shared: Sequence[tuple[int, int]] = ()) -> list[StepBytes]:
    """Bytes of each step above those before the first event. Args: shared: blocks of shared memory (time, bytes)."""
    begins = ((event.time_ns, event.total - event.size) for event in events if event.total is not None)
    base = own = min(begins, default=(0, 0))[1]
    steps: list[StepBytes] = []
    other, seen = 0, list[int]()  # bytes of shared memory; totals within the step, the one at its begin first
    timed = [*events, *(Event(at, size, None, True) for at, size in shared)]
    for event in sorted(timed, key=lambda each: each.time_ns):
        if event.total is not None or event.is_shared:
            # The total before this event, not after the last one: what was freed unheard meanwhile is gone.
            seen = seen or [other + (own if event.total is None else event.total - event.size)]
            own, other = own if event.total is None else event.total, other + event.is_shared * event.size
            seen.append(own + other)
        elif event.size > 0:
            seen = []
        else:
            seen = seen or [own + other]
            steps.append(StepBytes(seen[0] - base, max(seen) - base, seen[-1] - base))
    return steps


def _events(tree: Sequence[Any]) -> Iterator[Event]:
    waiting = list(tree)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        kind, fields = event.typed
        if kind == _EventType.Allocation:
            if fields.device.type == "cpu":
                yield Event(event.start_time_ns, fields.alloc_size, fields.total_allocated)
        elif event.name == STEP:
            yield Event(event.start_time_ns, 1, None)
            yield Event(event.end_time_ns, -1, None)


class _Threads:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = True
        self._joined = threading.local()
        library = _library("libtorch_cpu")
        self._join, self._part = (getattr(library, symbol) for symbol in (ENABLE, DISABLE))
        self._join.restype = self._part.restype = None
        self._before = threading.getprofile()
        threading.setprofile(self._on_event)

    def leave(self) -> None:
        threading.setprofile(self._before)
        with self._lock:  # no thread joins a profiler that is being stopped: C++ would end the process
            self._active = False

    def _on_event(self, *_: object) -> None:
        joined = getattr(self._joined, "yes", False)
        with self._lock:
            if self._active and not joined:
                self._joined.yes = True
                self._join()
                return
        if not self._active:
            sys.setprofile(None)
            if joined:
                self._part()
                _clear_callbacks()


def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"{name}.so"))
