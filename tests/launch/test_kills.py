"""Real runs through run.py, ended in every rude way: only a readable record is left, and it goes on from there."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from harness.store import status
from harness.store.metrics import read_metrics
from harness.store.rundir import RunDir, Store
from harness.store.status import State
from tests.launch.cells import SMALL
from tests.support.programs import Program

REPOSITORY = Path(__file__).resolve().parents[2]
INLINE = ("debug=inline",)
WORDS = [str(REPOSITORY / "run.py"), "engine=ddp", "data=synthetic"]
LIMIT_S = 10.0
"""How long an end may take."""
PATIENCE_S = 240.0
"""How long a busy machine may take to come so far that there is something to end."""

pytestmark = pytest.mark.timeout(600)


class Launched:
    """A run.py with its ranks, on a run long enough to be interrupted; `forked` from a process that has its imports."""

    def __init__(self, root: Path, *overrides: str, forked: bool = False) -> None:
        small = [text for text in SMALL if not text.startswith(("engine", "sharding", "data.kind"))]
        words = [*WORDS, *small, f"launch.root={root}", "ckpt.every=20", *overrides]
        self.process = Program(words, REPOSITORY) if forked else _started(words)
        self.root = root

    def run(self) -> RunDir:
        """The one run under the root."""
        found = Store(self.root).runs()
        return found[-1]

    def await_steps(self, number: int) -> RunDir:
        """Until the record holds this many steps."""
        deadline = time.monotonic() + PATIENCE_S
        while not Store(self.root).runs() or len(read_metrics(self.run().metrics)) < number:
            assert time.monotonic() < deadline, "no steps"
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.05)
        return self.run()

    def ranks(self) -> list[psutil.Process]:
        """The rank processes, which lead groups of their own."""
        started = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in started if os.getpgid(each.pid) == each.pid]

    def end(self) -> str:
        """Wait, and return all output."""
        return self.process.communicate(timeout=PATIENCE_S)[0]


def _started(words: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY)


@pytest.fixture
def launch(tmp_path):
    """launch(*overrides) -> Launched; what is left is killed after the test."""
    launched: list[Launched] = []

    def begin(*overrides: str, forked: bool = False) -> Launched:
        launched.append(Launched(tmp_path / "my runs", *overrides, forked=forked))
        return launched[-1]

    yield begin
    for one in launched:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


def await_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=LIMIT_S)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def numbers(run: RunDir) -> list[tuple[object, ...]]:
    """What must be equal, bit for bit, of every step."""
    return [(line["step"], line["loss"], line["grad_norm"], line["data_digest"]) for line in read_metrics(run.metrics)]


def test_stopped_then_killed_and_asked_again_each_time_it_is_one_unbroken_run(launch):
    """Ctrl-C saves at a step, kill -9 of a rank or of run.py falls back to a checkpoint; the bits are the same."""
    stopped = launch("train.steps=150")
    run = stopped.await_steps(3)
    ranks = stopped.ranks()
    stopped.process.send_signal(signal.SIGINT)
    output = stopped.end()
    assert stopped.process.returncode == 130, output
    await_gone(ranks)
    steps = len(read_metrics(run.metrics))
    assert f"interrupted by Ctrl-C; saved at step {steps}" in output
    assert "Traceback" not in output
    assert state_of(run) is State.cancelled
    assert [path.name for path in run.ckpt.glob("step-*")] == [f"step-{steps:06d}"]

    bereft = launch("train.steps=150", forked=True)
    bereft.await_steps(steps + 3)
    ranks = bereft.ranks()
    random.choice(ranks).kill()
    output = bereft.end()
    await_gone(ranks)
    assert bereft.process.returncode == 1
    number = int(output.split(" failed first")[0].rpartition(" ")[2])
    assert f"rank {number} failed first:\n\nkilled by SIGKILL" in output
    assert output.index("killed by SIGKILL") < output.index("then rank")
    assert state_of(run) is State.failed
    assert f"rank {number}: killed by SIGKILL" in (run.status() or pytest.fail("no status")).reason

    killed = launch("train.steps=150", forked=True)
    killed.await_steps(len(read_metrics(run.metrics)) + 10)
    ranks = killed.ranks()
    killed.process.kill()
    await_gone(ranks)
    lost = status.effective(run.path)
    assert lost is not None
    assert lost.state is State.lost
    assert len(read_metrics(run.metrics)) < 150

    both = launch("-m", "train.steps=150", "train.replicate=0,1", forked=True)
    assert both.end().count("done, 150 steps") == 2
    assert run.attempts() == [0, 1, 2, 3]
    baseline = next(one for one in Store(both.root).runs() if one != run)
    assert numbers(run) == numbers(baseline)
    assert final_weights(run) == final_weights(baseline)


def test_forks_of_a_program_have_the_bits_of_ranks_that_are_started(tmp_path: Path) -> None:
    """Most tests of programs start them as forks of what has imported torch."""
    found = []
    for forked in (True, False):
        launched = Launched(tmp_path / str(forked), "train.steps=20", forked=forked)
        said = launched.end()
        assert launched.process.returncode == 0, said
        found.append((numbers(launched.run()), final_weights(launched.run())))
    assert found[0] == found[1]


def state_of(run: RunDir) -> State:
    found = run.status()
    assert found is not None
    return found.state


def final_weights(run: RunDir) -> str:
    return json.loads(run.summary.read_text())["final_weights"]


def hears(process: psutil.Process, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal: Python's own start has none yet."""
    (line,) = (line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "SigCgt" in line)
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells who listens")
@pytest.mark.parametrize(
    ("moment", "asked", "words"),
    [(0.0, signal.SIGHUP, ()), (3.0, signal.SIGTERM, ()), (2.0, signal.SIGTERM, INLINE)],
)
def test_asked_to_end_while_it_starts_it_is_preempted(launch, moment, asked, words):
    """So many seconds after run.py's first line: it imports, composes, or its ranks do."""
    launched = launch("train.steps=100000", *words)
    process, deadline = psutil.Process(launched.process.pid), time.monotonic() + PATIENCE_S
    while not hears(process, asked):
        assert time.monotonic() < deadline
    time.sleep(moment)
    launched.process.send_signal(asked)
    output = launched.end()
    assert launched.process.returncode == 75, output
    for run in Store(launched.root).runs() if launched.root.exists() else []:
        assert state_of(run) is State.preempted, output


def test_the_same_request_twice_at_once_is_one_run(launch):
    asked = [launch("train.steps=100000") for _ in range(2)]
    deadline = time.monotonic() + PATIENCE_S
    while all(one.process.poll() is None for one in asked):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (left,) = [one for one in asked if one.process.poll() is not None]
    (runs,) = [one for one in asked if one is not left]
    assert left.process.returncode == 69
    assert "running: starting" in left.end()
    run = runs.await_steps(1)
    assert Store(runs.root).runs() == [run]
    assert run.attempts() == [0]
