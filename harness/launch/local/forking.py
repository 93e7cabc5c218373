"""Ranks forked from a process that has imported torch (`launch.fork`), which takes longer than a short run.

One server for each environment of imports (threads, allocator) and digest of sources, because libraries read variables
when loaded. It lives as long as this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.config.derived import against_forks
from harness.config.schema import Config
from harness.store.provenance import sources_digest
from harness.store.rank_place import DIES_WITH, STOP_SIGNALS, stop_signals_blocked

PR_SET_CHILD_SUBREAPER = 36
"""prctl(2): orphaned descendants become this process's children."""

REPLY_BYTES = 1 << 12
TICK_S = 0.1


def forks(config: Config) -> bool:
    """True if ranks are forked: by `launch.fork`, else wherever possible; makes this process a subreaper, their parent.

    Raises `OSError`: demanded but impossible.
    """
    asked = config.launch.fork
    if asked is False or (asked is None and against_forks(config)):
        return False
    try:
        _adopt_orphans()
    except OSError:
        if asked:
            raise
        return False
    return True


class NotForked(OSError):
    """A fork server forked no rank: it is gone, unable, or cannot be reached."""


class Adopted:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Exit code, negative for a signal; blocks."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class ForkServer:
    def __init__(self, environment: Mapping[str, str], log: int) -> None:
        """environment: of the imports. log: for their output and errors.

        Raises `OSError`: it cannot be started.
        """
        # A server holds the run's lock: it ends with this process, also amid its imports. Linux ends it with the thread
        # that started it; otherwise it finds out by itself.
        is_tied = threading.current_thread() is threading.main_thread()
        self.connection, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its, stop_signals_blocked():  # the server's ranks inherit it, and listen
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "harness.worker.forkserver", str(its.fileno())],
                env={**environment, **({DIES_WITH: str(os.getpid())} if is_tied else {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(its.fileno(),),
                process_group=0,  # a terminal's Ctrl-C is the launcher's
            )

    def close(self) -> None:
        self.connection.close()
        self._process.kill()  # it has nothing to lose, and one that is stopped takes no other signal
        self._process.wait()


_SERVERS: dict[tuple[object, ...], ForkServer] = {}


def fork_rank(
    request: Mapping[str, Any],
    descriptors: Sequence[int],
    log: int,
    *,
    imports: Mapping[str, str],
    limit_s: float,
    is_over: Callable[[], bool],
) -> Adopted:
    """Fork a rank from the server of these imports and present sources, started if needed.

    Args: request: run, attempt, folder, and environment without `FORK_FDS`. descriptors: in the order of `FORK_FDS`.
    log: for its output. imports: variables of the server. is_over: whether nobody wants the rank any more.

    Raises `NotForked`: it failed, took too long, or is over; that server is ended, and the next rank gets a new one.
    `OSError`: no server can be started.
    """
    key = (sources_digest(), *sorted(imports.items()))
    if key not in _SERVERS:
        _SERVERS[key] = ForkServer(imports, log)
    connection, deadline = _SERVERS[key].connection, time.monotonic() + limit_s
    try:
        socket.send_fds(connection, [json.dumps(request).encode()], [*descriptors, log])
        while not select.select([connection], [], [], TICK_S)[0]:
            if is_over() or signal.sigpending() & set(STOP_SIGNALS):  # blocked while ranks are started
                raise NotForked("the request was ended while the fork server was importing")
            if time.monotonic() > deadline:
                raise NotForked("the imports of the fork server, torch among them, do not end")
        reply = json.loads(connection.recv(REPLY_BYTES) or b"{}")
        if "pid" not in reply:
            raise NotForked(reply.get("error", "the fork server is gone"))
        return Adopted(reply["pid"])
    except OSError as error:  # gone, or an environment that is larger than a message
        _SERVERS.pop(key).close()
        if isinstance(error, NotForked):
            raise
        raise NotForked(f"no rank can be asked of the fork server: {error.strerror}") from error


def _adopt_orphans() -> None:
    if sys.platform != "linux":
        raise OSError("launch.fork=true needs Linux: only there can a launcher adopt what another process forked")
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot adopt orphans")
