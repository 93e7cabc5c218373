"""State of a run from its job: alive, waiting, held, dead or lost, with a reason.

`status.json` is believed while its job is consistent with it. If a job ended first, SLURM's record is all there is.
"""

from __future__ import annotations

import re

from harness.launch.slurm.records import Job
from harness.store.status import SUBMISSIONS, State, Status

WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
RUNNING = frozenset({"RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED", "RESIZING"})

_HELD = re.compile(r"held|hold|SPECIAL_EXIT", re.IGNORECASE)
_NEVER = re.compile(
    r"PartitionNodeLimit|PartitionTimeLimit|BadConstraints|DependencyNeverSatisfied|InvalidAccount|InvalidQOS|"
    r"AccountNotAllowed|QOSNotAllowed"
)

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
    where = f"SLURM job {job.id} is {job.state}"
    if job.state in WAITING:
        state = State.preempted if status.state is State.preempted else State.queued
        return state, f"{where} ({job.detail}){_advice(job)}"
    if job.state in RUNNING:
        on = f" on {job.nodes}" if job.nodes else ""
        return State.running, f"{where}{on}" + ("" if status.state is State.running else ", starting")
    if job.state not in ENDS and job.state not in FAILURES:
        return None
    state, why = ENDS.get(job.state, (State.failed, f" before the run could say why; its log: {log_of(status, job)}"))
    if status.state is State.preempted and state is not State.cancelled:
        return State.lost, f"{where} ({job.detail}); the run had saved, and was not put back into the queue"
    detail = f" ({job.detail})" if job.detail else ""
    return state, f"{where}{detail}{_on(job)}{why}"


def _on(job: Job) -> str:
    return f" on {job.nodes}" if job.nodes else ""


def _advice(job: Job) -> str:
    if _HELD.search(job.state) or _HELD.search(job.detail):
        return f": held; scontrol release {job.id}"
    if _NEVER.search(job.detail):
        return ": waiting will not help; cancel it, change cluster.*, and ask again"
    return ""


def log_of(status: Status, job: Job) -> str:
    """Log of the batch script, under the store's root; a job's name begins with its study."""
    study = job.name.removesuffix(f"-{status.submission}") if status.submission else job.name.rpartition("-")[0]
    return f"{study or '*'}/{SUBMISSIONS}/{status.submission or '*'}/{job.id}_0_log.out"
