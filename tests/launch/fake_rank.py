"""Stands in for the worker: tied to its launcher in the same way, then it misbehaves as told. Quick: no torch.

fake_rank.py RUN --attempt N    with FAKE="what rank 0 does|what rank 1 does"
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from harness.store import status
from harness.store.rank_place import rank_place, stop_reason
from harness.store.rundir import RunDir
from harness.store.status import State
from harness.worker.report import Reporter
from harness.worker.stop import hold_on

ECHO = "[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1234"


def step(number: int) -> None:
    """As the worker's."""
    reporter.step({"step": number, "loss": 1.0})


STOPS = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}


def wait_for_stop() -> signal.Signals:
    """Until asked to stop; the signal."""
    return signal.Signals(signal.sigwait(STOPS))


def save(asked: signal.Signals) -> int:
    """End as a rank that has saved; the exit code."""
    code, state = (130, State.cancelled) if asked is signal.SIGINT else (75, State.preempted)
    reporter.ended(state, f"{stop_reason(asked)}; saved at step 1")
    return code


def hold_the_interpreter() -> None:
    """Sleep in C without ever letting another thread run, deaf to every signal but SIGKILL."""
    ctypes.PyDLL(None).sleep(600)


def act(what: str) -> int:
    """Do as told; the exit code."""
    step(1)
    Path(run, f"pid{place.rank}").write_text(str(os.getpid()))  # whoever sees it finds the step told
    match what:
        case "done":
            reporter.warn(f"of rank {place.rank}")
            reporter.ended(State.done, "9 steps")
            return 0
        case "raise":
            raise KeyError("the cause")
        case "echo":
            raise RuntimeError(ECHO)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit7":
            print("a last word in the log", flush=True)
            return 7
        case "save" | "follow":  # whom another rank's stop reaches before its own signal does
            asked = wait_for_stop()
            return save(asked if what == "save" else signal.SIGTERM)
        case "sleep":
            wait_for_stop()
            time.sleep(600)
        case "stuck":
            hold_the_interpreter()
        case "child":
            child = subprocess.Popen(["sleep", "600"])
            Path(run, f"child{place.rank}").write_text(str(child.pid))
            time.sleep(600)
    raise AssertionError(what)


def main() -> int:
    """As the worker's."""
    try:
        return act(os.environ["FAKE"].split("|")[place.rank])
    except Exception as error:
        reporter.failed(error)
        return 1


run, attempt = Path(sys.argv[1]), int(sys.argv[3])
place = rank_place(os.environ)
# Before any thread starts, for threads inherit the mask: one that lacked it would take the signal, and die of it,
# whenever the main thread is not inside sigwait yet.
signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
hold_on(os.environ)
reporter = Reporter(run, attempt, place)
faulthandler.enable()
assert status.read(run) is not None
with reporter.watching(RunDir(run).setting("launch.hang_timeout_s")):
    code = main()
sys.stdout.flush()
os._exit(code)
