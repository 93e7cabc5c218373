"""Asking SLURM's commands, and jobs as they print them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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


SQUEUE = "%F|%K|%T|%r|%N|%j"
"""Format of squeue; the name is last, because it may contain the separator."""
SACCT = "JobID,State,ExitCode,NodeList,JobName"


@dataclass(frozen=True)
class Job:
    id: str
    """`123` or `123_4`."""
    name: str
    state: str
    detail: str = ""
    """Reason of waiting, or exit code."""
    nodes: str = ""
    """Nodes of its present or last start, such as `n[1-2]`; empty before."""

    @property
    def main(self) -> str:
        return self.id.partition("_")[0]


def parse_squeue(text: str) -> list[Job]:
    """Jobs of `squeue --array --format=SQUEUE`."""
    jobs = []
    for line in text.splitlines():
        fields = line.split("|", 5)
        if len(fields) == 6:
            main, index, state, reason, nodes, name = fields
            jobs.append(Job(f"{main}_{index}" if index.isdigit() else main, name, state, reason, nodes))
    return jobs


def parse_sacct(text: str) -> list[Job]:
    """Jobs of `sacct --parsable2 --format=SACCT`, without steps."""
    jobs = []
    for line in text.splitlines():
        fields = line.split("|", 4)
        found = _NUMBER.fullmatch(fields[0]) if len(fields) == 5 and fields[1].strip() else None
        if found:
            _, state, code, nodes, name = fields
            nodes = "" if nodes == "None assigned" else nodes
            numbers = _numbers(found["main"], found["one"] or found["several"])
            jobs += [Job(number, name, state.split()[0], f"exit code {code}", nodes) for number in numbers]
    return jobs


_NUMBER = re.compile(r"(?P<main>\d+)(_(?P<one>\d+)|_\[(?P<several>[^]]*)\])?")


def _numbers(main: str, elements: str | None) -> Iterator[str]:
    """`7_0`, `7_2`, `7_3` of job 7 and its elements `0,2-3%4`; the job itself without elements.

    Truncated lists are dropped.
    """
    if elements is None:
        yield main
        return
    for part in elements.partition("%")[0].split(","):
        if found := re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part):
            first, last, step = (int(number) if number else 0 for number in found.groups())
            yield from (f"{main}_{index}" for index in range(first, max(first, last) + 1, max(1, step)))


def parse_scontrol(text: str) -> list[Job]:
    """Jobs of `scontrol --oneliner show job`."""
    jobs = []
    for line in text.splitlines():
        words = [word.split("=", 1) for word in line.split() if "=" in word]
        fields = dict(reversed(words))  # the first of a name: comments and command lines, which say anything, come late
        if "JobId" not in fields or "JobState" not in fields:
            continue
        main = fields.get("ArrayJobId", fields["JobId"])
        nodes = fields.get("NodeList", "").replace("(null)", "")
        waits = fields["JobState"] == "PENDING"
        detail = fields.get("Reason", "") if waits else f"exit code {fields.get('ExitCode')}"
        numbers = _numbers(main, fields.get("ArrayTaskId"))
        jobs += [Job(number, fields.get("JobName", ""), fields["JobState"], detail, nodes) for number in numbers]
    return jobs
