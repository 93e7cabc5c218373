"""The decision table, cell by cell."""

from __future__ import annotations

import pytest

from harness.config.schema import Rerun
from harness.launch.opening import Action, decide
from harness.store.status import Keeper, State, Status


def of(state, **fields):
    return Status(state, "why", 0, **fields)


SLURM = {"keeper": Keeper.slurm, "job": "7"}

TABLE = [
    # status, stale, obstacle, rerun, action
    (None, False, "", Rerun.never, Action.start),
    (of(State.queued), False, "", Rerun.always, Action.leave),
    (of(State.running), True, "sources", Rerun.always, Action.leave),
    (of(State.preempted, **SLURM), False, "", Rerun.always, Action.leave),
    (of(State.preempted), False, "", Rerun.never, Action.start),
    (of(State.failed), False, "", Rerun.never, Action.start),
    (of(State.lost, **SLURM), False, "", Rerun.never, Action.start),
    (of(State.cancelled), False, "", Rerun.never, Action.start),
    (of(State.failed), True, "the sources changed since", Rerun.never, Action.start_over),
    (of(State.failed), True, "", Rerun.never, Action.start),
    (of(State.done), False, "", Rerun.never, Action.skip),
    (of(State.done), False, "", Rerun.stale, Action.skip),
    (of(State.done), True, "the sources changed since", Rerun.never, Action.skip),
    (of(State.done), True, "the sources changed since", Rerun.stale, Action.start_over),
    (of(State.done), False, "", Rerun.always, Action.start_over),
]


@pytest.mark.parametrize(("status", "stale", "obstacle", "rerun", "action"), TABLE)
def test_the_table(status, stale, obstacle, rerun, action):
    decision = decide(status, stale=stale, obstacle=obstacle, rerun=rerun)
    assert decision.action is action
    assert decision.starts == (action in (Action.start, Action.start_over))
    if action is Action.start_over and obstacle and status.state is not State.done:
        assert decision.why == f"{status.state.value} before: why; {obstacle}, so from step 0"
    if stale and action is Action.skip:
        assert "launch.rerun=stale" in decision.why
