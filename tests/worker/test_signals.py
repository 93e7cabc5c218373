"""Requests to stop, and what they mean."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext

import pytest

from harness.store import commands, failure, status
from harness.store.rank_place import WARNING, RankPlace
from harness.store.rundir import Store, request_cancel
from harness.store.status import Keeper, State, Status
from harness.watchdog import watchdog
from harness.worker import rank, stop
from harness.worker.report import Reporter
from harness.worker.stop import Fate, StopFlag, judge
from tests.launch.cells import make_cell
from tests.support.mutants import finds


@pytest.fixture
def flag():
    """Listening as in a terminal, also where `nohup` had the tests ignore its end."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    made = StopFlag()
    made.listen()
    yield made
    made.restore()
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT])
def test_a_signal_only_raises_the_flag(flag, number):
    """However often it comes: where a launcher watches, it sees to the second Ctrl-C. The first one is the reason."""
    assert not flag()
    for asked in (number, number, signal.SIGTERM):
        os.kill(os.getpid(), asked)
    assert flag()
    assert flag.first is number
    assert flag.reason == ("interrupted by Ctrl-C" if number is signal.SIGINT else f"{number.name} received")


def test_the_second_ctrl_c_ends_a_rank_without_a_launcher():
    """And handlers are given back."""
    before = signal.getsignal(signal.SIGINT)
    flag = StopFlag(signal.default_int_handler)
    flag.listen()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        assert flag.first is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise AssertionError("the first one ends it") from None
    finally:
        flag.restore()
    assert signal.getsignal(signal.SIGINT) == before


IGNORED = """
import os, signal
from harness.launch.local.run import listening
from harness.worker.stop import StopFlag
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
os.kill(os.getpid(), signal.SIGUSR2)
early = StopFlag()
early.listen()
assert early(), "a signal that came before it listened is lost"
early.restore()
flag, numbers = StopFlag(), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
for number in numbers:
    signal.signal(number, signal.SIG_IGN)
with listening() as asked:
    for number in numbers:
        os.kill(os.getpid(), number)
    assert not asked, asked
    flag.listen()
    os.kill(os.getpid(), signal.SIGHUP)
    assert not flag(), flag.reason
    os.kill(os.getpid(), signal.SIGTERM)
    assert flag(), "a launcher's word"
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with listening() as asked:
    os.kill(os.getpid(), signal.SIGHUP)
    assert asked == [signal.SIGHUP], asked
"""


def test_what_was_ignored_at_start_stays_ignored() -> None:
    """As nohup ignores a terminal's end, and a shell Ctrl-C for what it starts in the background; and an early one is
    not lost."""
    subprocess.run([sys.executable, "-c", IGNORED], timeout=20, check=True)


def test_cancelling_by_word(flag, tmp_path, monkeypatch):
    monkeypatch.setattr("harness.worker.stop.POLL_S", 0.01)
    run = Store(tmp_path).create(make_cell(tmp_path))
    attempt = run.new_attempt()
    flag.watch_cancel(run.path, attempt)
    request_cancel(run.path, attempt)
    deadline = time.monotonic() + 5
    while not flag():
        assert time.monotonic() < deadline
    assert flag.cancelled


SIBLINGS = "JobId=11 ArrayJobId=9 ArrayTaskId=0 JobState=CANCELLED Restarts=0\n{}\n" + (
    "JobId=12 ArrayJobId=9 ArrayTaskId=1 JobState=COMPLETING Restarts=3\n"
    "JobId=13 ArrayJobId=9 ArrayTaskId=3-5%2 JobState=PENDING Restarts=0\n"
)
"""All elements of an array, as scontrol tells them when it is asked for the last one, which has the array's number."""


@pytest.mark.parametrize(
    ("state", "restarts", "before", "fate"),
    [
        ("COMPLETING", 0, 0, Fate(cancelled=True)),
        ("CANCELLED", 0, 0, Fate(cancelled=True)),
        ("COMPLETING", 1, 0, Fate(requeued=True)),
        ("COMPLETING", 1, 1, Fate(cancelled=True)),
        ("RUNNING", 0, 0, Fate()),
        ("SIGNALING", 0, 0, Fate()),
    ],
)
def test_cancelled_or_preempted(state, restarts, before, fate):
    told = f"JobState={state} Reason=None Restarts={restarts} Comment=JobState=FAILED"
    assert judge(f"JobId=1 {told}", "1", before) == fate
    assert judge(SIBLINGS.format(f"JobId=9 ArrayJobId=9 ArrayTaskId=2 {told}"), "9_2", before) == fate
    assert judge(f"JobId=2 {told}", "1", before) == judge("", "1", before) == Fate()
    assert stop.fate_of(RankPlace(0, 2, 0, "", "torchrun")) == Fate(), "outside of SLURM nobody is asked"


SCONTROL = """#!/usr/bin/env python
import os, pathlib, signal
asked = pathlib.Path(__file__).with_name("asked")
asked.write_text(asked.read_text() + "." if asked.exists() else ".")
for number in (signal.SIGUSR2, signal.SIGTERM):
    os.kill(os.getpid(), number)
raise SystemExit(len(asked.read_text()) < {works_at})
"""


@pytest.mark.parametrize(
    ("works_at", "shielded", "asked", "taken"),
    [(1, True, 1, True), (3, True, 3, True), (9, True, 3, False), (1, False, 3, False)],
)
def test_a_job_is_put_back_whatever_signals_its_scontrol_gets(
    tmp_path, monkeypatch, capsys, works_at, shielded, asked, taken
):
    """SLURM signals every process of a step, several times; and a busy controller may lose a request."""
    program = tmp_path / "scontrol"
    program.write_text(SCONTROL.format(works_at=works_at))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(stop, "PAUSE_S", 0.0)
    if not shielded:
        monkeypatch.setattr(stop, "stop_signals_blocked", nullcontext)
    assert stop.requeue(RankPlace(0, 2, 0, "", "slurm", "3_0"), tmp_path / "a run") is taken
    assert len((tmp_path / "asked").read_text()) == asked
    again = commands.verb(f"retry '{tmp_path}/a run'")
    told = capsys.readouterr().err
    assert bool(told) is not taken
    assert taken or told.endswith(f"; resume with: {again}\n")


@pytest.fixture
def reporter(tmp_path):
    """make(rank, **place) -> a reporter of attempt 0 of one run."""
    run = Store(tmp_path).create(make_cell(tmp_path))
    run.new_attempt()

    def make(rank, launcher="slurm", job="7"):
        return Reporter(run.path, 0, RankPlace(rank, 2, rank, "s", launcher, job))

    return make


def raised(error):
    try:
        raise error
    except Exception as caught:
        return caught


def test_without_a_launcher_the_failing_rank_says_so_itself(reporter):
    reporter(0).started()
    reporter(1).failed(raised(KeyError("x")))
    found = status.read(reporter(1).run)
    assert (found.state, found.reason) == (State.failed, "rank 1: KeyError: 'x'")
    assert (found.keeper, found.job) == (Keeper.slurm, "7")


def test_what_the_watchdog_logs_is_shown_at_the_front_end(reporter, capsys, monkeypatch):
    def run(*_):
        watchdog.LOG.error("ranks 0 and 1 wait for rank 2")
        return 0

    monkeypatch.setattr(rank, "_run", run)
    one = reporter(0)
    assert rank.main(one.run, 0, one.place) == 0
    assert f"{WARNING}ranks 0 and 1 wait for rank 2\n" in capsys.readouterr().err


def test_an_echo_waits_for_the_cause(reporter, monkeypatch):
    monkeypatch.setattr("harness.worker.report.ECHO_PATIENCE_S", 0.2)
    reporter(0).started()
    first, second = reporter(0), reporter(1)
    first.failed(raised(RuntimeError("Connection closed by peer")))
    assert status.read(first.run).reason.startswith("rank 0: RuntimeError")
    second.failed(raised(KeyError("x")))
    assert (first.folder / "error.txt").read_text().startswith("rank 1 failed first")


def test_a_cancelled_run_stays_cancelled_and_a_job_that_comes_too_late_does_nothing(reporter, monkeypatch):
    one = reporter(0)
    one.started()
    assert not one.is_superseded()
    status.move(one.run, 0, State.cancelled, "by hand")
    one.ended(State.preempted, "saved")
    assert status.read(one.run).reason == "by hand"
    assert reporter(1).is_superseded()
    status.write(one.run, Status(State.queued, "r", 1))
    assert one.is_superseded()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("harness.store.files.os.fsync", full)
    monkeypatch.setattr(sys.stderr, "write", full)
    one.warn("nobody hears it")
    one.failed(raised(KeyError("neither the log nor error.txt can be written")))


HANG = """
import sys, time
from pathlib import Path
from harness.store.rank_place import WARNING, RankPlace
from harness.worker.report import Reporter
reporter = Reporter(Path(sys.argv[1]), 0, RankPlace(0, 2, 0, "s", "slurm", "7"))
reporter.started()
with reporter.watching(2.0):
    for step in (9, 10):
        time.sleep(1.2)
        reporter.step({"step": step, "loss": 1.0})
    time.sleep(1.2)
    reporter.alive()
    def stuck_here():
        time.sleep(60)
    stuck_here()
"""


def test_a_rank_ends_its_own_hang_with_its_stack_and_a_peer_tells_why(reporter):
    one = reporter(0)
    with one.watching(60):
        one.step({"step": 1, "loss": 1.0})
        assert failure.collect(one.folder) == []
    assert not list(one.folder.glob("stacks-*")), "a rank that ends otherwise leaves none"
    done = subprocess.run([sys.executable, "-c", HANG, str(one.run)], timeout=20, check=False, capture_output=True)
    assert done.returncode == 1
    assert "in stuck_here" in (one.folder / "stacks-rank0.txt").read_text()
    reporter(1).failed(raised(RuntimeError("Connection closed by peer")))
    found = status.read(one.run)
    assert (found.state, found.reason) == (State.failed, "rank 0: hang: no step for 0:00:02 after step 10")


def test_a_rehearsed_stop_comes_after_so_many_steps() -> None:
    flag = StopFlag()
    flag.rehearse(2)
    assert [flag(), flag(), flag.reason] == [False, True, "rehearsed (launch.preempt_at)"]


test_a_mutant_is_found = finds(
    "Ends of a run",
    test_the_second_ctrl_c_ends_a_rank_without_a_launcher="""
        the second waits, too: A second Ctrl-C does not end a rank
            worker.stop.StopFlag._on_signal: self._after_interrupt is not None => False
        the first ends: Nothing is saved
            worker.stop.STOP_SIGNALS: [each for each in was if each is not signal.SIGINT]
    """,
    test_a_rank_ends_its_own_hang_with_its_stack_and_a_peer_tells_why="""
        no hang: A rank that was killed counts as hung at its last step
            store.failure.collect: if _HANG.match(text) else None =>
    """,
)
