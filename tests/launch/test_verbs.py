"""What stands behind watch, retry, cancel, show, diff and gc."""

from __future__ import annotations

import io
import json
import os
import shutil
import time
from contextlib import closing
from types import SimpleNamespace

import pytest

from harness.cli.main import main
from harness.config.errors import BadRequest
from harness.launch import submit, watch as watching
from harness.launch.terminal import RunDisplay, Terminal
from harness.launch.watch import render, rows, wait_for, watch
from harness.store import provenance, status
from harness.store.errors import StoreError
from harness.store.files import Lock
from harness.store.gc import garbage, gc
from harness.store.metrics import MetricsWriter
from harness.store.rundir import Store, cancel_requested
from harness.store.screen import duration, quantity
from harness.store.show import diff, show
from harness.store.status import State, Status
from tests.launch.cells import make_cell
from tests.support.mutants import finds


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


def add(store, state, reason="r", *overrides, steps=0):
    """A run in some state, with a record of some steps."""
    run = store.create(make_cell(store.root, *overrides))
    attempt = run.new_attempt()
    provenance.record_start(run.path, {"sources_digest": provenance.sources_digest(), "versions": {"torch": "2"}}, "")
    with closing(MetricsWriter(run.metrics)) as writer:
        for step in range(1, steps + 1):
            writer.write({"step": step, "loss": 4.0 / step, "step_time_s": 0.5})
    status.write(run.path, Status(state, reason, attempt))
    return run


def table(store, width=300):
    return render(rows(store, "adhoc", None), width)


def test_the_table_says_how_each_fares(store):
    """Done, running, failed by what they say, stale, damaged, and lost as the process is gone."""
    add(store, State.done, "20 steps", steps=20)
    running = add(store, State.running, "r", "train.replicate=1", steps=5)
    with Lock.acquire(running.path / ".lock"):
        lines = table(store).splitlines()
    assert lines[0].split() == ["run", "state", "step", "loss", "ms/step", "left", "reason"]
    assert lines[1].split()[1:] == ["done", "20/20", "0.2000", "500"]
    assert lines[2].split()[1:] == ["running", "5/20", "0.8000", "500", "8", "s", "r"]
    assert lines[-1] == "1 done, 1 running"
    reasons = ["rank 0: ValueError: bad step 3", "rank 1: ValueError: bad step 14", "rank 0: KeyError: 'x'"]
    for number, reason in enumerate(reasons):
        add(store, State.failed, reason, f"train.seed={number + 1}")
    old = add(store, State.done, "r", "train.seed=5")
    provenance.record_start(old.path, {"sources_digest": "older"}, "")
    (add(store, State.done, "r", "train.seed=6").path / "status.json").write_text("{")
    text = table(store)
    assert "  2 x rank 0: ValueError: bad step 3\n" in text
    assert "  1 x rank 0: KeyError: 'x'\n" in text
    assert "done, stale" in text
    assert text.endswith("1 damaged, 2 done, 3 failed, 1 lost")
    with pytest.raises(StoreError, match=r"no runs of study 'nope' .*; studies: adhoc"):
        watch(store, "nope")


def test_one_cell_in_two_studies_is_told_by_its_study(store, capsys):
    """Also in the commands that are printed: the digits alone would fit both."""
    failed = add(store, State.failed, "no luck", "study.name=first")
    other = add(store, State.done, "r", "study.name=second")
    assert [store.short(run) for run in (failed, other)] == [failed.name, other.name]
    assert store.find(store.short(other)) == other
    lines = render(rows(store, None, None), 300).splitlines()
    assert [line.split("/")[0] for line in lines[1:3]] == ["first", "second"]
    assert main(["watch", "--root", str(store.root)]) == 1
    assert "next: python -m harness retry first" in capsys.readouterr().out
    assert main(["show", str(other.path), "--root", str(store.root)]) == 0
    assert "next: python -m harness watch second" in capsys.readouterr().out


def test_watch_proposes_to_compare_what_is_done_and_to_look_again_at_what_moves(store, capsys):
    """It proposed to compare two runs that were queued, and one that was cancelled."""
    done = [add(store, State.done, "r", f"train.replicate={i}") for i in range(3)]
    add(store, State.cancelled, "r", "train.seed=9")
    (done[2].path / "status.json").write_text("{")
    words = ["watch", "--root", str(store.root)]
    assert main(words) == 0
    first, second = (store.short(run) for run in sorted(done[:2], key=lambda run: run.path))
    assert f"next: python -m harness compare {second} {first} --root" in capsys.readouterr().out
    running = add(store, State.running, "r", "train.seed=8")
    with Lock.acquire(running.path / ".lock"):
        assert main(words) == 0
    assert "next: python -m harness watch adhoc --root" in capsys.readouterr().out


def test_a_terminal_is_drawn_anew_until_no_run_moves(store, capsys, monkeypatch):
    running = add(store, State.running, "r")
    ended = Status(State.done, "1 step", running.attempts()[-1])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr(watching, "time", SimpleNamespace(sleep=lambda _: status.write(running.path, ended)))
    with Lock.acquire(running.path / ".lock"):
        assert main(["watch", "--once", "--root", str(store.root)]) == 0
        assert watching.CLEAR not in capsys.readouterr().out
        assert main(["watch", "--root", str(store.root)]) == 0
    tables = capsys.readouterr().out.split(watching.CLEAR)
    assert len(tables) == 2
    assert "1 running\n" in tables[0]
    assert "1 done\n" in tables[1]


def test_cancel_of_a_living_run_asks_its_owner(store, monkeypatch):
    monkeypatch.setattr(submit, "probe", lambda: None)
    monkeypatch.setattr(submit, "CANCEL_TIMEOUT_S", 0.1)
    run = add(store, State.running)
    out = io.StringIO()
    with Lock.acquire(run.path / ".lock"):
        assert submit.cancel(store, "adhoc", Terminal(out)) == 1, "it has not ended"
    assert cancel_requested(run.path, 0)
    assert "does not end" in out.getvalue()
    assert submit.cancel(store, "adhoc", Terminal(out)) == 0
    assert "nothing to cancel" in out.getvalue()


@pytest.mark.parametrize("path", ["launch", "mesh", "train.global_batch_size", "study"])
def test_retry_names_what_a_frozen_file_lacks(store, path, capsys):
    run = add(store, State.failed)
    config = run.config()
    *groups, key = path.split(".")
    del (config[groups[0]] if groups else config)[key]
    (run.path / "config.yaml").write_text(json.dumps(config))
    assert main(["retry", str(run.path), "--root", str(store.root)]) == 2
    assert f"{run.path}/config.yaml has no {key}: it was cut or edited" in capsys.readouterr().err


def test_retry_asks_again_for_the_frozen_cells(store, monkeypatch):
    asked = []
    monkeypatch.setattr(submit, "submit", lambda cells: asked.extend(cells) or 0)
    runs = [add(store, State.failed, "r", f"train.replicate={i}") for i in range(2)]
    assert submit.retry(store, "adhoc") == 0
    assert [cell.signature for cell in asked] == [run.signature() for run in runs]
    asked.clear()
    moved = store.root.rename(store.root.with_name("moved elsewhere"))
    store, runs = Store(moved), Store(moved).runs()
    submit.retry(store, str(runs[1].path))
    assert [store.path_of(cell) for cell in asked] == [runs[1].path]
    asked.clear()
    submit.retry(Store(moved / "another"), str(runs[1].path))
    assert [store.path_of(cell) for cell in asked] == [runs[1].path], "not from its beginning, in another store"
    shutil.copytree(runs[1].path.parent, moved / "kept")
    with pytest.raises(BadRequest, match=f"is not where its cell is run: {runs[0].path}"):
        submit.retry(store, "kept")


def test_show_and_diff_say_what_a_run_is_and_only_what_differs(store):
    a = add(store, State.failed, "rank 1: KeyError: 'x'", steps=2)
    (a.attempt_dir(0) / "error.txt").write_text("rank 1 failed first:\n\nTraceback\n")
    b = add(store, State.done, "r", "optimizer.lr=0.5", "cluster.partition=big")
    text = show(a)
    for part in (str(a.path), a.signature(), "failed: rank 1: KeyError", "torch 2", "2 of 20"):
        assert part in text
    assert text.endswith("Traceback")
    assert "optimizer.lr=0.5" in show(b)
    provenance.merge(b.path, {"versions": {"torch": "3"}, "environment": {"OMP_NUM_THREADS": "2", "SLURM_JOB_ID": "1"}})
    lines = [line.strip() for line in diff(a, b).splitlines()]
    assert "optimizer.lr: 0.001 -> 0.5" in lines
    assert "versions.torch: 2 -> 3" in lines
    assert "environment.OMP_NUM_THREADS: (absent) -> 2" in lines
    assert not [line for line in lines if "SLURM" in line or "train." in line]
    assert lines.index("optimizer.lr: 0.001 -> 0.5") < lines.index("cluster.partition: null -> big")
    assert "no difference" in diff(a, a)


def age(path, hours=2):
    then = time.time() - 3600 * hours
    os.utime(path, (then, then))


def test_gc_finds_leftovers_and_no_record(store):
    """A checkpoint that is being written, which may take an hour, is told from a leftover by its run's lock."""
    run = add(store, State.done, steps=3)
    living = add(store, State.running, "r", "train.replicate=1")
    for one in (run, living):
        (one.ckpt / "step-000003").mkdir(parents=True)
        (one.ckpt / "step-000003" / "x").write_bytes(b"0" * 1000)
        (one.ckpt / "step-000002.tmp").mkdir()
    assert not list(garbage(store)), "all of it is young"
    for one in (run, living):
        age(one.ckpt / "step-000002.tmp")
    with Lock.acquire(living.path / ".lock"):
        assert [path for path, _ in garbage(store)] == [run.ckpt / "step-000002.tmp"]
        said: list[str] = []
        gc(store, checkpoints=True, say=said.append)
        assert said[-1].startswith("2 items")
        assert run.checkpoints(), "said, not done"
        left: list[bool] = []
        gc(store, checkpoints=True, apply=True, say=lambda _: left.append(bool(run.checkpoints())))
    assert left == [True] * 2 + [False], "everything is named before anything goes"
    assert not run.checkpoints()
    assert (living.ckpt / "step-000003").exists()
    assert run.metrics.exists()


def test_gc_touches_nothing_that_is_not_ours(store, tmp_path_factory):
    """A folder without the mark of a store is nobody's to tidy; in one with it, what bears no mark of ours stays."""
    home = tmp_path_factory.mktemp("home")
    theirs = home / "thesis" / "chapter-1"
    theirs.mkdir(parents=True)
    (theirs / "text.tex").write_text("years of work")
    age(theirs)
    with pytest.raises(StoreError, match=r"is no store of runs: it has no file \.store"):
        gc(Store(home), apply=True)
    run = add(store, State.done)
    strange = [store.root / "notes" / "mine", run.path.parent / "mine", run.path / ".secret.tmp", run.path / "x.tmp"]
    strange += [store.root / "adhoc" / ".submit" / "backup", run.ckpt / "best.tmp", run.ckpt / "notes"]
    for path in strange:
        path.mkdir(parents=True)
        (path / "file").touch()
    (run.ckpt / "step-000003").mkdir()
    linked = run.path.parent / "link"
    linked.symlink_to(theirs)
    (theirs / ".status.lock").touch()
    for path in (*strange, theirs):
        age(path)
    gc(store, checkpoints=True, apply=True)
    assert all((path / "file").exists() for path in strange)
    assert not (run.ckpt / "step-000003").exists()
    assert (theirs / "text.tex").exists()


STEP = {"loss": 2.5, "step_time_s": 0.5, "tokens": 1000, "memory": {"allocated": None, "rss": 2**30}}


def shown(numbers, steps=100, out=None):
    out = out or io.StringIO()
    display = RunDisplay(Terminal(out), steps, "cell 3 of 12")
    for step in numbers:
        display({**STEP, "step": step})
    return out.getvalue().splitlines()


class Gone(io.StringIO):
    """A terminal that went away, which does not end the run."""

    def write(self, _):
        raise BrokenPipeError


def test_progress_is_a_few_lines():
    line = "cell 3 of 12  step 1/100  loss 2.5000  500 ms/step  2k tokens/s  1024 MiB  ETA 50 s"
    assert shown([1]) == [line]
    assert len(shown(range(1, 101))) == 11
    assert len(shown(range(1, 100_001), steps=100_000)) < 20
    assert shown([1], out=Gone()) == []
    assert [quantity(value) for value in (3, 1234, 2.5e6, 3e9)] == ["3", "1.23k", "2.5M", "3G"]
    assert [duration(value) for value in (3.4, 600, 7200)] == ["3 s", "10 min", "2.0 h"]


@pytest.fixture
def done(store, monkeypatch):
    monkeypatch.setattr(watching, "probe", lambda: None)
    return [add(store, State.done, "1 step", f"train.replicate={number}") for number in (0, 1, 2)]


def test_a_run_that_is_gone_or_damaged_is_not_done_for_who_waits(done):
    """launch.wait=true."""
    assert wait_for(done, Terminal(io.StringIO())) == [0, 0, 0]
    shutil.rmtree(done[0].path)
    (done[1].path / status.FILE).write_text("{")
    assert wait_for(done, Terminal(io.StringIO())) == [1, 1, 0]


test_a_mutant_is_found = finds(
    "The terminal",
    test_watch_proposes_to_compare_what_is_done_and_to_look_again_at_what_moves="""
        next: of what moves: watch proposes to compare runs that have not ended
            cli.runs.run_watch: (State.queued, State.running) => ()
    """,
    test_a_terminal_is_drawn_anew_until_no_run_moves="""
        drawn once: watch prints what moves once, also on a terminal
            launch.watch.watch: not (follow and => not (not follow and
    """,
    test_retry_names_what_a_frozen_file_lacks="""
        retry of a file that lacks a group: The retry of a run whose config.yaml was cut is a traceback
            launch.submit.frozen: except KeyError as => except ZeroDivisionError as
            (path="mesh")
            ^KeyError
    """,
)
test_a_waiting_mutant_is_found = finds(
    "launching",
    test_a_run_that_is_gone_or_damaged_is_not_done_for_who_waits="""
        gone is done: A run whose folder is gone counts as done
            launch.watch.row: run.path.parent.name, "damaged" => run.path.parent.name, "done"
    """,
)
