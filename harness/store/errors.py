"""What the store refuses."""

from __future__ import annotations


class StoreError(ValueError):
    """A request the store cannot honour: an unknown or ambiguous run, a bad path, a run that is in use.

    The message carries the value, what is valid, and what to do; callers print it and exit with code 2.
    """
