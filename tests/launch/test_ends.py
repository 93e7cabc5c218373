"""How a local run ends, whatever its ranks do. The ranks are fakes without torch; the launcher is real."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import nullcontext
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.launch.local import ranks as ranks_module
from harness.launch.local.run import Ended, LocalRun, Tail
from harness.launch.opening import Sources, open_here
from harness.store import status
from harness.store.files import is_held
from harness.store.rank_place import stop_reason
from harness.store.rundir import Store, request_cancel
from harness.store.status import State
from tests.launch.cells import fake_ranks, make_cell
from tests.support.mutants import finds, kills


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start("what rank 0 does|what rank 1 does", *overrides) -> LocalRun; whatever is left is ended after the test."""
    runs: list[LocalRun] = []

    def begin(script: str, *overrides: str) -> LocalRun:
        fake_ranks(monkeypatch, script)
        cell = make_cell(tmp_path, f"mesh.world_size={script.count('|') + 1}", *overrides)
        opened = open_here(Store(tmp_path), cell, Sources({"sources_digest": "x"}, ""), None)
        assert isinstance(opened, tuple), opened
        runs.append(LocalRun(*opened, lambda _: None))
        return runs[-1]

    yield begin
    for run in runs:
        for rank in run.ranks:
            rank.kill()


def without_server() -> None:
    """As in a process that has not started the server of ranks."""
    forkserver._forkserver.__init__()  # type: ignore[attr-defined, misc] # multiprocessing has no other way


def finish(run: LocalRun, timeout_s: float = 30) -> Ended:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        ended = run.poll()
        if ended is not None:
            return ended
        time.sleep(0.02)
    raise AssertionError("the run did not end")


def await_files(run: LocalRun, *names: str) -> None:
    deadline = time.monotonic() + 20
    while not all((run.opened.run.path / name).exists() for name in names):
        assert time.monotonic() < deadline
        assert (ended := run.poll()) is None, f"over before {', '.join(names)}: {ended}"
        time.sleep(0.02)


def effective(study: Path) -> status.Status:
    """State of the one run, as another process finds it."""
    found = status.effective(next(study.glob("tiny*")))
    assert found is not None
    return found


def state_of(run: LocalRun) -> status.Status:
    found = run.opened.run.status()
    assert found is not None
    return found


ENDS = {signal.SIGTERM: 75, signal.SIGHUP: 75, signal.SIGINT: 130}
CAUSES = {
    "stuck|raise|stuck": ("rank 1: KeyError: 'the cause'", "rank 1 failed first:\n\nTraceback"),
    "echo|echo|raise": ("rank 2: KeyError: 'the cause'", "then rank 0: RuntimeError: [gloo"),
    "echo|kill": ("rank 1: killed by SIGKILL", "then rank 0: RuntimeError: [gloo"),
    "child|exit7": ("rank 1: exited with code 7", "a last word in the log"),
    "done|sleep": ("rank 1 did not end with the others", ""),
}
"""What ranks do -> the reason, and what the report tells: of a killed one, of one without a traceback its log."""


@pytest.mark.parametrize("script", CAUSES)
def test_a_failing_rank_takes_the_others_down_with_the_cause_first(start, script):
    """And with them what they started, within a grace time where they only stay behind."""
    run = start(script, "launch.stop_grace_s=1")
    began = time.monotonic()
    ended = finish(run)
    assert time.monotonic() - began < 16  # on a loaded machine; the others would stay for ever
    assert (ended.state, ended.exit_code) == (State.failed, 1)
    assert ended.reason.startswith(CAUSES[script][0])
    assert CAUSES[script][1] in ended.report
    assert ended.report.count("Traceback") == ("raise" in script)
    assert not ended.report or (run.opened.run.attempt_dir(0) / "error.txt").read_text() == ended.report
    assert state_of(run).reason == ended.reason
    children = [int(file.read_text()) for file in run.opened.run.path.glob("child*")]
    assert all(gone(pid) for pid in [*children, *(rank.pid for rank in run.ranks)])


@pytest.mark.parametrize("asked", ENDS)
@pytest.mark.parametrize("script", ["save|save", "save|follow", "follow|save"])
def test_asked_to_stop_all_save(start, script, asked):
    """And the record names the signal that came, also where a rank was told by another one before its own came."""
    run = start(script)
    await_files(run, "pid0", "pid1")
    run.stop(asked)
    ended = finish(run)
    state = State.cancelled if asked is signal.SIGINT else State.preempted
    assert (ended.state, ended.exit_code, state_of(run).state) == (state, ENDS[asked], state)
    assert ended.reason.endswith("; saved at step 1")
    assert script != "save|save" or ended.reason.startswith(stop_reason(asked))


def stopped_early(start, moments):
    """Exit codes of runs that were asked to stop so many seconds after their ranks were started, and why."""
    found = []
    for number, moment in enumerate(moments):
        asked = list(ENDS)[number % len(ENDS)]
        run = start("save|save", f"train.seed={number}")
        time.sleep(moment)
        run.stop(asked)
        ended = finish(run)
        found.append((ended.exit_code - ENDS[asked], ended.reason.partition("; ")[2]))
    return found


MOMENTS = (0.0, 0.01, 0.03, 0.06, 0.1, 0.2)


def test_a_rank_that_does_not_listen_yet_saves_all_the_same(start):
    assert stopped_early(start, MOMENTS) == [(0, "saved at step 1")] * len(MOMENTS)


@kills(
    "Ends of a run", "signals reach what does not listen", "A rank that is asked to stop while it imports has failed"
)
def test_a_signal_that_reaches_a_starting_rank_is_found(start, monkeypatch):
    monkeypatch.setattr(ranks_module, "stop_signals_blocked", nullcontext)
    without_server()
    assert stopped_early(start, MOMENTS[:3]) != [(0, "saved at step 1")] * 3
    without_server()


TERM, WORD = signal.SIGTERM, "cancelled on request"


@pytest.mark.parametrize(
    ("script", "grace_s", "asks", "code", "reason"),
    [
        ("save|sleep", 1, [TERM], 75, "SIGTERM received; not saved within launch.stop_grace_s=1"),
        ("sleep|sleep", 600, [TERM, TERM], 75, "SIGTERM received; not saved"),
        ("sleep|sleep", 600, [signal.SIGINT, "Ctrl-C"], 130, "interrupted by Ctrl-C; not saved"),
        ("stuck|stuck", 600, ["Ctrl-C"], 130, "Ctrl-C"),
        ("stuck|stuck", 600, [WORD], 130, WORD),
    ],
)
def test_who_does_not_save_is_killed_in_time_or_at_once(start, script, grace_s, asks, code, reason):
    run = start(script, f"launch.stop_grace_s={grace_s}")
    await_files(run, "pid0", "pid1")
    for ask in asks:
        if ask is WORD:
            request_cancel(run.opened.run.path, 0)
        else:
            (run.stop if isinstance(ask, signal.Signals) else run.cancel)(ask)
    ended = finish(run, 10)
    assert (ended.exit_code, ended.reason) == (code, reason)
    assert state_of(run).state is ended.state


def test_a_hang_shows_the_stack_of_every_rank(start):
    """Also of one that holds the interpreter lock, in C."""
    run = start("sleep|stuck", "launch.hang_timeout_s=4")
    await_files(run, "pid0", "pid1")
    ended = finish(run, 30)
    assert ended.state is State.failed
    assert re.fullmatch("rank [01]: hang: no step for 0:00:04 after step 1", ended.reason)
    assert ended.report.count("hang: no step for 0:00:04 after step 1\n") == 2
    assert ended.report.count("in wait_for_stop") == ended.report.count("in hold_the_interpreter") == 1


def test_steps_and_warnings_of_every_rank_are_heard(start):
    """Whole lines, from now on: a resumed run has an earlier attempt's steps, and cuts off some."""
    heard: list[dict[str, Any]] = []
    run = start("done|done")
    run._listener = heard.append
    run.opened.run.metrics.write_text('{"step": 1}\n{"step": 2}\n')
    tail = Tail(run.opened.run.metrics)
    with run.opened.run.metrics.open("a") as record:
        os.ftruncate(record.fileno(), 12)
        assert tail.lines() == []
        record.write('{"step": 2, "loss": "nan"}\n{"ste')
        record.flush()
        assert tail.lines() == ['{"step": 2, "loss": "nan"}']
        record.write('p": 3}\n')
        record.flush()
        assert tail.lines() == ['{"step": 3}']
    ended = finish(run)
    assert (ended.state, ended.reason, ended.exit_code) == (State.done, "9 steps", 0)
    assert state_of(run).state is State.done
    assert not is_held(run.opened.run.path / ".lock")
    assert [each["step"] for each in heard if "step" in each] == [1, 2, 3]
    assert sorted(each["warning"] for each in heard if "warning" in each) == ["of rank 0", "of rank 1"]


@pytest.mark.parametrize("what", ["stuck", "child"])
def test_ranks_die_with_their_launcher_whatever_they_are_stuck_in(start, tmp_path, what):
    """The launcher is killed -9 in a process of its own; "stuck" holds the interpreter lock in C."""
    launcher = os.fork()
    if launcher == 0:
        without_server()
        run = start(f"{what}|{what}")
        while True:
            run.poll()
            time.sleep(0.02)
    path = tmp_path / "adhoc"
    try:
        deadline = time.monotonic() + 120  # the server imports torch first
        while len(found := list(path.glob("*/pid*"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.3)
        assert effective(path).state is State.running
    finally:
        os.kill(launcher, signal.SIGKILL)
        os.waitpid(launcher, 0)
    run_dir = next(path.glob("tiny*"))
    pids = [int(file.read_text()) for file in [*found, *path.glob("*/child*")]]
    deadline = time.monotonic() + 10
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline, "an orphan is left"
        time.sleep(0.02)
    while is_held(run_dir / ".lock"):  # a dead process lets go of its files a moment after its main thread is gone
        assert time.monotonic() < deadline
    assert effective(path).state is State.lost


def gone(pid: int) -> bool:
    """Whether a process has ended (an orphan's body may wait for a slow init)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


FOLLOWED = {"script": "save|follow", "asked": signal.SIGINT}
test_a_mutant_is_found = finds(
    "Ends of a run",
    test_asked_to_stop_all_save="""
        Ctrl-C is a preemption: A run that Ctrl-C ended counts as preempted
            launch.local.run.LocalRun.stop: asked is signal.SIGINT else => False else
            (**FOLLOWED)
        one exit code: Ranks that saved have failed
            launch.local.run.LocalRun._judge: codes <= STOPPED => len(codes) == 1 and codes <= STOPPED
            (**FOLLOWED)
        130 has failed: A rank that saved after Ctrl-C has failed
            launch.local.run.STOPPED: {75}
            (**FOLLOWED)
    """,
    test_steps_and_warnings_of_every_rank_are_heard="""
        a record that was cut: A resumed run shows no steps
            launch.local.run.Tail.lines: min(self._read, => max(self._read,
        half a line: A step that is half written is lost
            launch.local.run.Tail.lines: file.tell() - len(rest) => file.tell()
    """,
)
