"""Staying until submitted cells have ended: launch.wait=true."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from harness.launch.slurm.scheduler import probe
from harness.launch.terminal import Terminal
from harness.store import status
from harness.store.errors import StoreError
from harness.store.rundir import RunDir
from harness.store.status import MOVING, JobProbe, State

POLL_S = 5.0
CODES = {State.done: 0, State.cancelled: 130}


def wait_for(runs: Sequence[RunDir], terminal: Terminal, *, poll_s: float = POLL_S) -> list[int]:
    """Wait until every run has ended, with messages on changes; returns their exit codes.

    Ctrl-C ends the waiting, not the jobs.
    """
    shown = ""
    while True:
        jobs = probe()
        states = [_state(run, jobs) for run in runs]
        counts = Counter(state.value for state in states)
        text = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        if text != shown:
            terminal.line(text)
            shown = text
        if not any(state in MOVING for state in states):
            return [CODES.get(state, 1) for state in states]
        time.sleep(poll_s)


def _state(run: RunDir, jobs: JobProbe | None) -> State:
    try:
        found = status.effective(run.path, jobs)
    except StoreError:
        return State.lost
    return State.lost if found is None else found.state
