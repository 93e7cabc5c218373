"""What the store refuses."""

from __future__ import annotations

EXIT_BUSY = 69
"""Exit code of a request that lost to another one that holds a lock (EX_UNAVAILABLE of sysexits.h)."""


class StoreError(ValueError):
    """A request the store cannot honour: an unknown or ambiguous run, a bad path, a run that is in use.

    The message carries the value, what is valid, and what to do; callers print it and exit with `exit_code`.
    """

    exit_code = 2


class Busy(StoreError):
    """Another process has what was asked for: a run, or the right to start a study's. Asked later, it may work."""

    exit_code = EXIT_BUSY
