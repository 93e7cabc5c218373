"""Progress and ends for people: a moving line on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import IO, Any

from harness.store import screen

PLAIN_LINES = 10
PLAIN_PAUSE_S = 15.0
RECENT_STEPS = 20


def progress_line(message: Mapping[str, Any], recent_s: float) -> str:
    left = (message["steps"] - message["step"]) * recent_s
    speed = message["tokens"] / recent_s if recent_s else 0.0
    held_out, rate, peak = (message.get(name) for name in ("held_out", "flops", "peak_flops"))
    return (
        f"step {message['step']}/{message['steps']}  loss {float(message['loss']):.4f}  "
        + (f"held out {float(held_out):.4f}  " if held_out is not None else "")
        + f"{1e3 * recent_s:.0f} ms/step  {screen.quantity(speed)} tokens/s  "
        + (f"{rate / recent_s / 1e12:.3g} TFLOP/s  " if rate and recent_s else "")
        + (f"MFU {100 * rate / recent_s / peak:.1f} %  " if rate and recent_s and peak else "")
        + f"{message['memory_bytes'] / 2**20:.0f} MiB  ETA {screen.duration(left)}"
    )


class RunDisplay:
    def __init__(self, terminal: Terminal, label: str) -> None:
        self._terminal = terminal
        self._label = label
        self._times: deque[float] = deque(maxlen=RECENT_STEPS)
        self._last_shown = 0.0

    def __call__(self, message: Mapping[str, Any]) -> None:
        if message["kind"] == "warning":
            self._terminal.line(self._labelled(f"warning: {message['text']}"))
        elif message["kind"] == "step" and message["rank"] == 0:
            self._times.append(message["step_time_s"])
            text = self._labelled(progress_line(message, statistics.median(self._times)))
            if self._terminal.moving:
                self._terminal.update(text)
            elif self._is_due(message["step"], message["steps"]):
                self._last_shown = time.monotonic()
                self._terminal.line(text)

    def _labelled(self, text: str) -> str:
        return f"{self._label}  {text}" if self._label else text

    def _is_due(self, step: int, steps: int) -> bool:
        regular = step in (1, steps) or step % max(1, steps // PLAIN_LINES) == 0
        late = time.monotonic() - self._last_shown > PLAIN_PAUSE_S
        return late or regular


class Terminal:
    def __init__(self, out: IO[str] | None = None) -> None:
        self._out = screen.plain(out or sys.stdout)
        self.moving = self._out.isatty() and os.environ.get("TERM") != "dumb"
        self._open = False

    def line(self, text: str) -> None:
        if self._open:
            self._write("\n")
            self._open = False
        self._write(screen.painted(screen.visible(text), self._out) + "\n")

    def settle(self, text: str) -> None:
        if self._open:
            self._write("\r\x1b[K")
            self._open = False
        self.line(text)

    def page(self, text: str) -> None:
        if self.moving:
            self._write(f"\x1b[H\x1b[J{screen.painted(screen.visible(text), self._out)}\n")
        else:
            self.line(text)

    def update(self, text: str) -> None:
        """Replace the moving line, truncated to the width, because a wrapped line could not be replaced."""
        self._write(f"\r\x1b[K{screen.cut(screen.visible(text), screen.width())}")
        self._open = True

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except (BrokenPipeError, OSError):  # `run.py | head`, or a log on a full disk: the run itself goes on
            self.moving = False
