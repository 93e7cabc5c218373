"""Runs on disk: made once, found again, never mixed up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.config.typed import load_config
from harness.store import identity
from harness.store.errors import Busy, StoreError
from harness.store.rundir import RunDir, Store, cancel_requested, request_cancel
from tests.launch.cells import make_cell
from tests.support.mutants import finds

NASTY = "quo'te dou\"ble dollar$HOME semi;colon per%cent back\\slash umläut -rf *?["


def test_the_same_cell_twice_is_one_run(tmp_path):
    store = Store(tmp_path)
    run = store.create(make_cell(tmp_path, "train.steps=7"))
    assert store.create(make_cell(tmp_path, "train.steps=7")) == run
    assert len(store.runs()) == 1
    assert run.path.name == f"tiny-ddp-no_shard-fp32-dp2-k2-synthetic-steps7-{run.signature()[:8]}"
    assert run.overrides() == ("train.steps=7",)
    assert load_config(run.config()).train.steps == 7


def test_a_run_is_found_under_whatever_name_it_was_begun(tmp_path):
    """One of a former version, whose names said less, and one that was named."""
    store = Store(tmp_path)
    run = store.create(make_cell(tmp_path, "train.steps=7"))
    former = run.path.rename(run.path.with_name(f"tiny-ddp-{run.path.name.rpartition('-')[2]}"))
    stranger = store.create(make_cell(tmp_path, "train.steps=8")).path
    stranger.rename(stranger.with_name(f"stranger-{former.name.rpartition('-')[2]}"))
    assert store.path_of(make_cell(tmp_path, "train.steps=7")) == former
    named = make_cell(tmp_path, "train.steps=7", "run.name=mine")
    assert store.create(named).path == store.create(make_cell(tmp_path, "train.steps=7")).path == former
    assert store.path_of(make_cell(tmp_path, "train.steps=9", "run.name=mine")).name.startswith("mine-")


def test_from_many_threads_at_once_too(tmp_path):
    cell = make_cell(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        runs = set(pool.map(lambda _: Store(tmp_path).create(cell), range(32)))
        attempts = list(pool.map(lambda run: run.new_attempt(), list(runs) * 16))
    assert len(runs) == 1
    assert sorted(attempts) == list(range(16))


@pytest.mark.parametrize("name", ["with space", *NASTY.split()])
def test_nasty_roots_work(tmp_path, name):
    root = tmp_path / name
    store = Store(root)
    run = store.create(make_cell(root))
    store.remember(run)
    assert store.find("@last") == store.find(run.signature()[:8]) == store.find(str(run.path)) == run
    assert store.runs("adhoc") == [run]
    assert run.config()["launch"]["root"] == str(root)


def test_a_directory_that_holds_another_configuration_is_refused(tmp_path):
    """Two signatures with the same eight digits, or a config.yaml edited by hand. Another cluster is taken up."""
    store = Store(tmp_path)
    run = store.create(make_cell(tmp_path))
    run.adopt(make_cell(tmp_path, "cluster.partition=big"))
    assert run.config()["cluster"]["partition"] == "big"
    text = (run.path / "config.yaml").read_text()
    (run.path / "config.yaml").write_text(text.replace("steps: 20", "steps: 21"))
    with pytest.raises(StoreError, match="holds another configuration"):
        store.create(make_cell(tmp_path))


def test_one_owner_and_a_word_by_which_its_attempt_is_cancelled(tmp_path):
    run = Store(tmp_path).create(make_cell(tmp_path))
    with run.lock(), pytest.raises(Busy, match="is in use by another process") as lost:
        run.lock(timeout_s=0)
    assert lost.value.exit_code == 69
    run.lock().release()
    run.new_attempt()
    assert not cancel_requested(run.path, 0)
    request_cancel(run.path, 0)
    assert cancel_requested(run.path, 0)
    assert run.new_attempt() == 1
    assert not cancel_requested(run.path, 1)
    with pytest.raises(StoreError, match="is not a run"):
        RunDir(tmp_path).config()


def test_references(tmp_path):
    store = Store(tmp_path)
    with pytest.raises(StoreError, match="nothing was run"):
        store.find("@last")
    with pytest.raises(StoreError, match="none yet"):
        store.find("abcd")
    run = store.create(make_cell(tmp_path))
    other = store.create(make_cell(tmp_path, "study.name=other"))
    digits = run.signature()
    assert store.find(run.name) == run
    third = store.create(make_cell(tmp_path, "train.seed=3")).signature()
    assert store.find(third) == store.find(third.upper()[:20])
    with pytest.raises(StoreError, match="no run"):
        store.find(third[:9] + ("0" if third[9] != "0" else "1"))
    assert store.find(f"{run.path}/") == run
    with pytest.raises(StoreError, match="fits 2 runs"):
        store.find(digits[:8])
    with pytest.raises(StoreError, match="no run 'zzzz'"):
        store.find("zzzz")
    with pytest.raises(StoreError, match="4 or more digits"):
        store.find(digits[:3])
    assert store.runs("other") == [other]
    assert store.runs("../adhoc") == []


def test_starting_over_moves_the_record_aside_and_drops_checkpoints(tmp_path):
    run = Store(tmp_path).create(make_cell(tmp_path))
    assert not run.has_record()
    run.metrics.write_text('{"step": 1}\n')
    run.capture.mkdir()
    scratch = tmp_path / "scratch"
    (scratch / "step-000001").mkdir(parents=True)
    run.ckpt.symlink_to(scratch)  # as people do whose home is small
    for name in ("notes.txt", "step-000002"):
        (scratch / name).write_text("a person's file, and one in a checkpoint's place")
    assert run.has_record()
    attempt = run.new_attempt()
    run.start_over(attempt)
    assert not run.has_record()
    assert [path.name for path in run.ckpt.iterdir()] == ["notes.txt"]
    assert not run.capture.exists()
    assert (run.attempt_dir(attempt) / "before" / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert identity.signature(run.config()) == run.signature()


test_a_mutant_is_found = finds(
    "names of runs",
    test_a_run_is_found_under_whatever_name_it_was_begun="""
        only the present name: A run that was begun under another name is made again
            store.rundir.Store.path_of: if usual.exists(): => if usual:
    """,
)
