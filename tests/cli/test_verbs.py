"""Verbs: words in, exit codes and next commands out; errors as for any request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli.main import main, read
from harness.cli.verbs import VERBS
from harness.store import status
from harness.store.rundir import RunDir, Store
from harness.store.status import State, Status
from tests.support.composing import compose
from harness.config.catalog import ROOT
from harness.config.words import quote


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with one run that failed and one that never started."""
    store = Store(tmp_path / "runs")
    failed = _frozen(store, "train.seed=1")
    status.write(failed.path, Status(State.running, "started", failed.new_attempt()))
    status.move(failed.path, 0, State.failed, "ValueError: no luck")
    _frozen(store, "train.seed=2")
    return store.root


def _frozen(store: Store, *overrides: str) -> RunDir:
    return store.create(compose([*overrides, f"launch.root={quote(str(store.root))}"]))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("bad request")
    return captured.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "needs a verb"),
        (["comapre", "a", "b"], "did you mean compare?"),
        (["compare", "a"], "required: RUN"),
        (["compare", "a", "b", "--jsn"], "--jsn"),
        (["compare", "a", "b", "c"], "takes 2 runs, not 3"),
        (["compare", "a", "b", "--bitwise"], "goes with --code"),
        (["compare", "--code", "a"], "--code"),
        (["compare", "--code", "HEAD~1", "HEAD", "launch.root=x"], "--root"),
        (["compare", "--code", "HEAD~1", "HEAD", "--bitwise"], "numerics=fast promises no order"),
        (["bisect", "HEAD"], "required: BAD"),
        (["bisect", "WORKTREE", "HEAD"], "can be the bad end alone"),
        (["bisect", "--keys", "a", "b", "--bitwise"], "for versions of the code"),
        (["bisect", "--keys", "0123abcd", "@last"], "'0123abcd'"),
        (["compare", "a", "b", "--step", "x"], "--step"),
        (["import", "/nowhere", "new", "--format", "hf"], "is no folder"),
        (["import", "/proc", "new", "--format", "dcp"], "has no .metadata"),
        (["power", "--only", "nope"], "names no fault"),
        (["verdict"], "required: STUDY"),
        (["--nope"], "VERB"),
    ],
)
def test_words_that_make_no_sense_are_a_bad_request(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refused(capsys, *words)


@pytest.mark.parametrize("verb", ["compare 0123abcd @last", "show 0123abcd", "diff x y", "retry nope", "cancel nope"])
def test_unknown_runs_are_named(verb: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, first, *rest = verb.split()
    assert repr(first) in refused(capsys, name, first, *rest, "--root", str(root))


@pytest.mark.parametrize(("verb", "known"), [("watch", "adhoc"), ("verdict", "none yet")])
def test_unknown_studies_are_named_with_those_there_are(
    verb: str, known: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs without a study can be watched; a verdict needs a control, which only a study has."""
    message = refused(capsys, verb, "nope", "--root", str(root))
    assert "nope" in message
    assert known in message


def test_watch_counts_states_and_names_the_cause(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "--root", str(root)]) == 1
    out = capsys.readouterr().out
    assert "1 x ValueError: no luck" in out
    assert "next: python -m harness retry" in out
    assert f"--root {root}" in out


def test_show_and_diff_end_with_what_is_next(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (run.signature() for run in Store(root).runs())
    assert main(["watch", str(root / "adhoc")]) == 1
    assert capsys.readouterr().out == out, "a study by its folder"
    assert main(["diff", first[:8], second, "--root", str(root)]) == 0
    assert "train.seed" in capsys.readouterr().out
    failed = next(run for run in Store(root).runs() if run.status() is not None)
    assert main(["show", str(failed.path), "--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert "ValueError: no luck" in out
    assert f"next: python -m harness retry {failed.signature()[:8]}" in out


def test_cancel_and_gc_with_nothing_to_do(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cancel", "adhoc", "--root", str(root)]) == 0
    assert "nothing to cancel" in capsys.readouterr().out
    assert main(["gc", "--root", str(root)]) == 0
    assert "0 items" in capsys.readouterr().out


def test_compare_of_unfinished_runs_is_not_comparable_also_as_json(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", *(str(run.path) for run in Store(root).runs())]
    assert main(words) == 4
    assert capsys.readouterr().out.startswith("NOT_COMPARABLE")
    assert main([*words, "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["outcome"] == "NOT_COMPARABLE"


def test_every_verb_has_help_and_a_root(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        with pytest.raises(SystemExit) as ended:
            read([verb.name, "--help"])
        assert ended.value.code == 0
        assert "--root DIR" in capsys.readouterr().out


def test_verbs_never_load_torch_and_start_quickly() -> None:
    code = "import sys; from harness.cli.main import main; main(['watch']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_a_reader_that_has_seen_enough_is_no_error(root: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "harness", "show", str(Store(root).runs()[0].path), "--root", str(root)]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write_end)
    assert "Traceback" not in done.stderr
