"""Verbs: words in, exit codes and next commands out; errors as for any request."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.config.catalog import ROOT
from harness.config.words import quote
from harness.store import status
from harness.store.rundir import RunDir, Store
from harness.store.status import State, Status
from tests.support.composing import compose
from tests.support.mutants import finds


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
    assert captured.err.startswith(("bad request", "refused:\n"))
    return captured.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "needs a verb"),
        (["comapre", "a", "b"], "did you mean compare?"),
        (["compare", "a"], "takes 2 runs, not 1"),
        (["compare", "a", "b", "--jsn"], "--jsn"),
        (["compare", "a", "b", "c"], "takes 2 runs, not 3"),
        (["compare", "a", "b", "--bitwise"], "goes with --code"),
        (["compare", "--code", "a"], "--code"),
        (["compare", "--code", "HEAD~1", "HEAD", "--bitwise"], "numerics=fast promises no order"),
        (["bisect", "HEAD~9", "HEAD"], "git bisect run, with compare --code"),
        (["rehearse", "@last"], "launch.preempt_at=N, twice, and compare"),
        (["compare", "a", "b", "--step", "x"], "--step"),
        (["power", "--short"], "in a checkout: python benchmarks/power/class_runs.py"),
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


def test_show_and_diff_end_with_what_is_next(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (run.signature() for run in Store(root).runs())
    assert main(["diff", first[:8], second, "--root", str(root)]) == 0
    assert "train.seed" in capsys.readouterr().out
    failed = next(run for run in Store(root).runs() if run.status() is not None)
    assert main(["show", str(failed.path), "--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert "ValueError: no luck" in out
    again = f"next: python -m harness retry {failed.signature()[:8]} --root {shlex.quote(str(root))}\n"
    assert again in out
    assert main(["show", str(failed.path)]) == 0
    assert again in capsys.readouterr().out, "in the store in which it lies"


def test_two_runs_that_differ_in_nothing_are_not_sent_to_be_compared(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`compare` sends here who asks why they differ."""
    done = next(run for run in Store(root).runs() if run.status() is None)
    status.write(done.path, Status(State.done, "20 steps", done.new_attempt()))
    other = done.path.with_name(f"{done.path.name}-again")
    shutil.copytree(done.path, other)
    assert main(["diff", str(done.path), str(other), "--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert "no difference in configuration" in out
    assert "compare" not in out.rpartition("next: ")[2]
    assert "next: python -m harness show " in out


def test_cancel_and_gc_with_nothing_to_do(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Store(root).runs()[0].signature()[:8]
    for ref, after in (("adhoc", "watch adhoc"), (run, f"show {run}")):
        assert main(["cancel", ref, "--root", str(root)]) == 0
        told = capsys.readouterr().out.splitlines()
        assert told == [
            f"nothing to cancel: no run of {ref} is queued or running",
            f"next: python -m harness {after} --root {shlex.quote(str(root))}",
        ]
    assert main(["gc", "--root", str(root)]) == 0
    assert "0 items" in capsys.readouterr().out


test_a_mutant_is_found = finds(
    "The terminal",
    test_cancel_and_gc_with_nothing_to_do="""
        next: of nothing to cancel: Who wanted nothing to run is told how to start what failed
            cli.runs.run_cancel: 'watch' if ref in store.studies() else 'show' => 'retry'
    """,
)


def test_compare_of_unfinished_runs_is_not_comparable_also_as_json(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", *(str(run.path) for run in Store(root).runs())]
    assert main(words) == 4
    assert capsys.readouterr().out.startswith("NOT_COMPARABLE")
    assert main([*words, "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["outcome"] == "NOT_COMPARABLE"


def test_a_reader_that_has_seen_enough_is_no_error(root: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "harness", "show", str(Store(root).runs()[0].path), "--root", str(root)]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("flags", [[], ["-u"]])
def test_an_output_that_cannot_be_written_is_told(root: Path, flags: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, *flags, "-m", "harness", "gc", "--root", str(root)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


AS_ANOTHER = """
import json, os, sys
from harness.cli.main import main
root, run = sys.argv[1:]
print(main(["show", run, "--root", root]), flush=True)
"""


def test_another_persons_runs_are_told_as_far_as_they_are_open(root: Path) -> None:
    """Attempts are their owner's alone."""
    (run, *_) = [run for run in Store(root).runs() if run.status() is not None]
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only the superuser can be somebody else")
    for path in (root, *root.rglob("*")):
        os.chown(path, 65534, 65534)
    powers = "-dac_override,-dac_read_search"
    command = ["setpriv", f"--bounding-set={powers}", f"--inh-caps={powers}", sys.executable, "-c", AS_ANOTHER]
    done = subprocess.run([*command, str(root), str(run.path)], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert "error.txt cannot be read: Permission denied" in " ".join(done.stdout.split())
    assert "next: python -m harness retry" in done.stdout
    assert done.stdout.split()[-1] == "0", done.stderr


def test_variables_that_no_launcher_sets_are_a_bad_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert runpy.run_path(str(ROOT / "run.py"))["main"](["launch.dry_run=true"]) == 2
    assert "unset RANK WORLD_SIZE" in capsys.readouterr().err


OTHERS = ("torch", "harness.revisions", "harness.parity.tiers", "harness.report", "harness.bench", "harness.wandb_sync")


@pytest.mark.parametrize("words", [["--help"], ["watch"], ["completion", "bash", "--line", "run.py sh"]])
def test_a_verb_loads_no_other_verbs_modules(words: list[str], tmp_path: Path) -> None:
    code = """
import sys
from harness.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(*sys.modules, file=sys.stderr)
"""
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    loaded = done.stderr.splitlines()[-1].split()
    assert "harness.cli.main" in loaded
    assert not [each for each in loaded if each.startswith(OTHERS)]
