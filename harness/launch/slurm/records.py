"""A job as SLURM's commands print it."""

from __future__ import annotations

import re
from dataclasses import dataclass

SQUEUE = "%F|%K|%T|%r|%N|%j"
"""Format of squeue that `parse_squeue` reads; the name is last, for it may hold anything."""
SACCT = "JobID,State,ExitCode,NodeList,JobName"
"""Format of sacct that `parse_sacct` reads."""


@dataclass(frozen=True)
class Job:
    """One job, or one element of an array."""

    id: str
    """`123` or `123_4`."""
    name: str
    state: str
    """SLURM's word, such as PENDING or OUT_OF_MEMORY."""
    detail: str = ""
    """Why it waits, or its exit code."""
    nodes: str = ""
    """Nodes of its present or last start, in SLURM's notation: `n[1-2]`; empty before the first."""

    @property
    def main(self) -> str:
        """Number of the array it belongs to, or its own."""
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
    """Jobs of `sacct --parsable2 --format=SACCT`; steps and ranges of waiting elements are left out."""
    jobs = []
    for line in text.splitlines():
        fields = line.split("|", 4)
        if len(fields) == 5 and re.fullmatch(r"\d+(_\d+)?", fields[0]) and fields[1]:
            number, state, code, nodes, name = fields
            nodes = "" if nodes == "None assigned" else nodes
            jobs.append(Job(number, name, state.split()[0], f"exit code {code}", nodes))
    return jobs


def parse_scontrol(text: str) -> list[Job]:
    """Jobs of `scontrol --oneliner show job`."""
    jobs = []
    for line in text.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "JobId" not in fields or "JobState" not in fields:
            continue
        array, index = fields.get("ArrayJobId"), fields.get("ArrayTaskId", "")
        number = f"{array}_{index}" if array and index.isdigit() else fields["JobId"]
        nodes = fields.get("NodeList", "").replace("(null)", "")
        code = f"exit code {fields.get('ExitCode')}"
        jobs.append(Job(number, fields.get("JobName", ""), fields["JobState"], code, nodes))
    return jobs
