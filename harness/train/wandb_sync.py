"""Rank 0's end of the wandb copy: a separate process that reads the record, and cannot slow or stop a run.

See `harness.wandb_sync`. A copy that ends early is reported once, on the terminal and in `status.json`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from harness.config.schema import Config, WandbMode
from harness.config.wandb_mode import wandb_mode
from harness.store import commands, status
from harness.store.errors import StoreError
from harness.store.files import private_folder
from harness.store.provenance import python_path
from harness.store.reading import read_text

CLOSE_S, HURRY_S = 60.0, 10.0
"""Seconds to wait for the copy, of a done run, and of one that must make room."""
LOG = "wandb_sync.log"


class WandbSync:
    def __init__(self, run_dir: Path, process: subprocess.Popen[bytes] | None, warn: Callable[[str], None]) -> None:
        self._run_dir, self._process, self._warn = run_dir, process, warn

    @classmethod
    def open(cls, config: Config, run_dir: Path, warn: Callable[[str], None]) -> WandbSync:
        """Start a copy, if requested.

        Args: run_dir: with `metrics.jsonl`, truncated to the resumed step. warn: called once with a line on failure.
        """
        wandb_sync = cls(run_dir, None, warn)
        try:
            mode = wandb_mode(config.wandb.mode, os.environ)
            if mode is not WandbMode.disabled:
                wandb_sync._process = _start(run_dir, mode)
        except (OSError, ValueError) as error:
            wandb_sync._fail(str(error))
        return wandb_sync

    def check(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            self._ended()

    def close(self, *, hurry: bool = False) -> None:
        """Wait until all lines are sent, for a bounded time; idempotent."""
        if self._process is None:
            return
        patience_s = HURRY_S if hurry else CLOSE_S
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(patience_s)
            self._ended()
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._fail(f"not everything was sent within {patience_s:.0f} s")

    def _ended(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode:
            text = ""
            with contextlib.suppress(StoreError):
                text = (read_text(self._run_dir / "wandb" / LOG) or "").strip()
            self._fail(text.rpartition("\n")[2] or f"its process ended with {process.returncode}")

    def _fail(self, why: str) -> None:
        self._process = None
        again = commands.verb(f"sync {shlex.quote(str(self._run_dir))}")
        text = f"wandb copy: {why}; the record is whole without it: {again}"
        self._warn(text)
        with contextlib.suppress(OSError, StoreError):
            status.note(self._run_dir, wandb=text)


def _start(run_dir: Path, mode: WandbMode) -> subprocess.Popen[bytes]:
    folder = run_dir / "wandb"
    private_folder(folder)
    with (folder / LOG).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "harness.wandb_sync", str(run_dir), mode.value],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": python_path(os.environ)},
            start_new_session=True,
        )
