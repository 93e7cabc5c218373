"""Asking SLURM's commands."""

from __future__ import annotations

import subprocess

TIMEOUT_S = 60.0


class SlurmError(RuntimeError):
    """A SLURM command failed."""


def ask(*command: str) -> str:
    """What a command prints. Raises `SlurmError` where there is no such command, or it fails or does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise SlurmError(f"{command[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
