"""Programs of this repository as forks of a process that has imported what they import.

`python run.py ...` imports for half a second, and each of its ranks for two more; a fork of the server of
`tests.support.forking` has all that. It begins as a program would: its own working directory, environment, arguments
and signals, as `__main__`, and nothing of what was imported has done anything yet. What a program starts is started the
usual way, but for its ranks, which are forks of the program.

Some tests start every program for real: `tests/cli/test_run.py`, `tests/test_fresh_clone.py`, `tests/slurm`, and
`tests/launch/test_kills.py` holds the bits of both ways against each other.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.support.forking import SERVER, fork_ranks

IMPORTED = (
    "run",
    "harness.cli.main",
    "harness.worker.rank",
    "harness.worker.describe",
)
USED_BY_RANKS = (
    *("torch", "torch._dynamo", "torch.distributed", "safetensors.torch", "pydantic.type_adapter"),
    *("harness.worker.connect", "harness.worker.origin", "harness.data.loader", "harness.models.workload"),
    *("harness.engines.protocol", "harness.engines.adapters.native", "harness.engines.adapters.ddp"),
    *("harness.engines.adapters.single", "harness.probe.meters", "harness.train"),
)
"""Every optimizer imports `torch._dynamo` at its first step."""
STARTING_S = 240.0
"""How long a busy machine may take to fork."""

if multiprocessing.current_process().name == SERVER:  # there alone: it is what programs are forks of
    for name in (*IMPORTED, *USED_BY_RANKS):
        import_module(name)


class Program:
    """`python WORDS` while it runs: what `subprocess.Popen` offers of it; its output is that of stdout and stderr."""

    def __init__(self, words: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None) -> None:
        """
        Args:
            words: a script's path or `-m` and a module's name, and its arguments.
            cwd: its working directory. env: all its variables; this process's where not given.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="program-")
        out = self._path("out")
        args = (list(words), str(cwd), dict(os.environ if env is None else env), str(out), str(out))
        self._codes: list[int] = []
        self._thread = threading.Thread(target=lambda: self._codes.extend(fork_ranks(_be, 1, *args, self._path("pid"))))
        self._thread.start()
        deadline = time.monotonic() + STARTING_S
        while not self._path("pid").exists() and self._thread.is_alive():
            assert time.monotonic() < deadline, "not forked"
            time.sleep(0.005)
        self.pid = int(self._path("pid").read_text())

    def _path(self, name: str) -> Path:
        return Path(self._folder.name, name)

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._codes[0] if self._codes else None

    def poll(self) -> int | None:
        """The same."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, if it runs."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for its end; what it has said.

        Raises:
            TimeoutExpired: it still runs after `timeout` seconds.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("a program", timeout or 0.0)
        return self._path("out").read_text(), None


def run_program(
    words: Sequence[str],
    *,
    cwd: Path | str = ".",
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    input: str = "",  # as `subprocess.run` names it
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run([sys.executable, *words], capture_output=True, text=True)` of a program of this repository.

    Raises:
        TimeoutExpired: it was killed after `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="program-") as name:
        out, err, pid, read = (Path(name, each) for each in ("out", "err", "pid", "in"))
        read.write_text(input)
        variables = dict(os.environ if env is None else env)
        (code,) = fork_ranks(
            _be, 1, list(words), os.path.abspath(cwd), variables, str(out), str(err), pid, str(read), seconds=timeout
        )
        if timeout is not None and code == -signal.SIGKILL:
            raise subprocess.TimeoutExpired(list(words), timeout)
        return subprocess.CompletedProcess([sys.executable, *words], code, out.read_text(), err.read_text())


def run_command(command: Sequence[str], **named: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a command that is Python's, for what calls it; `stdout` and `stderr` may be open files, and
    what is said on stderr goes to the one of `stdout` where it has none."""
    assert command[0] == sys.executable, command
    allowed = {"capture_output", "text", "check", "stdin", "input", "stdout", "stderr", "cwd", "env", "timeout"}
    assert not named.keys() - allowed, named
    how = {key: named[key] for key in ("cwd", "env", "timeout", "input") if key in named}
    done = run_program(command[1:], **how)
    out = named.get("stdout")
    if out is not None:
        err = named.get("stderr")
        err = out if err is None or isinstance(err, int) else err
        for file, said in ((out, done.stdout), (err, done.stderr)):
            file.write(said if named.get("text") else said.encode())
    return done


def fork_trials(patch: pytest.MonkeyPatch) -> None:
    """Have processes that try a user's own classes forked of one that has imported torch."""
    here = SimpleNamespace(run=run_command, TimeoutExpired=subprocess.TimeoutExpired)
    patch.setattr("harness.config.own.subprocess", here)


# -- in the fork -------------------------------------------------------------------------------------------------------


def _be(
    _: int, words: list[str], cwd: str, env: dict[str, str], out: str, err: str, pid: Path, read: str = os.devnull
) -> None:
    """Never returns."""
    atexit._clear()
    _begin(env, stdin=True)
    os.dup2(os.open(read, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing gave it another
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    pid.with_suffix(".part").write_text(str(os.getpid()))
    pid.with_suffix(".part").rename(pid)
    server = SimpleNamespace(Process=_ForkedRank, Pipe=multiprocessing.Pipe)
    with mock.patch.multiple("harness.launch.local.ranks", SERVER=server, _start_server=lambda _: None):
        code = _as_main(words)
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _as_main(words: list[str]) -> int:
    """The exit code."""
    is_module = words[0] in ("-m", "-P")
    sys.argv = words[words.index("-m") + 1 :] if is_module else words
    sys.path.insert(0, "" if is_module else str(Path(words[0]).parent))
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _begin(env: Mapping[str, str], *, stdin: bool) -> None:
    """What a new process has of its parent, and what not."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(env)
    if stdin:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


class _ForkedRank(ForkProcess):
    """A rank of `harness.launch.local.ranks`, forked of the program itself, which has imported what it needs."""

    _args: Any

    def run(self) -> None:
        """As a fork of the server: with nothing of the program's but what it is given."""
        atexit._clear()
        _begin({}, stdin=False)
        _close_all_but({0, 1, 2, *(each.fileno() for each in self._args if isinstance(each, Connection))})
        super().run()


def _close_all_but(kept: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):  # the folder's own is closed
                os.close(int(name))
