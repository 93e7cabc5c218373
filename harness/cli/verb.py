"""What a verb is."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """One word after `python -m harness`."""

    name: str
    summary: str
    """One line for `--help`."""
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    """Does it, prints, and returns the exit code."""
