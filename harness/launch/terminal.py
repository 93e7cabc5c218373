"""Progress and ends for people: a few lines."""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any

from harness.store import screen
from harness.store.results import rates

LINES = 10
PAUSE_S = 15.0
RECENT_STEPS = 20


Listener = Callable[[Mapping[str, Any]], None]
"""Called with the record of a step, or a `warning`."""


def progress_line(record: Mapping[str, Any], steps: int, held_out: float | None, recent_s: float) -> str:
    """Args: record: of the newest step. held_out: newest loss on held-out data. recent_s: usual time of a step."""
    rate, memory = rates(record, recent_s), record["memory"]
    num_bytes = memory["rss"] if memory["allocated"] is None else memory["allocated"]
    return (
        f"step {record['step']}/{steps}  loss {record['loss']:.4f}  "
        + (f"held out {held_out:.4f}  " if held_out is not None else "")
        + f"{1e3 * recent_s:.0f} ms/step  {screen.quantity(rate['tokens_per_s'] or 0.0)} tokens/s  "
        + (f"{rate['tflops_per_rank']:.3g} TFLOP/s  " if rate["tflops_per_rank"] else "")
        + (f"MFU {rate['mfu']:.1%}  " if rate["mfu"] else "")
        + f"{num_bytes / 2**20:.0f} MiB  ETA {screen.duration((steps - record['step']) * recent_s)}"
    )


class RunDisplay:
    """Listener of one run of so many steps."""

    def __init__(self, terminal: Terminal, steps: int, label: str = "") -> None:
        self._terminal, self._steps = terminal, steps
        self._label = label and f"{label}  "
        self._times: deque[float] = deque(maxlen=RECENT_STEPS)
        self._held_out: float | None = None
        self._last_shown = 0.0

    def __call__(self, message: Mapping[str, Any]) -> None:
        if "warning" in message:
            self._terminal.line(f"{self._label}warning: {message['warning']}")
            return
        self._times.append(message["step_time_s"])
        self._held_out = (message.get("validation") or {}).get("loss") or self._held_out
        line = progress_line(message, self._steps, self._held_out, statistics.median(self._times))
        regular = message["step"] in (1, self._steps) or message["step"] % max(1, self._steps // LINES) == 0
        if regular or time.monotonic() - self._last_shown > PAUSE_S:
            self._last_shown = time.monotonic()
            self._terminal.line(self._label + line)


class Terminal:
    def __init__(self, out: IO[str] | None = None) -> None:
        self._out = screen.plain(out or sys.stdout)

    def line(self, text: str) -> None:
        with suppress(OSError):  # `run.py | head`, or a log on a full disk: the run itself goes on
            self._out.write(screen.visible(text) + "\n")
            self._out.flush()
