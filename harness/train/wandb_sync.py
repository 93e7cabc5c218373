"""Rank 0's copy of its run to wandb, by a thread that can neither fail nor hold up the run.

A copy that ends early is reported once, on the terminal and in `status.json`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.config.schema import Config, WandbMode
from harness.config.wandb_mode import wandb_mode
from harness.store import commands, status
from harness.store.errors import StoreError
from harness.store.metrics import read_metrics
from harness.store.rundir import RunDir
from harness.store.wandb_run import copying, settle

CLOSE_S, HURRY_S = 30.0, 10.0
"""Seconds to wait for the copy, of a done run, and of one that must make room."""


class WandbSync:
    def __init__(self, run_dir: Path, warn: Callable[[str], None]) -> None:
        """A copy that is not begun. Args: warn: called once with a line on failure."""
        self._run, self._warn = RunDir(run_dir), warn
        self._records: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failed = ""

    def begin(self, config: Config) -> None:
        """Start the copy, if requested, with what `metrics.jsonl` holds, truncated to the resumed step."""
        try:
            mode = wandb_mode(config.wandb.mode, os.environ)
            if mode is WandbMode.disabled:
                return
            for record in read_metrics(self._run.metrics):
                self._records.put(record)
        except (StoreError, ValueError) as error:
            self._fail(str(error))
            return
        self._thread = threading.Thread(target=self._copy, args=(mode.value,), daemon=True)
        self._thread.start()

    def log(self, record: Mapping[str, Any]) -> None:
        if self._thread is not None:
            self._records.put(record)
            self._fail(self._failed)

    def close(self, *, hurry: bool = False) -> None:
        """Wait until all lines are sent, for a bounded time; idempotent."""
        if self._thread is None:
            return
        self._records.put(None)
        patience_s = HURRY_S if hurry else CLOSE_S
        self._thread.join(patience_s)
        late = f"not everything was sent within {patience_s:.0f} s" if self._thread.is_alive() else ""
        self._fail(self._failed or late)
        self._thread = None

    def _copy(self, mode: str) -> None:
        try:
            with copying(self._run, mode, live=True, more={}) as log:
                while (record := self._records.get()) is not None:
                    log(record)
            settle()
        except BaseException as error:  # told by the thread that trains
            self._failed = f"{type(error).__name__}: {' '.join(str(error).split())}"

    def _fail(self, why: str) -> None:
        if not why:
            return
        self._thread = None
        again = commands.verb(f"sync {shlex.quote(str(self._run.path))}")
        text = f"wandb copy: {why}; the record is whole without it: {again}"
        self._warn(text)
        with contextlib.suppress(OSError, StoreError):
            status.note(self._run.path, wandb=text)
