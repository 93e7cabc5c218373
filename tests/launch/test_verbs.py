"""What stands behind watch, retry, cancel, show, diff and gc."""

from __future__ import annotations

import io
import json
import os
import shutil
import time
from contextlib import closing

import pytest

from harness.cli import runs as cli_runs
from harness.cli.main import main
from harness.config.errors import BadRequest
from harness.launch import submit
from harness.launch.terminal import RunDisplay, Terminal
from harness.launch.watch import render, rows, watch
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
from tests.support.mutants import Slip, kills


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
    add(store, State.done, "20 steps", steps=20)
    running = add(store, State.running, "r", "train.replicate=1", steps=5)
    with Lock.acquire(running.path / ".lock"):
        lines = table(store).splitlines()
    assert lines[0].split() == ["run", "state", "step", "loss", "ms/step", "left", "reason"]
    assert lines[1].split()[1:] == ["done", "20/20", "0.2000", "500"]
    assert lines[2].split()[1:] == ["running", "5/20", "0.8000", "500", "8", "s", "r"]
    assert lines[-1] == "1 done, 1 running"


def test_a_run_whose_process_is_gone_is_lost_in_the_table(store):
    add(store, State.running)
    assert "lost" in table(store)
    assert any(one.bad for one in watch(store, "adhoc", terminal=Terminal(io.StringIO())))


def test_failures_are_grouped_by_what_they_say(store):
    for replicate, reason in enumerate(
        ["rank 0: ValueError: bad step 3", "rank 1: ValueError: bad step 14", "rank 0: KeyError: 'x'"]
    ):
        add(store, State.failed, reason, f"train.replicate={replicate}")
    text = table(store)
    assert "  2 x rank 0: ValueError: bad step 3\n" in text
    assert "  1 x rank 0: KeyError: 'x'\n" in text


def test_stale_and_damaged_runs_are_rows_too(store):
    old = add(store, State.done, steps=20)
    provenance.record_start(old.path, {"sources_digest": "older"}, "")
    broken = add(store, State.done, "r", "train.replicate=1")
    (broken.path / "status.json").write_text("{")
    text = table(store)
    assert "done, stale" in text
    assert "damaged" in text


def test_lines_fit_the_terminal(store):
    add(store, State.failed, "no luck " * 60)
    lines = table(store, 60).splitlines()
    assert 50 < max(map(len, lines)) <= 60
    assert " ".join(" ".join(lines).split()).count("no luck") > 60, "told whole, below the table"


def test_one_cell_in_two_studies_is_told_by_its_study(store, capsys):
    """Also in the commands that are printed: the digits alone would fit both."""
    failed = add(store, State.failed, "no luck", "study.name=first")
    other = add(store, State.done, "r", "study.name=second")
    assert [store.short(run) for run in (failed, other)] == [failed.name, other.name]
    assert store.find(store.short(other)) == other
    lines = render(rows(store, None, None), 300).splitlines()
    assert [line.split("/")[0] for line in lines[1:3]] == ["first", "second"]
    assert main(["watch", "--once", "--root", str(store.root)]) == 1
    assert "next: python -m harness retry first" in capsys.readouterr().out
    assert main(["show", str(other.path), "--root", str(store.root)]) == 0
    assert "next: python -m harness watch second" in capsys.readouterr().out


def test_watch_proposes_to_compare_what_is_done_and_to_look_again_at_what_moves(store, capsys):
    """It proposed to compare two runs that were queued, and one that was cancelled."""
    done = [add(store, State.done, "r", f"train.replicate={i}") for i in range(3)]
    add(store, State.cancelled, "r", "train.seed=9")
    (done[2].path / "status.json").write_text("{")
    words = ["watch", "--once", "--root", str(store.root)]
    assert main(words) == 0
    first, second = (store.short(run) for run in sorted(done[:2], key=lambda run: run.path))
    assert f"next: python -m harness compare {second} {first} --root" in capsys.readouterr().out
    running = add(store, State.running, "r", "train.seed=8")
    with Lock.acquire(running.path / ".lock"):
        assert main(words) == 0
    assert "next: python -m harness watch adhoc --root" in capsys.readouterr().out


@kills("The terminal", "next: of what moves", "watch proposes to compare runs that have not ended")
def test_a_watch_that_compares_what_moves_is_found(store, capsys, monkeypatch):
    Slip(cli_runs, "run_watch", "(State.queued, State.running)", "()").put(monkeypatch)
    with pytest.raises(AssertionError):
        test_watch_proposes_to_compare_what_is_done_and_to_look_again_at_what_moves(store, capsys)


def test_no_such_study(store):
    add(store, State.done)
    with pytest.raises(StoreError, match=r"no runs of study 'nope' .*; studies: adhoc"):
        watch(store, "nope")


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


@kills(
    "The terminal", "retry of a file that lacks a group", "The retry of a run whose config.yaml was cut is a traceback"
)
def test_a_lacking_group_that_is_not_named_is_found(store, capsys, monkeypatch):
    Slip(submit, "frozen", "except KeyError as", "except ZeroDivisionError as").put(monkeypatch)
    with pytest.raises(KeyError):
        test_retry_names_what_a_frozen_file_lacks(store, "mesh", capsys)


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


def test_show_is_one_screen(store):
    run = add(store, State.failed, "rank 1: KeyError: 'x'", "train.replicate=3", steps=2)
    (run.attempt_dir(0) / "error.txt").write_text("rank 1 failed first:\n\nTraceback\n")
    text = show(run)
    for part in (str(run.path), run.signature(), "failed: rank 1: KeyError", "train.replicate=3", "torch 2", "2 of 20"):
        assert part in text
    assert text.endswith("Traceback")


def test_diff_names_what_differs_and_only_that(store):
    a = add(store, State.done)
    b = add(store, State.done, "r", "optimizer.lr=0.5", "cluster.partition=big")
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
    run = add(store, State.done, steps=3)
    living = add(store, State.running, "r", "train.replicate=1")
    for one in (run, living):
        (one.ckpt / "step-000003").mkdir(parents=True)
        (one.ckpt / "step-000003" / "x").write_bytes(b"0" * 1000)
    temporary = run.ckpt / "step-000002.tmp"
    temporary.mkdir()
    assert garbage(store) == [], "all of it is young"
    age(temporary)
    with Lock.acquire(living.path / ".lock"):
        assert {item.path for item in garbage(store)} == {temporary}
        said: list[str] = []
        gc(store, checkpoints=True, say=said.append)
        assert said[-1].startswith("2 items")
        assert run.ckpt.exists(), "said, not done"
        left: list[bool] = []
        gc(store, checkpoints=True, apply=True, say=lambda _: left.append(run.ckpt.exists()))
    assert left == [True] * 2 + [False], "everything is named before anything goes"
    assert not run.ckpt.exists()
    assert (living.ckpt / "step-000003").exists()
    assert run.metrics.exists()
    assert not temporary.exists()


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


def test_gc_leaves_a_checkpoint_that_is_being_written(store):
    """A large one takes longer than the hour after which a leftover is nobody's; its run's lock tells the two apart."""
    run = add(store, State.done)
    unfinished = run.ckpt / "step-000003.tmp"
    unfinished.mkdir(parents=True)
    age(unfinished)
    with Lock.acquire(run.path / ".lock"):
        assert garbage(store) == []
    assert [item.path for item in garbage(store)] == [unfinished]


STEP = {"loss": 2.5, "step_time_s": 0.5, "tokens": 1000, "memory": {"allocated": None, "rss": 2**30}}


def shown(out, numbers, steps=100):
    display = RunDisplay(Terminal(out), steps)
    for step in numbers:
        display({**STEP, "step": step})
    return out.getvalue()


def test_progress_says_what_is_asked_for():
    (line,) = shown(io.StringIO(), [1]).splitlines()
    assert line == "step 1/100  loss 2.5000  500 ms/step  2k tokens/s  1024 MiB  ETA 50 s"


def test_few_lines_where_nothing_can_be_overwritten():
    assert len(shown(io.StringIO(), range(1, 101)).splitlines()) == 11
    assert len(shown(io.StringIO(), range(1, 100_001), steps=100_000).splitlines()) < 20


class Tty(io.StringIO):
    def isatty(self):
        return True


def test_a_cell_of_a_set_has_one_line_of_a_terminal(monkeypatch):
    """It moves, in the room there is, and ends as what stays; elsewhere a few lines stay, each with its cell."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal(Tty())
    display = RunDisplay(terminal, 100, "cell 3 of 12  native-optim")
    for step in (1, 2):
        display({**STEP, "step": step})
    terminal.settle("cell 3 of 12  runs/s/native-optim-0123abcd: done, 2 steps")
    moved = terminal._out.getvalue().split("\r\x1b[K")
    assert moved[0] == ""
    assert max(map(len, moved[1:3])) == 40
    assert moved[1].startswith("cell 3 of 12  native-optim  step 1/100")
    assert moved[3] == "cell 3 of 12  runs/s/native-optim-0123abcd: done, 2 steps\n"
    assert "\x1b" not in shown(io.StringIO(), [1, 2])
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in shown(Tty(), [1, 2])


def test_a_terminal_that_went_away_does_not_end_the_run():
    class Gone(io.StringIO):
        def write(self, _):
            raise BrokenPipeError

    shown(Gone(), [1])


@pytest.mark.parametrize(("value", "text"), [(3, "3"), (1234, "1.23k"), (2.5e6, "2.5M"), (3e9, "3G")])
def test_quantities(value, text):
    assert quantity(value) == text


@pytest.mark.parametrize(("value", "text"), [(3.4, "3 s"), (600, "10 min"), (7200, "2.0 h")])
def test_durations(value, text):
    assert duration(value) == text
