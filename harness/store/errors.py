"""Errors of the store."""

from __future__ import annotations

EXIT_BUSY = 69
"""Exit code of a request that lost a lock to another (EX_UNAVAILABLE of sysexits.h)."""


class StoreError(ValueError):
    """A request that the store refuses: an unknown or ambiguous run, a bad path, a run in use.

    The message has the value, valid ones, and a remedy; callers print it and exit with `exit_code`.
    """

    exit_code = 2


class Busy(StoreError):
    """Another process holds a run, or a study's lock; a retry may succeed."""

    exit_code = EXIT_BUSY
