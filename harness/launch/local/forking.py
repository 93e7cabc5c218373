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
from dataclasses import dataclass
from pathlib import Path

from harness.config.derived import against_forks
from harness.config.schema import Config
from harness.store.provenance import sources_digest
from harness.store.rank_place import DIES_WITH, STOP_SIGNALS, stop_signals_blocked

PR_SET_CHILD_SUBREAPER = 36
"""prctl(2): orphaned descendants become this process's children."""

REPLY_BYTES = 1 << 12

TICK_S = 0.1

QUIET_S = 20.0

STACK_S = 1.0


def forks(config: Config) -> bool:
    """True if ranks are forked: by `launch.fork`, else wherever possible. Raises `OSError`: demanded but impossible."""
    if config.launch.fork is None:
        return not against_forks(config) and adopts_orphans()
    if config.launch.fork:
        _adopt_orphans()
    return config.launch.fork


def adopts_orphans() -> bool:
    """True if this process can be the parent of a fork server's ranks; makes it a subreaper."""
    try:
        _adopt_orphans()
    except OSError:
        return False
    return True


class NotForked(OSError):
    """A fork server forked no rank: it is gone, unable, or cannot be reached."""


class ServerHangs(OSError):
    """A fork server's imports do not end; separate ranks would import the same."""


@dataclass(frozen=True)
class Patience:
    limit_s: float
    say: Callable[[str], None]
    is_over: Callable[[], bool]


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


def _tied() -> dict[str, str]:
    """Variables that end a server with this process, also amid its imports: it holds the run's lock.

    Linux ends it with the thread that started it; otherwise it finds out by itself.
    """
    here = threading.current_thread() is threading.main_thread()
    return {DIES_WITH: str(os.getpid())} if here else {}


class ForkServer:
    def __init__(self, environment: Mapping[str, str], log: int) -> None:
        """environment: of the imports. log: for their output and errors.

        Raises `OSError`: it cannot be started.
        """
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection = ours
        with its, stop_signals_blocked():  # the server's ranks inherit it, and listen
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "harness.worker.forkserver", str(its.fileno())],
                env={**environment, **_tied()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(its.fileno(),),
                process_group=0,  # a terminal's Ctrl-C is the launcher's
            )

    def start(
        self,
        run: Path,
        attempt: int,
        environment: Mapping[str, str],
        descriptors: Sequence[int],
        log: int,
        patience: Patience,
    ) -> Adopted:
        """Fork a rank.

        Args: environment: without `FORK_FDS`. descriptors: in the order of `FORK_FDS`. log: for its output.

        Raises `NotForked`: it failed, or the request was interrupted. `ServerHangs`: no answer in time.
        """
        request = {"run": str(run.resolve()), "attempt": attempt, "environment": environment, "folder": os.getcwd()}
        try:
            socket.send_fds(self._connection, [json.dumps(request).encode()], [*descriptors, log])
            self._await_reply(patience)
            reply = json.loads(self._connection.recv(REPLY_BYTES) or b"{}")
        except ServerHangs:
            raise
        except OSError as error:  # gone, or an environment that is larger than a message
            reply = {"error": f"no rank can be asked of the fork server: {error.strerror}"}
        if "pid" not in reply:
            raise NotForked(reply.get("error", "the fork server is gone"))
        return Adopted(reply["pid"])

    def _await_reply(self, patience: Patience) -> None:
        began, said = time.monotonic(), False
        while not select.select([self._connection], [], [], TICK_S)[0]:
            waited = time.monotonic() - began
            if patience.is_over() or signal.sigpending() & set(STOP_SIGNALS):  # blocked while ranks are started
                raise NotForked("the request was ended while the fork server was importing")
            if waited > patience.limit_s:
                self._process.send_signal(signal.SIGUSR1)
                time.sleep(STACK_S)
                raise ServerHangs("the imports of the fork server (launch.fork), torch among them, do not end")
            if waited > QUIET_S and not said:
                said = True
                patience.say(f"the fork server (launch.fork) has been importing torch for {waited:.0f} s")

    def close(self) -> None:
        self._connection.close()
        self._process.kill()  # it has nothing to lose, and one that is stopped takes no other signal
        self._process.wait()


_SERVERS: dict[tuple[object, ...], ForkServer] = {}


def fork_rank(
    imports: Mapping[str, str],
    run: Path,
    attempt: int,
    environment: Mapping[str, str],
    descriptors: Sequence[int],
    log: int,
    patience: Patience,
) -> Adopted:
    """Fork a rank from the server of these imports and present sources, started if needed.

    Args: imports: variables of the server; others as in `ForkServer.start`.

    Raises `NotForked`: it failed; that server is ended, and the next rank gets a new one. `ServerHangs`: no answer in
    time; it is ended too. `OSError`: no server can be started.
    """
    key = (sources_digest(), *sorted(imports.items()))
    if key not in _SERVERS:
        _SERVERS[key] = ForkServer(imports, log)
    try:
        return _SERVERS[key].start(run, attempt, environment, descriptors, log, patience)
    except (NotForked, ServerHangs):
        _SERVERS.pop(key).close()
        raise


def _adopt_orphans() -> None:
    if sys.platform != "linux":
        raise OSError("launch.fork=true needs Linux: only there can a launcher adopt what another process forked")
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot adopt orphans")
