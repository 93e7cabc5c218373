"""What SLURM says, and what it means for a run. Texts are those of 22.05."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from harness.launch.slurm import scheduler
from harness.launch.slurm.scheduler import Job, Scheduler, judge, parse_sacct, parse_scontrol, parse_squeue
from harness.store.status import Keeper, State, Status
from tests.support.mutants import each, found_by, slips


def of(state=State.running, job="7_1", age_s=0, **fields):
    updated = (datetime.now(UTC) - timedelta(seconds=age_s)).isoformat()
    return Status(state, "r", 0, Keeper.slurm, job=job, updated=updated, **fields)


def test_squeue():
    text = "7|1|RUNNING|None|n[1-2]|s|with|pipes-ab\n8|N/A|PENDING|Resources||one-cd\nslurm says something else\n"
    assert parse_squeue(text) == [
        Job("7_1", "s|with|pipes-ab", "RUNNING", "None", "n[1-2]"),
        Job("8", "one-cd", "PENDING", "Resources"),
    ]


def test_sacct():
    text = (
        "7_1|CANCELLED by 0|0:15|None assigned|s-ab\n7_[2-3]|PENDING|0:0|None assigned|s-ab\n8|FAILED|1:0|n1|one\n"
        "8.batch|FAILED|1:0|n1|batch\n"
    )
    assert parse_sacct(text) == [
        Job("7_1", "s-ab", "CANCELLED", "exit code 0:15"),
        Job("7_2", "s-ab", "PENDING", "exit code 0:0"),
        Job("7_3", "s-ab", "PENDING", "exit code 0:0"),
        Job("8", "one", "FAILED", "exit code 1:0", "n1"),
    ]


def test_scontrol():
    text = (
        "JobId=9 ArrayJobId=7 ArrayTaskId=1 JobName=s-ab UserId=root(0) JobState=FAILED Reason=NonZeroExitCode "
        "Restarts=0 ExitCode=1:0 NodeList=n2\n"
        "JobId=8 JobName=one JobState=COMPLETED ExitCode=0:0 NodeList=(null)\n"
    )
    assert [(job.id, job.state, job.detail, job.nodes) for job in parse_scontrol(text)] == [
        ("7_1", "FAILED", "exit code 1:0", "n2"),
        ("8", "COMPLETED", "exit code 0:0", ""),
    ]


@pytest.mark.parametrize(
    ("known", "slurm", "state", "said"),
    [
        (State.queued, "PENDING", State.queued, "PENDING (x)"),
        (State.queued, "RUNNING", State.running, "RUNNING on n1, starting"),
        (State.running, "RUNNING", State.running, "RUNNING on n1"),
        (State.running, "PENDING", State.queued, ""),
        (State.preempted, "PENDING", State.preempted, ""),
        (State.preempted, "RUNNING", State.running, ""),
        (State.running, "FAILED", State.failed, ""),
        (State.queued, "FAILED", State.failed, "its log is in .submit"),
        (State.running, "OUT_OF_MEMORY", State.failed, "cluster.mem_gb"),
        (State.running, "TIMEOUT", State.failed, "cluster.time_min"),
        (State.running, "CANCELLED", State.cancelled, ""),
        (State.queued, "CANCELLED", State.cancelled, ""),
        (State.running, "NODE_FAIL", State.lost, "on n1: a node failed"),
        (State.running, "COMPLETED", State.lost, ""),
        (State.preempted, "FAILED", State.lost, "had saved, and was not put back"),
        (State.preempted, "PREEMPTED", State.lost, ""),
        (State.running, "SUSPENDED", State.running, ""),
        (State.queued, "RESV_DEL_HOLD", State.queued, ""),
        (State.running, "BOOT_FAIL", State.lost, ""),
        (State.running, "DEADLINE", State.failed, ""),
    ],
)
def test_what_a_jobs_state_means(known, slurm, state, said):
    found = judge(of(known), Job("7_1", "s", slurm, "x", "n1"))
    assert found is not None
    assert found[0] is state
    assert f"SLURM job 7_1 is {slurm}" in found[1]
    assert said in found[1]


class Commands:
    """Stands in for squeue, sacct and scontrol; a text to answer with, an exception to raise, `error: ...` or None to
    fail."""

    def __init__(self, **texts):
        self.texts, self.asked = texts, []

    def __call__(self, command, **_):
        self.asked.append(command[0])
        text = self.texts.get(command[0])
        if isinstance(text, Exception):
            raise text
        if text is None or text.startswith("error: "):
            return subprocess.CompletedProcess(command, 1, "", text or "no")
        return subprocess.CompletedProcess(command, 0, text, "")


@pytest.fixture
def commands(monkeypatch):
    def install(**texts):
        fake = Commands(**texts)
        monkeypatch.setattr(scheduler.subprocess, "run", fake)
        return fake

    return install


def test_one_look_at_the_queue_for_many_runs_and_one_at_accounting_for_an_array(commands):
    fake = commands(squeue="7|1|PENDING|Priority||s\n", sacct="8_1|TIMEOUT|0:0|n1|s\n8_2|OUT_OF_MEMORY|0:125|n1|s\n")
    look = Scheduler()
    assert look(of(State.queued)) == (State.queued, "SLURM job 7_1 is PENDING (Priority)")
    states = [look(of(job=job)) for job in ("8_1", "8_2")]
    assert [found and found[0] for found in states] == [State.failed, State.failed]
    assert fake.asked == ["squeue", "sacct"]


TIMED_OUT = "error: slurm_load_jobs error: Socket timed out on send/recv operation"
GONE = "error: slurm_load_jobs error: Invalid job id specified"
ENDED = "JobId=9 ArrayJobId=7 ArrayTaskId=1 JobName=s JobState=FAILED ExitCode=1:0\n"
WAITING = (
    "JobId=7 ArrayJobId=7 ArrayTaskId=0,2-8:2,11-12%4 ArrayTaskThrottle=4 JobName=s-0badcafe JobState=PENDING "
    "Reason=Priority ExitCode=0:0 Comment=JobState=FAILED JobState=FAILED\n"
)
"""Elements that wait stand in one line, under their numbers' range."""
ANOTHERS = WAITING.replace("ArrayTaskId=0,2-8:2,11-12%4", "ArrayTaskId=0-3%4").replace("Priority", "PartitionDown")
OURS, QUEUED = {"submission": "0badcafe"}, State.queued
ALIVE = "7_1|RUNNING|0:0|n1|s-0badcafe\n"
LOST = (State.lost, "SLURM no longer knows job 7_1")
LOOKS = {
    "the controller alone remembers": (
        partial(of),
        {"squeue": "", "scontrol": ENDED},
        (State.failed, "(exit code 1:0)"),
    ),
    "another user's": (
        partial(of, QUEUED, "7_3"),
        {"squeue": "", "sacct": "7_[0-3%4]|PENDING|0:0|None assigned|s-ab\n", "scontrol": ANOTHERS},
        (QUEUED, "7_3 is PENDING (PartitionDown)"),
    ),
    "squeue alone": (
        partial(of),
        {"squeue": "7|1|TIMEOUT|Limit|n1|s\n"},
        (State.failed, "7_1 is TIMEOUT (Limit) on n1"),
    ),
    "sacct alone": (partial(of), {"sacct": "7_1|NODE_FAIL|0:0|n1|s\n"}, (State.lost, "NODE_FAIL")),
    "sacct alone, which does not know": (partial(of, job="8"), {"sacct": "7_1|NODE_FAIL|0:0|n1|s\n"}, None),
    "nobody": (partial(of), {"squeue": "", "scontrol": GONE}, LOST),
    "silence": (partial(of), {}, None),
    "one of a range": (
        partial(of, QUEUED, "7_4", **OURS),
        {"squeue": TIMED_OUT, "scontrol": WAITING},
        (QUEUED, "Priority"),
    ),
    "the last of a range": (
        partial(of, QUEUED, "7_12", **OURS),
        {"squeue": TIMED_OUT, "scontrol": WAITING, "sacct": ""},
        (QUEUED, "Priority"),
    ),
    "a range of sacct": (
        partial(of, QUEUED, "7_3", **OURS),
        {"squeue": TIMED_OUT, "sacct": "7_[0-3%4]|PENDING|0:0|None assigned|s-0badcafe\n", "scontrol": TIMED_OUT},
        (QUEUED, "PENDING"),
    ),
    "no answer of SLURM's": (
        partial(of, QUEUED, "7_1", **OURS),
        {"squeue": TIMED_OUT, "sacct": ALIVE, "scontrol": "<html>502</html>"},
        (State.running, "starting"),
    ),
    "alive by accounting alone": (partial(of, **OURS), {"squeue": "", "scontrol": GONE, "sacct": ALIVE}, LOST),
    "a submission": (partial(of, QUEUED, "", 5, **OURS), {"squeue": ""}, None),
    "an old submission": (partial(of, QUEUED, "", 300, **OURS), {"squeue": ""}, (State.lost, "interrupted before")),
} | {
    f"a newer word, {word}": (
        partial(of),
        {"squeue": f"7|1|{word}|None|n1|s\n", "sacct": f"7_1|{word}|0:0|n1|s\n"},
        None,
    )
    for word in ("EXPEDITING", "RUNNING,COMPLETING", "WHATEVER_26_05_SAYS")
}
"""What is known of a run, what the commands say, and what is found; None: status.json is believed."""


@pytest.mark.parametrize("look", LOOKS)
def test_what_a_look_finds(commands, look):
    known, answers, wanted = LOOKS[look]
    commands(**answers)
    found = Scheduler()(known())
    assert (found and found[0]) is (wanted and wanted[0])
    assert not wanted or wanted[1] in found[1]


def test_a_run_whose_number_was_lost_is_found_by_its_token(commands):
    commands(squeue="7|0|PENDING|None||s-0badcafe\n7|1|PENDING|None||s-0badcafe\n6|1|PENDING|None||s-1badcafe\n")
    job = Scheduler().job_of(of(State.queued, "", submission="0badcafe", index=1))
    assert job is not None
    assert job.id == "7_1"


def test_another_job_under_the_number_of_a_run_is_not_its_own(commands):
    """A controller that lost its state numbers jobs from 1 again; `cancel` would end a stranger."""
    commands(squeue="7|1|RUNNING|None|n1|jupyter\n", sacct="7_1|RUNNING|0:0|n1|jupyter\n", scontrol=GONE)
    assert Scheduler().job_of(of(submission="0badcafe")) is None
    assert Scheduler().job_of(of()) is not None, "a step of somebody's own job has no token"


def test_commands_that_do_not_answer_are_waited_for_once_a_look(commands):
    late = subprocess.TimeoutExpired("x", 60)
    fake = commands(squeue=late, sacct=late, scontrol=late)
    look = Scheduler()
    assert [look(of(job=f"{number}_1")) for number in range(7, 12)] == [None] * 5
    assert fake.asked == ["squeue", "sacct", "scontrol"]


def test_people_who_filter_their_queue_hide_no_job_from_us(monkeypatch, tmp_path):
    """The command itself is asked: what it is given, and bytes that are no text in its answer."""
    (tmp_path / "squeue").write_text("#!/bin/sh\nenv; read word; printf 'caf\\351 %s' \"$word\"\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SQUEUE_PARTITION", "debug")
    monkeypatch.setenv("SCANCEL_INTERACTIVE", "1")
    monkeypatch.setenv("SLURM_CLUSTERS", "here")
    told = scheduler.ask("squeue")
    assert "SLURM_BITSTR_LEN=0" in told
    assert "SLURM_CLUSTERS=here" in told
    assert "SQUEUE_" not in told
    assert "SCANCEL_" not in told
    assert told.endswith("caf\ufffd "), "nothing to read: whoever is asked on a terminal does not wait for a word"


def test_the_limit_of_an_array(commands):
    commands(scontrol="MaxArraySize            = 77\n")
    assert scheduler.max_array_size() == 77
    commands(scontrol="MaxArraySize            = 77\nSchedulerParameters     = bf_interval=1,max_array_tasks=5,x\n")
    assert scheduler.max_array_size() == 5
    commands(scontrol="MaxArraySize            = 0\n")
    assert scheduler.max_array_size() == 1, "a site without arrays"
    commands()
    assert scheduler.max_array_size() == 1001


SLIPS = slips("""
    elements: Of a range that waits one element is seen
        launch.slurm.scheduler._numbers: max(first, last) + 1 => first + 1
    runaway: It wins
        launch.slurm.scheduler.Scheduler._ended_job: living is not None and silent => living is not None or silent
    another's job: A number is taken for a job's name
        launch.slurm.scheduler._of: job is None or not status => True or not status
    newer words: What nobody knows is a failure
        launch.slurm.scheduler.judge: job.state not in ENDS and => False and
    once a look: Every array waits again
        launch.slurm.scheduler.Scheduler._jobs: command not in self._mute and =>
    names with separators: A name that contains the separator hides its job
        launch.slurm.scheduler.parse_squeue: line.split("|", 5) => line.split("|")
    none assigned: A job that waits is said to run on nodes of that name
        launch.slurm.scheduler.parse_sacct: if nodes == "None assigned" => if nodes == "None"
    the last of a name: What a comment says of a job is believed
        launch.slurm.scheduler.parse_scontrol: dict(reversed(words)) => dict(words)
    the element's own number: An element of an array goes by the number of its own job
        launch.slurm.scheduler.parse_scontrol: fields.get("ArrayJobId", fields["JobId"]) => fields["JobId"]
    saved work is queued: A preempted run that waits is called queued
        launch.slurm.scheduler.judge: if status.state is State.preempted else => if not status else
    too early: A submission is lost while sbatch may still answer, and never later
        launch.slurm.scheduler.Scheduler.__call__: >= SUBMISSION_GRACE_S => < SUBMISSION_GRACE_S
    any element: Of an array any element is a run's own
        launch.slurm.scheduler.Scheduler._queued: ("", str(status.index)) => map(str, range(99))
    squeue alone: Who is silent in squeue is not asked for elsewhere
        launch.slurm.scheduler.Scheduler.job_of: if not status.job => if status
    accounting first: What accounting calls alive is not asked of the controller
        launch.slurm.scheduler.Scheduler._ended_job: found.state not in WAITING | RUNNING => found
    no arrays: A site without arrays is given one of no elements
        launch.slurm.scheduler.max_array_size: max(1, => max(0,
""")


@pytest.mark.parametrize("name", each("slurm", SLIPS))
def test_mutants_are_found(name, commands):
    texts = test_squeue, test_sacct, test_scontrol, test_what_a_jobs_state_means, test_the_limit_of_an_array
    names = (
        test_another_job_under_the_number_of_a_run_is_not_its_own,
        test_a_run_whose_number_was_lost_is_found_by_its_token,
    )
    late = test_commands_that_do_not_answer_are_waited_for_once_a_look
    found_by(SLIPS[name], *texts, test_what_a_look_finds, *names, late, commands=commands)
