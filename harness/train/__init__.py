"""The loop: microbatches in, a line of record a step out. `run(Session) -> Outcome` is all a worker needs."""

from harness.train.loop import run
from harness.train.session import Outcome, Progress, Session
from harness.train.timed import TimedWorkload

__all__ = ["Outcome", "Progress", "Session", "TimedWorkload", "run"]
