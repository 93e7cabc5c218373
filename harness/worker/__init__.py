"""One rank's process, from frozen cell to exit code. Nothing here is imported by the front end."""

from harness.worker.rank import main

__all__ = ["main"]
