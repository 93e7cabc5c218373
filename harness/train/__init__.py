"""Training loop: microbatches in, a line of record a step out. `run(Session) -> Outcome` is the entry of a worker."""

from harness.train.loop import run
from harness.train.session import Outcome, Progress, Session
from harness.train.timed import TimedWorkload

__all__ = ["Outcome", "Progress", "Session", "TimedWorkload", "run"]
