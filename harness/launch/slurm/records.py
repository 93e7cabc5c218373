"""A job as SLURM's commands print it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

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
