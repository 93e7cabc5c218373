"""Training loop: microbatches in, a line of record a step out. `run(Session) -> Outcome` is the entry of a worker."""

from harness.train.loop import run
from harness.train.session import Outcome, Session, timed_workload

__all__ = ["Outcome", "Session", "run", "timed_workload"]
