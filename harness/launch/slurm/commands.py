"""Asking SLURM's commands."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

TIMEOUT_S = 60.0

FILTERS = ("SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_", "SCANCEL_")


class SlurmError(RuntimeError):
    """A SLURM command failed."""


class NoAnswer(SlurmError):
    """A SLURM command did not end within `TIMEOUT_S`."""


def ask(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """Output of a command, by default without the user's filters.

    Raises `SlurmError`: it is missing, failed, or timed out.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",  # names and comments are other people's, in whatever encoding
            timeout=TIMEOUT_S,
            check=False,
            env=plain_environment(os.environ) if environment is None else environment,
        )
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(f"{command[0]}: {error}") from error
    except OSError as error:
        raise SlurmError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise SlurmError(f"{command[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def plain_environment(environment: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in environment.items() if not name.startswith(FILTERS)}
    return kept | {"SLURM_BITSTR_LEN": "0"}
