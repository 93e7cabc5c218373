"""What SLURM knows of our jobs, with or without accounting.

squeue tells what waits or runs, sacct what has ended; where accounting is off, scontrol still remembers for some
minutes how a job ended. What none of them knows is gone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from harness.store.status import State, Status, age_s

TIMEOUT_S = 60.0
SUBMISSION_GRACE_S = 60.0
"""How long a submission may be without a job: sbatch is on its way."""

WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "SUSPENDED"}
)
RUNNING = frozenset({"RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED", "RESIZING"})


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


class SlurmError(RuntimeError):
    """A SLURM command failed."""


def _ask(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise SlurmError(f"{command[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def parse_squeue(text: str) -> list[Job]:
    """Jobs of `squeue --format=%F|%K|%T|%r|%j`, arrays expanded."""
    jobs = []
    for line in text.splitlines():
        main, index, state, reason, name = line.split("|", 4)
        jobs.append(Job(f"{main}_{index}" if index.isdigit() else main, name, state, reason))
    return jobs


def parse_sacct(text: str) -> list[Job]:
    """Jobs of `sacct --format=JobID,State,ExitCode,JobName`, parsable."""
    jobs = []
    for line in text.splitlines():
        number, state, code, name = line.split("|", 3)
        if re.fullmatch(r"\d+(_\d+)?", number):
            jobs.append(Job(number, name, state.split()[0], f"exit code {code}"))
    return jobs


def parse_scontrol(text: str) -> list[Job]:
    """Jobs of `scontrol --oneliner show job`."""
    jobs = []
    for line in text.splitlines():
        fields = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "JobId" not in fields:
            continue
        array, index = fields.get("ArrayJobId"), fields.get("ArrayTaskId", "")
        number = f"{array}_{index}" if array and index.isdigit() else fields["JobId"]
        jobs.append(Job(number, fields.get("JobName", ""), fields["JobState"], f"exit code {fields.get('ExitCode')}"))
    return jobs


class Scheduler:
    """One look at the queue, taken when first needed and kept."""

    def __init__(self) -> None:
        self._queue: dict[str, Job] | None = None
        self._ended: dict[str, Job | None] = {}

    def __call__(self, status: Status) -> tuple[State, str] | None:
        """What SLURM knows of a submitted run (`status.JobProbe`); None where it does not answer or adds nothing."""
        try:
            job = self.job_of(status)
        except SlurmError:
            return None
        if job is None:
            return _missing(status)
        return judge(status, job)

    def queue(self) -> Mapping[str, Job]:
        """Jobs that wait or run, by id. Raises `SlurmError` where the controller does not answer."""
        if self._queue is None:
            mine = (
                f"--user={os.getuid()}"  # all of a large cluster's jobs would take long; others' are asked one by one
            )
            text = _ask("squeue", "--noheader", "--array", "--states=all", mine, "--format=%F|%K|%T|%r|%j")
            jobs = (job for job in parse_squeue(text) if job.state in WAITING | RUNNING)
            self._queue = {job.id: job for job in jobs}
        return self._queue

    def job_of(self, status: Status) -> Job | None:
        """The job of a submitted run, found by its id or, where a crash lost that, by the token in its name."""
        if status.job:
            return self.queue().get(status.job) or self._ended_job(status.job)
        return self._by_token(status)

    def _by_token(self, status: Status) -> Job | None:
        jobs = [job for job in self.queue().values() if job.name.endswith(f"-{status.submission}")]
        for job in jobs:
            if job.id.partition("_")[2] in ("", str(status.index)):
                return job
        return None

    def _ended_job(self, number: str) -> Job | None:
        if number not in self._ended:
            self._ended[number] = _from_accounting(number) or _from_controller(number)
        return self._ended[number]


def _from_accounting(number: str) -> Job | None:
    try:
        text = _ask("sacct", "-n", "-P", "-X", "-j", number, "--format=JobID,State,ExitCode,JobName")
    except SlurmError:  # accounting is off
        return None
    return next((job for job in parse_sacct(text) if job.id == number), None)


def _from_controller(number: str) -> Job | None:
    try:
        text = _ask("scontrol", "--oneliner", "show", "job", number)
    except SlurmError:  # it has forgotten the job
        return None
    return next((job for job in parse_scontrol(text) if job.id == number), None)


def judge(status: Status, job: Job) -> tuple[State, str] | None:
    """What a job's state means for a run that `status.json` calls queued, running or preempted."""
    where = f"SLURM job {job.id} is {job.state}"
    if job.state in WAITING:
        state = State.preempted if status.state is State.preempted else State.queued
        return state, f"{where} ({job.detail})"
    if job.state in RUNNING:
        return None if status.state is State.running else (State.running, f"{where}, starting")
    if job.state == "CANCELLED":
        return State.cancelled, where
    if job.state in ("COMPLETED", "NODE_FAIL", "PREEMPTED", "REVOKED") or status.state is State.preempted:
        return State.lost, f"{where} ({job.detail}), and the run has not ended"
    return State.failed, f"{where} ({job.detail})"


def _missing(status: Status) -> tuple[State, str] | None:
    if status.job:
        return State.lost, f"SLURM no longer knows job {status.job}"
    if age_s(status.updated) < SUBMISSION_GRACE_S:
        return None
    return State.lost, "the submission was interrupted before SLURM had the job"


def probe() -> Scheduler | None:
    """A fresh look at SLURM; None on a machine without it."""
    return Scheduler() if shutil.which("squeue") else None


def cancel(jobs: Iterable[str]) -> None:
    """scancel. Raises `SlurmError`."""
    numbers = list(jobs)
    if numbers:
        _ask("scancel", *numbers)


def max_array_size() -> int:
    """Most elements of one array here; SLURM's default where it does not say."""
    try:
        match = re.search(r"MaxArraySize\s*=\s*(\d+)", _ask("scontrol", "show", "config"))
    except SlurmError:
        match = None
    return int(match.group(1)) if match else 1001
