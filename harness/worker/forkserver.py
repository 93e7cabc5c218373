"""Process that has imported torch once and forks ranks: milliseconds instead of seconds each.

`python -P -m harness.worker.forkserver FD` reads requests from the socket FD, a JSON message each with descriptors
beside it, and answers with the new rank's process id. It runs no torch operation and no thread, so that a fork is safe;
`harness.launch.local.forking` is the other end. A rank is forked twice, and the intermediate process ends at once: the
rank becomes a child of the launcher, a subreaper.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.store.rank_place import DIES_WITH, FORK_FDS

PR_SET_PDEATHSIG = 1
"""prctl(2): signal to this process when its parent ends."""

MESSAGE_BYTES = 1 << 20

USED_BY_ALL = (
    *("torch", "torch._dynamo", "torch.distributed", "safetensors.torch", "pydantic.type_adapter"),
    *("harness.worker.connect", "harness.worker.origin", "harness.data.loader", "harness.models.workload"),
    *("harness.engines.protocol", "harness.engines.adapters.native", "harness.engines.adapters.ddp"),
    *("harness.engines.adapters.single", "harness.probe.meters", "harness.train"),
)
"""Modules of every rank; every optimizer loads `torch._dynamo` at its first step."""


def serve(connection: socket.socket) -> None:
    for module in USED_BY_ALL:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is imported stays where it is: a rank's collections must not copy its pages
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, MESSAGE_BYTES, len(FORK_FDS) + 1)
        if not message:
            return
        try:
            reply: dict[str, Any] = {"pid": _fork(connection, json.loads(message), descriptors)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(json.dumps(reply).encode())


def _fork(connection: socket.socket, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
    """Process id of a new rank, a child of the reaper. Raises `RuntimeError`: an import has started a thread."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"{threads} threads run here")
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        rank = os.fork()
        if rank == 0:
            os.close(reading)
            os.close(writing)
            connection.close()
            _be_rank(request, descriptors)
        os.write(writing, str(rank).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(between, 0)  # from here on the rank has its new parent
    with os.fdopen(reading, "rb") as pipe:
        return int(pipe.read())


def _be_rank(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        *passed, log = descriptors
        for target in (1, 2):
            os.dup2(log, target)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.environ.update({name: str(number) for name, number in zip(FORK_FDS, passed, strict=True) if name})
        os.chdir(request["folder"])
        from harness.worker.rank import main

        code = main(Path(request["run"]), request["attempt"])
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):  # a log on a full disk must not change the exit code
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def die_with(launcher: int) -> None:
    """End this process when its launcher dies: it holds the lock of a run that is still to be forked.

    Forked ranks end by their own pipe.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # it was gone before we asked
        os._exit(1)


if __name__ == "__main__":
    if parent := os.environ.pop(DIES_WITH, ""):
        die_with(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1)  # asked by a launcher that waits too long; a rank registers a file of its own
    serve(socket.socket(fileno=int(sys.argv[1])))
