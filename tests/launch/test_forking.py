"""Forked ranks are ranks like others: the same bits, watched, ended and buried by the launcher."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from harness.config.errors import BadRequest
from harness.launch.local import forking
from harness.launch.local.forking import Adopted, NotForked, fork_rank, forks
from harness.store import status
from harness.store.metrics import read_metrics
from harness.store.rundir import Store
from harness.store.status import State
from harness.worker import forkserver
from tests.launch.test_kills import LIMIT_S, PATIENCE_S, REPOSITORY, Launched
from tests.support.bad_requests import poison_torch
from tests.support.composing import compose

SHORT = ("train.steps=20", "measure.capture_steps=[1,2]")
ENDLESS = ("train.steps=100000",)


def recorded(root: Path, *overrides: str) -> tuple[list[tuple[float, float]], str]:
    launched = Launched(root, *SHORT, *overrides)
    said = launched.end()
    assert launched.process.returncode == 0, said
    run = launched.run()
    lines = [(line["loss"], line["grad_norm"]) for line in read_metrics(run.metrics)]
    return lines, json.loads(run.summary.read_text())["final_weights"]


def test_a_forked_run_has_the_bits_of_a_spawned_one(tmp_path: Path) -> None:
    assert recorded(tmp_path / "forked", "launch.fork=true") == recorded(tmp_path / "spawned", "launch.fork=false")


def test_a_killed_rank_is_noticed_and_named_and_nothing_stays(tmp_path: Path) -> None:
    launched = Launched(tmp_path, "launch.fork=true", *ENDLESS, forked=True)
    run = launched.await_steps(2)
    everybody = launched.ranks()
    assert len(everybody) == 3, "two ranks and the server that forked them"
    _, *ranks = sorted(everybody, key=psutil.Process.create_time)  # the server, whose end ends no run, is older
    random.choice(ranks).send_signal(signal.SIGKILL)
    began = time.monotonic()
    said = launched.end()
    assert time.monotonic() - began < LIMIT_S
    found = status.read(run.path)
    assert found is not None
    assert found.state is State.failed
    assert "killed by SIGKILL" in said
    gone(everybody)


def test_with_the_launcher_everything_goes(tmp_path: Path) -> None:
    launched = Launched(tmp_path, "launch.fork=true", *ENDLESS, forked=True)
    launched.await_steps(2)
    everybody = launched.ranks()
    launched.process.kill()
    launched.end()
    gone(everybody)


def gone(processes: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(processes, timeout=LIMIT_S)
    assert [each for each in left if each.status() != psutil.STATUS_ZOMBIE] == []


def test_it_forks_from_no_process_in_which_something_runs() -> None:
    running = threading.Event()
    thread = threading.Thread(target=running.wait)
    thread.start()
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with ours, its, pytest.raises(RuntimeError, match="threads run here"):
            forkserver._fork(its, {}, [])
    finally:
        running.set()
        thread.join()


def test_an_adopted_process_is_waited_for_like_a_child() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    adopted = Adopted(pid)
    assert adopted.returncode is None
    assert adopted.wait() == adopted.wait() == adopted.returncode == 7
    adopted.send_signal(signal.SIGTERM)  # nobody is there, and nothing happens


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("measure=bench",), "measure=bench"),
        (("cluster=slurm",), "cluster=slurm"),
        (("launch.inline=true", "mesh=one"), "launch.inline=true"),
    ],
)
def test_where_it_may_not_be_it_is_refused_and_not_done(overrides: tuple[str, ...], named: str) -> None:
    assert not forks(compose(["launch.dry_run=true", *overrides]).typed)
    with pytest.raises(BadRequest, match=r"launch\.fork=true") as refused:
        compose(["launch.fork=true", "launch.dry_run=true", *overrides])
    assert named in str(refused.value)


def test_a_rank_that_no_message_can_ask_for_is_not_forked(tmp_path: Path) -> None:
    imports, request = {**os.environ, "SIZE": "large"}, {"environment": {"LARGE": "x" * 300_000}}
    with (tmp_path / "log").open("wb") as log, pytest.raises(NotForked, match="Message too long"):
        fork_rank(request, (), log.fileno(), imports=imports, limit_s=60.0, is_over=lambda: False)
    assert not any(("SIZE", "large") in key for key in forking._SERVERS)


@pytest.mark.parametrize(
    ("asked", "code", "says"),
    [
        ((), 1, "failed, rank [01]: ImportError: torch on the front end"),
        (("launch.fork=true",), 2, "launch.fork=true: .*fork server.*; leave it out"),
    ],
)
def test_a_server_that_dies_leaves_ranks_that_tell_why(
    asked: tuple[str, ...], code: int, says: str, tmp_path: Path
) -> None:
    """It dies of what it imports, of which ranks of their own fail in words."""
    poison_torch(tmp_path)
    words = [sys.executable, "run.py", *SHORT, f"launch.root={tmp_path}/runs", *asked]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}/poison"}
    done = subprocess.run(words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == code
    assert re.search(says, done.stdout + done.stderr)
    assert "Traceback" not in done.stderr
    (run,) = Store(tmp_path / "runs").runs()
    found = status.read(run.path)
    assert found is not None
    assert found.state is State.failed
    assert "torch on the front end" in (run.attempt_dir(0) / "rank0.log").read_text()


def hanging(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A request whose ranks' `torch` waits for ever, as one on a file system that is gone."""
    (folder / "stuck" / "torch").mkdir(parents=True)
    reached = folder / "stuck" / "reached"
    text = f"import time\nopen({str(reached)!r}, 'w').close()\ntime.sleep(600)\n"
    (folder / "stuck" / "torch" / "__init__.py").write_text(text)
    process = subprocess.Popen(
        [sys.executable, "run.py", *SHORT, f"launch.root={folder}/runs", *words],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": f"{folder}/stuck"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + PATIENCE_S
    while not reached.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the fork server imports nothing"
        time.sleep(0.05)
    return process


def test_of_a_server_that_hangs_in_its_imports_ranks_of_their_own_tell_where(tmp_path: Path) -> None:
    limit = "launch.hang_timeout_s=8"  # the server is on its way to torch for most of a second, and longer under load
    process = hanging(tmp_path, limit)
    servers = psutil.Process(process.pid).children(recursive=True)
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "failed, hang: no step for 8 s" in said
    assert f'"{tmp_path}/stuck/torch/__init__.py", line 3' in said, "where it hangs"
    (run,) = Store(tmp_path / "runs").runs()
    found = status.read(run.path)
    assert found is not None
    assert (found.state, found.reason) == (State.failed, "hang: no step for 8 s")
    gone(servers)


def test_a_server_that_hangs_in_its_imports_keeps_nobody_from_interrupting(tmp_path: Path) -> None:
    process = hanging(tmp_path)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, said
    (run,) = Store(tmp_path / "runs").runs()
    found = status.read(run.path)
    assert found is not None
    assert found.state is State.cancelled
    assert found.reason.startswith("interrupted by Ctrl-C")


def test_a_server_that_hangs_in_its_imports_goes_with_its_launcher(tmp_path: Path) -> None:
    """It has been handed the run's lock: the next request would be told that the run is in use."""
    process = hanging(tmp_path)
    servers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    gone(servers)
    (run,) = Store(tmp_path / "runs").runs()
    found = status.effective(run.path)
    assert found is not None
    assert found.state is State.lost


def test_where_orphans_cannot_be_adopted_ranks_are_started_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = compose(["launch.fork=true", "launch.dry_run=true"]).typed
    free = compose(["launch.dry_run=true"]).typed
    assert forks(free)
    monkeypatch.setattr(forking.sys, "platform", "darwin")
    assert not forks(free)
    with pytest.raises(OSError, match=r"launch\.fork=true needs Linux"):
        forks(asked)
