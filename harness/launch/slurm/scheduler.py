"""SLURM's facts on our jobs, from its available commands.

squeue knows waiting, running and recent jobs, sacct ended ones (with accounting), scontrol the controller's memory. A
job unknown to the controller is gone; without any answer the status is believed, and while its job is consistent with
it. If a job ended first, SLURM's record is all there is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from harness.store.status import SUBMISSIONS, State, Status, age_s

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
    plain = {name: value for name, value in os.environ.items() if not name.startswith(FILTERS)}
    plain["SLURM_BITSTR_LEN"] = "0"
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
            env=plain if environment is None else environment,
        )
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(f"{command[0]}: {error}") from error
    except OSError as error:
        raise SlurmError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise SlurmError(f"{command[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


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


SUBMISSION_GRACE_S = 60.0
"""Seconds for a submission without a job: sbatch is running, or accounting late."""

Jobs = Mapping[str, Job]


class Scheduler:
    def __init__(self) -> None:
        self._answers: dict[tuple[str, str], Jobs | SlurmError] = {}
        self._mute: dict[str, SlurmError] = {}

    def __call__(self, status: Status) -> tuple[State, str] | None:
        """State of a submitted run (`status.JobProbe`); None without an answer or news."""
        try:
            job = self.job_of(status)
        except SlurmError:
            return None
        if job is not None:
            return judge(status, job)
        if status.job:
            return State.lost, f"SLURM no longer knows job {status.job}"
        late = age_s(status.updated) >= SUBMISSION_GRACE_S
        return (State.lost, "the submission was interrupted before SLURM had the job") if late else None

    def _jobs(self, command: str, main: str = "") -> Jobs:
        """Jobs by id, asked for once. Raises `SlurmError`: no answer; what timed out is not asked again."""
        key = command, main
        if command not in self._mute and key not in self._answers:
            try:
                self._answers[key] = {job.id: job for job in _ASKED[command](main)}
            except NoAnswer as error:
                self._mute[command] = error
            except SlurmError as error:
                self._answers[key] = error
        answer = self._mute.get(command) or self._answers[key]
        if isinstance(answer, SlurmError):
            raise answer
        return answer

    def job_of(self, status: Status) -> Job | None:
        """Job of a submitted run, by its id, or by the token in its name if a crash lost the id.

        Raises `SlurmError`: no command with the facts has answered.
        """
        heard = True
        try:
            queued = self._queued(status)
        except SlurmError:
            queued, heard = None, False
            if not status.job:
                raise
        if queued is not None and queued.state in WAITING | RUNNING:
            return queued
        number = queued.id if queued else status.job
        return self._ended_job(number, queued, status, heard=heard) if number else None

    def _queued(self, status: Status) -> Job | None:
        if status.job:
            return _of(status, self._jobs("squeue").get(status.job))
        named = [job for job in self._jobs("squeue").values() if _of(status, job)]
        return next((job for job in named if job.id.partition("_")[2] in ("", str(status.index))), None)

    def _ended_job(self, number: str, queued: Job | None, status: Status, *, heard: bool) -> Job | None:
        silent: SlurmError | None = None
        living: Job | None = None
        for command in ("sacct", "scontrol"):
            try:
                found = _of(status, self._jobs(command, number.partition("_")[0]).get(number))
            except SlurmError as error:
                silent = error
                continue
            if found is not None and (command == "scontrol" or found.state not in WAITING | RUNNING):
                return found
            living = living or found  # accounting lags behind: of what lives it knows less than the controller
        if living is not None and silent is not None:
            return living
        if silent is not None and not heard:
            raise silent  # likewise, that it knows nothing means little
        return queued


def _of(status: Status, job: Job | None) -> Job | None:
    """Job, if its name ends in this run's token: numbers restart where a controller lost its state."""
    ours = job is None or not status.submission or job.name.endswith(f"-{status.submission}")
    return job if ours else None


def _queued(_: str) -> list[Job]:
    """Waiting, running and recent jobs of this user: all of a large cluster's would take long."""
    mine = f"--user={os.getuid()}"
    return parse_squeue(ask("squeue", "--noheader", "--array", "--states=all", mine, f"--format={SQUEUE}"))


def _from_controller(main: str) -> list[Job]:
    try:
        text = ask("scontrol", "--oneliner", "show", "job", main)
    except SlurmError as error:
        if "Invalid job id" in str(error):  # an answer: the controller has forgotten the job
            return []
        raise
    jobs = parse_scontrol(text)
    if text.strip() and not jobs:
        raise SlurmError(f"scontrol: no answer of SLURM's: {text[:200]!r}")
    return jobs


_ASKED: Mapping[str, Callable[[str], list[Job]]] = {
    "squeue": _queued,
    "sacct": lambda main: parse_sacct(ask("sacct", "-n", "-P", "-X", "-j", main, f"--format={SACCT}")),
    "scontrol": _from_controller,
}


def probe() -> Scheduler | None:
    return Scheduler() if any(map(shutil.which, ("squeue", "scontrol", "sacct"))) else None


def max_array_size() -> int:
    try:
        text = ask("scontrol", "show", "config")
    except SlurmError:
        text = ""
    found = re.findall(r"(?:MaxArraySize\s*=\s*|\bmax_array_tasks=)(\d+)", text)
    return max(1, min(map(int, found), default=1001))  # 0: no arrays here, so each cell is a job of its own


WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
RUNNING = frozenset({"RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED", "RESIZING"})

ENDS: dict[str, tuple[State, str]] = {
    "CANCELLED": (State.cancelled, ""),
    "TIMEOUT": (
        State.failed,
        ": the time limit (cluster.time_min) came before the run had saved and put itself back (cluster.grace_s)",
    ),
    "OUT_OF_MEMORY": (State.failed, ": a node ran out of the memory that was asked for (cluster.mem_gb)"),
    "DEADLINE": (State.failed, ": its deadline came"),
    "NODE_FAIL": (State.lost, ": a node failed, and the job was not put back"),
    "BOOT_FAIL": (State.lost, ": a node did not start"),
    "PREEMPTED": (State.lost, ": another job took its nodes, and it was not put back"),
    "COMPLETED": (State.lost, ", and the run has not ended"),
}

FAILURES = frozenset({"FAILED", "LAUNCH_FAILED", "RECONFIG_FAIL"})


def judge(status: Status, job: Job) -> tuple[State, str] | None:
    """State and reason of a run whose `status.json` is queued, running or preempted; None: the job adds nothing."""
    where, on = f"SLURM job {job.id} is {job.state}", f" on {job.nodes}" if job.nodes else ""
    if job.state in WAITING:
        state = State.preempted if status.state is State.preempted else State.queued
        return state, f"{where} ({job.detail})"
    if job.state in RUNNING:
        return State.running, f"{where}{on}" + ("" if status.state is State.running else ", starting")
    if job.state not in ENDS and job.state not in FAILURES:
        return None
    state, why = ENDS.get(job.state, (State.failed, f" before the run could say why; its log is in {SUBMISSIONS}"))
    if status.state is State.preempted and state is not State.cancelled:
        return State.lost, f"{where} ({job.detail}); the run had saved, and was not put back into the queue"
    detail = f" ({job.detail})" if job.detail else ""
    return state, f"{where}{detail}{on}{why}"
