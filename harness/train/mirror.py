"""Rank 0's end of the wandb mirror: a process of its own that follows the record, and can neither slow nor stop a run.

See `harness.mirror`. A mirror that ends before the run does is told once, on the terminal and in `status.json`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from harness.config.mirror import mirror_mode
from harness.config.schema import Config, WandbMode
from harness.store import commands, status
from harness.store.errors import StoreError
from harness.store.files import private_folder
from harness.store.provenance import PACKAGE
from harness.store.reading import read_text

CLOSE_S, HURRY_S = 60.0, 10.0
"""How long a run that is done, and one that must make room, waits for what is still to be sent."""
LOG = "mirror.log"


class Mirror:
    def __init__(self, run_dir: Path, process: subprocess.Popen[bytes] | None, warn: Callable[[str], None]) -> None:
        self._run_dir, self._process, self._warn = run_dir, process, warn

    @classmethod
    def disabled(cls) -> Mirror:
        return cls(Path(), None, print)

    @classmethod
    def open(cls, config: Config, run_dir: Path, warn: Callable[[str], None]) -> Mirror:
        """Start mirroring where that is asked for.

        Args:
            config: the run's.
            run_dir: its directory; `metrics.jsonl` exists, cut back to where the run goes on.
            warn: is told, in a line, that the mirror failed.
        """
        mirror = cls(run_dir, None, warn)
        try:
            mode = mirror_mode(config.wandb.mode, os.environ)
            if mode is not WandbMode.disabled:
                mirror._process = _start(run_dir, mode)
        except (OSError, ValueError) as error:
            mirror._fail(str(error))
        return mirror

    def check(self) -> None:
        """Tell once if it has ended too early; costs a system call."""
        if self._process is not None and self._process.poll() is not None:
            self._ended()

    def close(self, *, hurry: bool = False) -> None:
        """No line follows: wait until all are sent, for a bounded time. A second call does nothing."""
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
            self._fail(self._last_word() or f"its process ended with {process.returncode}")

    def _last_word(self) -> str:
        try:
            lines = (read_text(self._run_dir / "wandb" / LOG) or "").strip().splitlines()
        except StoreError:
            return ""
        return lines[-1] if lines else ""

    def _fail(self, why: str) -> None:
        self._process = None
        again = commands.verb(f"sync {shlex.quote(str(self._run_dir))}")
        text = f"wandb mirror: {why}; the record is whole without it: {again}"
        self._warn(text)
        with contextlib.suppress(OSError, StoreError):
            status.note(self._run_dir, mirror=text)


def _start(run_dir: Path, mode: WandbMode) -> subprocess.Popen[bytes]:
    folder = run_dir / "wandb"
    private_folder(folder)
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (folder / LOG).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "harness.mirror", str(run_dir), mode.value],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
