"""Decision table: a request and the state on disk -> an action. Order of starts: timed cells in blocks.

[Note: Blocks] A block is one repetition of each arm, in a random order of its own, so that drift affects every arm
alike; arms of one workload are adjacent, because they are compared. A cell's place follows from its configuration and
the seed, so that a resumed study keeps its order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from harness.config.compose import Cell
from harness.config.schema import MeasureMode, Rerun
from harness.store.identity import repeated
from harness.store.status import RESTARTS, State, Status


class Action(Enum):
    skip = "skip"
    """The cell is done: start nothing."""
    leave = "leave"
    """Somebody runs it already, or will."""
    start = "start"
    """A new attempt, from the newest checkpoint if there is one."""
    start_over = "start over"
    """A new attempt from step 0; the earlier record is moved aside."""


@dataclass(frozen=True)
class Decision:
    action: Action
    why: str

    @property
    def starts(self) -> bool:
        return self.action in (Action.start, Action.start_over)


def decide(status: Status | None, *, stale: bool, obstacle: str, rerun: Rerun) -> Decision:
    """Args: status: effective state (`status.effective`); None if never started. stale: sources that can change numbers
    have changed. obstacle: why an earlier attempt cannot be continued, or empty."""
    if status is None:
        return Decision(Action.start, "new")
    if status.state in RESTARTS or (status.state is State.preempted and status.job):
        return Decision(Action.leave, f"{status.state.value}: {status.reason}")
    if status.state is State.done:
        return _decide_done(stale, rerun)
    again = f"{status.state.value} before: {status.reason}"
    if obstacle:
        return Decision(Action.start_over, f"{again}; {obstacle}, so from step 0")
    return Decision(Action.start, again)


def _decide_done(stale: bool, rerun: Rerun) -> Decision:
    if rerun is Rerun.always:
        return Decision(Action.start_over, "done before, launch.rerun=always")
    if stale and rerun is Rerun.stale:
        return Decision(Action.start_over, "done by other sources, launch.rerun=stale")
    if stale:
        return Decision(Action.skip, "done, but the sources changed since (launch.rerun=stale runs it again)")
    return Decision(Action.skip, "done")


ENGINE_GROUPS = ("engine", "sharding")


def in_blocks(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    others = [cell for cell in cells if not is_timed(cell)]
    return (*others, *sorted((cell for cell in cells if is_timed(cell)), key=_place))


def is_timed(cell: Cell) -> bool:
    return bool(cell.config["measure"]["mode"] == MeasureMode.bench.name)


def _place(cell: Cell) -> tuple[int, str, str]:
    block, seed = int(cell.config["train"]["replicate"]), int(cell.config["study"]["order_seed"])
    texts = (repeated(cell.config, ENGINE_GROUPS), repeated(cell.config))
    workload, arm = (hashlib.sha256(f"{seed} {block} {text}".encode()).hexdigest() for text in texts)
    return block, workload, arm
