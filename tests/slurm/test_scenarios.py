"""What happens to jobs on a real cluster: nodes die, are drained and taken away; people cancel, requeue and edit.

A run that is to be disturbed passes a gate (`GATE`): from its fifth step on it waits, in steps, until the test has done
what it wants. So it is never over too soon, however slow or fast the machine, and waiting costs no processor.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from harness.launch.slurm.scheduler import Scheduler
from harness.store import status
from harness.store.metrics import read_metrics
from harness.store.rundir import RunDir, Store
from harness.store.status import State
from tests.launch.test_kills import final_weights, numbers, state_of as state
from tests.slurm import test_study
from tests.slurm.cluster import NEEDED, Cluster, running
from tests.slurm.test_study import REPOSITORY, REQUEST, job
from tests.support.needs import skip_without

pytestmark = [pytest.mark.slurm, pytest.mark.full, pytest.mark.timeout(1800)]

MORE = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=10
PartitionName=low Nodes=ALL Default=NO MaxTime=30 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL Default=NO MaxTime=30 State=UP PriorityTier=10 PreemptMode=OFF
"""
PATIENCE_S = 600.0
STEPS = 60
WORDS = [word for word in REQUEST[2:] if not word.startswith(("cluster.nodes", "train.steps", "data.seq_len"))]
WORDS += ["data.seq_len=32", "measure.step_checks=false", "measure.capture_steps=[1]"]
until = partial(test_study.until, pause_s=0.5)  # to ask SLURM takes a process, and most of what is waited for is long
STANDARD = (f"train.steps={STEPS}", "measure.callbacks=[gate:Gate]")
"""Of every request that says nothing else."""

GATE = """
import os, time
from harness.train.callbacks import Callback

class Gate(Callback):
    def step(self, step, record, engine):
        if step >= 5 and not os.path.exists({opened!r}):
            time.sleep(0.5)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three nodes of six processors, and partitions that take nodes from one another."""
    skip_without(*NEEDED)
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        with running(folder, nodes=3, cpus=6, more=MORE) as made:
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def clear(cluster: Cluster) -> Iterator[None]:
    """No test sees another's jobs, or nodes that it broke."""
    yield
    cluster.clear()
    for name in cluster.nodes:
        cluster.ask("scontrol", "update", f"nodename={name}", "state=resume", check=False)


class Gate:
    """Whether runs of a test go on beyond their fifth step without a pause."""

    def __init__(self, folder: Path) -> None:
        self._opened = folder / "opened"
        (folder / "gate.py").write_text(GATE.format(opened=str(self._opened)))

    def open(self) -> None:
        """Let them go on."""
        self._opened.touch()


@pytest.fixture(autouse=True)
def gate(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Closed at first."""
    folder = tmp_path_factory.mktemp("gate")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    return Gate(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[RunDir]:
    """Room for the run with which all others are compared, made by the first test that needs it."""
    return []


def request(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Ask run.py for something on the cluster."""
    asked = {word.partition("=")[0] for word in words}
    standard = [word for word in STANDARD if word.partition("=")[0] not in asked]
    command = [*REQUEST[:2], *WORDS, *standard, f"launch.root={root}", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=REPOSITORY)


def one(root: Path, *words: str) -> RunDir:
    """A run of one cell on one node, submitted."""
    before = set(Store(root).runs())
    asked = request(root, *words)
    assert asked.returncode == 0, asked.stderr
    (new,) = set(Store(root).runs()) - before
    return new


def effective(run: RunDir) -> State:
    found = status.effective(run.path, Scheduler())
    assert found is not None
    return found.state


def reason(run: RunDir) -> str:
    found = status.effective(run.path, Scheduler())
    assert found is not None
    return found.reason


def step_of(run: RunDir) -> int:
    return len(read_metrics(run.metrics))


def node_of(cluster: Cluster, number: str) -> str:
    return cluster.ask("squeue", "--noheader", f"--job={number}", "--format=%N").strip()


def go_on(cluster: Cluster, run: RunDir, gate: Gate) -> None:
    """Wait until a run is in the queue again, start it without SLURM's two minutes, and wait for its end."""
    until(cluster, lambda: cluster.job_states().get(job(run)) == "PENDING", PATIENCE_S)
    assert step_of(run) < STEPS
    gate.open()
    cluster.start_now(job(run))
    until(cluster, lambda: effective(run) not in (State.queued, State.running, State.preempted), PATIENCE_S)


def same_as_undisturbed(cluster: Cluster, root: Path, run: RunDir, baselines: list[RunDir]) -> None:
    """Its numbers are those of the same cell under another replicate, to which nothing has happened.

    The gate is open by now.
    """
    if not baselines:
        baseline = one(root, "train.replicate=9")
        until(cluster, lambda: effective(baseline) is State.done, PATIENCE_S)
        baselines.append(baseline)
    (baseline,) = baselines
    assert [line["step"] for line in read_metrics(run.metrics)] == list(range(1, STEPS + 1))
    assert numbers(run) == numbers(baseline)
    assert final_weights(run) == final_weights(baseline)


def test_a_node_dies_under_a_run_which_goes_on_elsewhere(
    cluster: Cluster, tmp_path: Path, gate: Gate, undisturbed: list[RunDir]
) -> None:
    """Power is gone: no daemon and no rank can say anything."""
    run = one(tmp_path, "ckpt.every=5")
    until(cluster, lambda: step_of(run) >= 7, PATIENCE_S)
    name = node_of(cluster, job(run))
    cluster.kill_node(name)
    until(cluster, lambda: effective(run) is State.queued, PATIENCE_S)
    go_on(cluster, run, gate)
    assert effective(run) is State.done, reason(run)
    cluster.start_node(name)
    same_as_undisturbed(cluster, tmp_path, run, undisturbed)
    request(tmp_path, "train.replicate=8", f"cluster.additional.exclude={name}")
    assert f"#SBATCH --exclude={name}" in next(tmp_path.glob("adhoc/*-r8-*/attempts/0/submit.sh")).read_text()


def test_a_higher_partition_takes_its_node(
    cluster: Cluster, tmp_path: Path, gate: Gate, undisturbed: list[RunDir]
) -> None:
    run = one(tmp_path, "cluster.partition=low", "cluster.time_min=20")
    until(cluster, lambda: step_of(run) >= 5, PATIENCE_S)
    node = node_of(cluster, job(run))
    taker = [
        "sbatch",
        "--parsable",
        "--partition=high",
        f"--nodelist={node}",
        "--exclusive",
        "--time=5",
        "--wrap=sleep 5",
    ]
    cluster.ask(*taker, f"--output={tmp_path / 'taker.log'}")
    until(cluster, lambda: state(run) is State.preempted, PATIENCE_S)
    go_on(cluster, run, gate)
    same_as_undisturbed(cluster, tmp_path, run, undisturbed)


def test_the_time_limit_comes(cluster: Cluster, tmp_path: Path) -> None:
    """Every element saves, is put back and waits, the last one too; SLURM's shortest limit is a minute.

    Arrays of one, two and five side by side, as they wait most of the time.
    """
    runs = []
    for cells in (1, 2, 5):
        words = [
            f"study.name=of{cells}",
            f"train.replicate=range(0,{cells})",
            f"mesh.world_size={1 if cells == 5 else 2}",
        ]
        limits = ["train.steps=100000", "cluster.time_min=1", "cluster.grace_s=50"]
        asked = request(tmp_path, "-m", *words, *limits)
        assert asked.returncode == 0, asked.stderr
        runs += Store(tmp_path).runs(f"of{cells}")
    assert len(runs) == 8
    until(cluster, lambda: all(state(run) is State.preempted for run in runs), PATIENCE_S, pause_s=1.0)
    until(cluster, lambda: all(cluster.job_states().get(job(run)) == "PENDING" for run in runs), PATIENCE_S)
    assert all("SIGUSR2 received; saved at step" in (run.status() or pytest.fail("no")).reason for run in runs)
    assert {effective(run) for run in runs} == {State.preempted}


HANGS = """
import os, time
from harness.train.callbacks import Callback

class Hang(Callback):
    def step(self, step, record, engine):
        while step == 2:
            time.sleep(600)
"""


def test_a_run_that_cannot_save_in_time_is_failed_by_the_limit(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank waits for ever in a step, as in a hung file system: SLURM kills them, and says so.

    A stopped process would not do: before its SIGTERM SLURM sends SIGCONT, and the run saves within the five seconds
    until it is killed.
    """
    (tmp_path / "hangs.py").write_text(HANGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    run = one(tmp_path / "runs", "measure.callbacks=[hangs:Hang]", "cluster.time_min=1", "cluster.grace_s=10")
    until(cluster, lambda: effective(run) is State.failed, PATIENCE_S, pause_s=1.0)
    assert "is TIMEOUT" in reason(run)
    assert "cluster.time_min" in reason(run)
    assert step_of(run) <= 2


def test_a_rank_that_is_killed_spoils_no_other_cell(cluster: Cluster, tmp_path: Path, gate: Gate) -> None:
    asked = request(tmp_path, "-m", "train.replicate=0,1")
    assert asked.returncode == 0, asked.stderr
    killed, other = Store(tmp_path).runs()
    until(cluster, lambda: step_of(killed) >= 3, PATIENCE_S)
    next(process for process in ranks_of(killed) if process.environ()["SLURM_PROCID"] == "1").kill()
    until(cluster, lambda: effective(killed) is State.failed, PATIENCE_S)
    assert "left no traceback" in reason(killed) or "is FAILED" in reason(killed)
    assert state(other) is not State.done
    gate.open()
    until(cluster, lambda: effective(other) is State.done, PATIENCE_S)


def test_a_submitter_killed_at_any_moment_loses_and_doubles_nothing(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed ten times on its way through a study of six cells; then asked once more, in peace."""
    monkeypatch.setattr("harness.launch.slurm.scheduler.SUBMISSION_GRACE_S", 0.0)
    cluster.hold()
    before = set(cluster.job_states())
    code = (
        "import sys; from harness.launch.slurm import scheduler; scheduler.SUBMISSION_GRACE_S = 2.0; "
        "import run; sys.exit(run.main(sys.argv[1:]))"
    )
    small = ["train.steps=3", "mesh.world_size=1"]
    command = [
        sys.executable,
        "-c",
        code,
        *WORDS,
        *small,
        "-m",
        "train.replicate=range(0,6)",
        f"launch.root={tmp_path}",
    ]
    began = time.monotonic()
    whole = subprocess.run([*command, "launch.dry_run=true"], cwd=REPOSITORY, capture_output=True, check=False)
    assert whole.returncode == 0, whole.stderr
    takes, draw = time.monotonic() - began, random.Random(0)
    for _ in range(10):
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(takes * draw.uniform(0.5, 1.2))
        process.kill()
        process.wait()
    time.sleep(3)
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    runs = Store(tmp_path).runs()
    assert len(runs) == 6
    waiting = [number for number in cluster.job_states() if number not in before]
    assert len(waiting) == len({job(run) or reason(run) for run in runs}) == 6, "one job a cell"
    cluster.go()
    until(cluster, lambda: Counter(effective(run) for run in runs) == {State.done: 6}, PATIENCE_S)


def ranks_of(run: RunDir) -> list[psutil.Process]:
    """The processes of a run's ranks, all on this machine."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "harness.worker" in words and str(run.path) in words:
            found.append(process)
    return found
