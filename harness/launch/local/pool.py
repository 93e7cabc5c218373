"""Several runs on one machine, side by side within its slots, with one handler of signals.

A timed run (measure=bench) is alone: it starts when no other is left, and none starts beside it, in this request or
another of this machine.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from harness.config.compose import Cell
from harness.config.derived import devices_per_node
from harness.config.rank_environment import visible_devices
from harness.config.schema import Device
from harness.launch.local.run import Ended, LocalRun
from harness.launch.opening import Action, Decision, Opened, Sources, is_timed, open_here
from harness.launch.terminal import Listener
from harness.store.errors import EXIT_BUSY, Busy, StoreError
from harness.store.files import Lock, own_folder
from harness.store.rank_place import STOP_SIGNALS, stop_reason
from harness.store.rundir import Store
from harness.store.status import JobProbe

TICK_S = 0.1
TIMING = "timing.lock"


@contextmanager
def listening() -> Iterator[list[signal.Signals]]:
    """Requests to stop, Ctrl-C among them, as they come.

    Outside the main thread signals stay as they are; ignored ones stay ignored (`nohup`, a shell's `&`).
    """
    asked: list[signal.Signals] = []

    def on_stop(number: int, _: FrameType | None) -> None:
        asked.append(signal.Signals(number))

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {
        number: signal.signal(number, on_stop)
        for number in STOP_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield asked
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@dataclass
class Pool:
    store: Store
    sources: Sources
    jobs: JobProbe | None
    on_decision: Callable[[Cell, Decision], None]
    on_start: Callable[[Opened], Listener]
    on_end: Callable[[Opened, Ended], None]
    _running: list[LocalRun] = field(default_factory=list)
    _codes: list[int] = field(default_factory=list)
    _timing: Lock | None = None
    _told_to_wait: bool = False
    _several: bool = False

    def run(self, cells: Sequence[Cell]) -> list[int]:
        """Exit code of each cell that was started or is not done.

        Among several cells, a damaged or failing one spoils no other. Raises `StoreError`, `OSError`: the only cell
        cannot be started.
        """
        self._several = len(cells) > 1
        try:
            return self._run(list(cells))
        finally:
            self._may_time(False)

    def _run(self, waiting: list[Cell]) -> list[int]:
        with listening() as asked:
            heard = 0
            while waiting or self._running:
                while waiting and self._fits(waiting[0]):
                    self._try(waiting.pop(0))
                time.sleep(TICK_S)
                self._reap()
                if asked.count(signal.SIGINT) > 1:
                    self._cancel_all()
                    break
                if len(asked) > heard:
                    heard = len(asked)
                    waiting.clear()
                    for run in self._running:
                        run.stop(asked[-1])
            return [*self._codes, 130 if signal.SIGINT in asked else 75] if asked else self._codes

    def _fits(self, cell: Cell) -> bool:
        if is_timed(cell) or self._timing is not None:
            if self._running:
                return False
            may = self._may_time(is_timed(cell))
            if not may and not self._told_to_wait:
                self._told_to_wait = True
                self.on_decision(cell, Decision(Action.leave, "waits: another request times runs on this machine"))
            return may
        on_device = cell.typed.cluster.device is Device.cuda
        if self._running and on_device and len(self._devices(cell)) < devices_per_node(cell.typed):
            return False
        taken = sum(run.config.mesh.world_size for run in self._running)
        return not self._running or taken + cell.typed.mesh.world_size <= cell.typed.cluster.slots

    def _may_time(self, wanted: bool) -> bool:
        if wanted and self._timing is None:
            self._timing = Lock.acquire(own_folder() / TIMING)
        elif not wanted and self._timing is not None:
            self._timing.release()
            self._timing = None
        return not wanted or self._timing is not None

    def _try(self, cell: Cell) -> None:
        try:
            self._start(cell)
        except (StoreError, OSError) as error:
            if not self._several:
                raise
            self.on_decision(cell, Decision(Action.leave, f"not started: {error}"))
            self._codes.append(EXIT_BUSY if isinstance(error, Busy) else 1)

    def _start(self, cell: Cell) -> None:
        opened = open_here(self.store, cell, self.sources, self.jobs)
        if isinstance(opened, Decision):
            self.on_decision(cell, opened)
            if opened.action is Action.leave:
                self._codes.append(EXIT_BUSY)
            return
        devices = self._devices(cell)
        self._running.append(LocalRun(*opened, self.on_start(opened[0]), devices))

    def _devices(self, cell: Cell) -> list[str]:
        if cell.typed.cluster.device is not Device.cuda:
            return []
        taken = {device for run in self._running for device in run.devices}
        free = [device for device in visible_devices() if device not in taken]
        return free[: devices_per_node(cell.typed)]

    def _reap(self) -> None:
        for run in list(self._running):
            ended = run.poll()
            if ended is not None:
                self._running.remove(run)
                self._codes.append(ended.exit_code)
                self.on_end(run.opened, ended)

    def _cancel_all(self) -> None:
        for run in self._running:
            run.cancel(stop_reason(signal.SIGINT))
        while self._running:
            self._reap()
            time.sleep(TICK_S)


def exit_code(codes: Sequence[int]) -> int:
    """Combined exit code: interrupted before failed before preempted before another process's before done."""
    return next((code for code in (130, 1, 75, EXIT_BUSY) if code in codes), 0)
