"""Processes that have everything imported before they start: forks of a server that lives as long as the session.

Importing torch and what an optimizer brings with it takes a second and more; forking a process that has done so takes
some milliseconds. A fork begins with what the server has, modules and nothing else, and ends with its call: no setting,
patch, cache, thread or memory of one call is there in the next.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkProcess
from typing import Any

PRELOADED = (
    "torch",
    "torch._dynamo",  # imported by the first optimizer of a process, for half a second
    "torch.distributed.device_mesh",
    "torch.testing",
    "harness.engines.adapters.native",
    "harness.checkpoint.policy",
    "harness.models.workload",
)
SERVER = "forking server"
"""Name of the process whose forks the ranks are, for modules that import more there."""
CLOSING_S = 30.0
"""For a server to have ended its ranks."""
ENVIRONMENT = dict(os.environ)
"""Of this process before any test: a server that is first needed in a test gets none of what that test has set."""


SELDOM = (20_000, 20, 20)
"""For `gc.set_threshold`, in ranks and in tests: with Python's own (700, 10, 10) a tenth of a rank's time went there, a
quarter of that of collecting the tests. What must be freed is freed without it, or a test collects."""


class Server:
    """A process that imports what is asked of it, and forks the ranks of one call at a time."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_serve, args=(theirs, ENVIRONMENT), name=SERVER)
        self._process.start()
        theirs.close()

    def call(self, request: bytes) -> list[int] | str:
        """Exit codes of the ranks, or what kept them from being started."""
        self._connection.send_bytes(request)
        answer: list[int] | str = self._connection.recv()
        return answer

    def close(self) -> None:
        """End it, and any rank there still is."""
        self._connection.close()
        self._process.join(CLOSING_S)
        self._process.kill()  # it has ended long ago, unless some fork of this process keeps the connection open
        self._process.join()


_idle: list[Server] = []
_lock = threading.Lock()


def fork_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    seconds: float | None = None,
    first_failure_ends_all: bool = False,
) -> list[int]:
    """Call `function(rank, *args)` in a process for each rank; exit codes in rank order, negative ones are signals.

    Whatever a rank does to itself, the others go on: callers who want an answer have it written where they find it.
    Environment and imported modules are those of the beginning of the session. Calls from several threads run side by
    side.

    Args:
        function: importable by name, as its arguments are.
        seconds: after so many, ranks that still run are killed; None waits for ever.
        first_failure_ends_all: kill the others when a rank ends with something other than 0.

    Raises:
        RuntimeError: function or arguments cannot be imported by the server.
    """
    request = pickle.dumps((function, world_size, args, seconds, first_failure_ends_all))
    with _lock:
        server = _idle.pop() if _idle else None
    server = server or Server()
    try:
        answer = server.call(request)
    except BaseException:  # whoever interrupts the wait does not want the ranks any more
        server.close()
        raise
    with _lock:
        _idle.append(server)
    if isinstance(answer, str):
        raise RuntimeError(f"no rank was started:\n{answer}")
    return answer


@atexit.register  # runs before multiprocessing waits for the servers, which end when nobody is connected to them
def _close_servers() -> None:
    while _idle:
        _idle.pop().close()


# -- the server --------------------------------------------------------------------------------------------------------


def _serve(connection: Connection, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for module in PRELOADED:
        import_module(module)
    # More ranks than cores: who holds a lock of gloo's is not to lose its core to a thread that only spins for it.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        with suppress(BrokenPipeError):
            connection.send(_answer(connection, request))


def _answer(connection: Connection, request: bytes) -> list[int] | str:
    try:
        function, world_size, args, seconds, first_failure_ends_all = pickle.loads(request)
    except Exception:
        return traceback.format_exc()
    gc.collect()
    gc.freeze()  # what is there already is not looked through by the ranks, and so not copied for them
    gc.set_threshold(*SELDOM)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(connection, function, rank, args)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    _wait(connection, ranks, seconds, first_failure_ends_all)
    for process in ranks:
        process.kill()
        process.join()
    return [process.exitcode or 0 for process in ranks]


def _rank(connection: Connection, function: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> None:
    connection.close()  # or who waits for the server would not learn of its end
    function(rank, *args)


def _wait(connection: Connection, ranks: Iterable[ForkProcess], seconds: float | None, first_ends_all: bool) -> None:
    """Until all ranks have ended, or one has failed, or time is up, or nobody wants to know any more."""
    deadline = None if seconds is None else time.monotonic() + seconds
    running = {process.sentinel: process for process in ranks}
    while running:
        left = None if deadline is None else deadline - time.monotonic()
        ready = wait([connection, *running], left) if left is None or left > 0 else []
        if not ready or connection in ready:
            return
        ended = [running.pop(sentinel) for sentinel in ready if isinstance(sentinel, int)]
        for process in ended:
            process.join()
        if first_ends_all and any(process.exitcode for process in ended):
            return
