"""Every command that is printed is typed, where it was printed: it addresses the study, store and cluster that were
asked for, and starts nothing where nothing was asked to start."""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import run as program
from harness.cli.main import main, read
from harness.config import catalog
from harness.config.compose import Cell
from harness.config.words import quote
from harness.launch import submit
from harness.store import provenance, status
from harness.store.rundir import Store
from harness.store.status import Keeper, State, Status
from tests.support.composing import compose
from tests.support.mutants import finds

STUDY = """
question: Does it hold?
base: {model: tiny, data: stdlib}
grid: {sharding: [no_shard, optim]}
control: {sharding: no_shard}
"""
OVERRIDES = ("cluster=slurm", "train.steps=3", "train.warmup_steps=0", "train.seed=1,2", "cluster.time_min=77")
STARTS = ("retry", "run")
COMMAND = re.compile(
    r"^(?:next: | *fix: .*?|)((?:cd (?:'[^']*'|\S+) && )?python (?:-m harness|'[^']*run\.py'|\S*run\.py) .*?)"
    r"(?: starts what is missing)?$"
)
"""A line that ends with a command: what is next, a fix, and what a report was made by."""


@dataclass(frozen=True)
class Place:
    """Where a study was asked for, and from where it is looked at."""

    asked: Path
    root: Path
    here: Path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A store, a study's file and an option of one's own in folders with spaces; and SLURM's programs."""
    asked, here = tmp_path / "my work", tmp_path / "else where"
    (asked / "conf" / "train").mkdir(parents=True)
    here.mkdir()
    (asked / "conf" / "study").mkdir(parents=True)
    (asked / "conf" / "study" / "two.yaml").write_text(STUDY)
    (asked / "conf" / "train" / "mine.yaml").write_text("defaults: [default]\nparam_norm_every: 3\n")
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "squeue", "sinfo", "scancel"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return Place(asked, tmp_path / "my runs", here)


def carried_out(argv: Sequence[str], cwd: Path, told: Path, then: Callable[[list[Cell]], object] | None = None) -> Any:
    """The cells that `run.py ARGV`, or `retry`, would start from a folder, each with its run and where it would run."""

    def note(cells: Sequence[Cell], *_: object) -> int:
        paths = [Store(cell.config["launch"]["root"]).path_of(cell) for cell in cells]
        rows = [(str(path), cell.config["cluster"]) for path, cell in zip(paths, cells, strict=True)]
        told.write_text(json.dumps([rows, cells[0].config["launch"]]))
        if then is not None:
            then(list(cells))
        return 0

    told.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        gc.disable()  # what earlier tests left behind would wait for threads that a fork lacks
        code = 98
        try:
            os.chdir(cwd)
            submit.submit = note
            sys.argv = ["run.py", *argv]
            with told.with_suffix(".err").open("w") as said, redirect_stderr(said), redirect_stdout(said):
                try:
                    code = main(argv) if argv[0] == "retry" else program.main(list(argv))
                except SystemExit as end:
                    code = int(end.code or 0)
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, (argv, told.with_suffix(".err").read_text())
    return json.loads(told.read_text()) if told.exists() else None


def make(state: State | None, but: int = 0) -> Callable[[list[Cell]], None]:
    """Leaves runs of cells in a state, all but the first few."""

    def act(cells: list[Cell]) -> None:
        for cell in cells[but:]:
            run = Store(cell.config["launch"]["root"]).create(cell)
            provenance.record_start(run.path, {"sources_digest": provenance.sources_digest()}, "")
            if state is not None and run.status() is None:
                run.new_attempt()
                status.write(run.path, Status(state, "a reason", 0, Keeper.process))

    return act


def ask(place: Place, told: Path, then: Callable[[list[Cell]], None], *more: str) -> dict[str, Any]:
    """Ask for the study as its owner does; returns cluster settings by run."""
    root = f"launch.root='{place.root}'"
    argv = ["-m", "study=two", *OVERRIDES, "train=mine", root, *more]
    found, _ = carried_out(argv, place.asked, told, then)
    return dict(found)


def printed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Commands in what a verb prints: `next:`, a fix, and what a report was made by."""
    main(argv)
    out, err = capsys.readouterr()
    return [found[1] for line in (out + err).splitlines() if (found := COMMAND.search(line))]


def typed(command: str, here: Path) -> tuple[Path, list[str]]:
    """The folder in which a printed command acts, and its words after the program."""
    words = shlex.split(command)
    if words[0] == "cd":
        assert words[2] == "&&"
        here, words = Path(words[1]), words[3:]
    assert words[0] == "python", command
    if words[1] == "-m":
        assert words[2] == "harness"
        return here, words[3:]
    assert Path(here, words[1]).resolve() == catalog.ROOT / "run.py"
    return here, ["run", *words[2:]]


def wrong(command: str, place: Place, expected: dict[str, Any], told: Path, *, may_start: bool) -> str:
    """The fault of a printed command; empty if it does what it should."""
    cwd, argv = typed(command, place.here)
    if argv[0] in STARTS and not may_start:
        return f"starts runs: {command}"
    if argv[0] == "run" or argv[0] == "retry":
        found, launch = carried_out(argv[argv[0] == "run" :], cwd, told)
        extra = {path: cluster for path, cluster in found if expected.get(path) != cluster}
        whole = "--from" in argv or argv[0] == "retry" or {path for path, _ in found} == set(expected)
        fine = not extra and whole and launch["root"] == str(place.root)
        return "" if fine else f"{command}: asks for {sorted(extra) or 'too little'}"
    _, arguments = read(argv)
    root = Path(cwd, arguments.root)
    if root != place.root:
        return f"{command}: looks into {root}"
    store = Store(root)
    for word in (getattr(arguments, name, None) for name in ("study", "run", "ref", "a", "b")):
        if word is not None and word not in store.studies():
            store.find(word)
    return ""


def faults(
    place: Place, verbs: Sequence[str], expected: dict[str, Any], capsys: Any, told: Path, *, may_start: bool
) -> list[str]:
    """Faults of the commands that verbs print; a verb that prints none fails."""
    os.chdir(place.here)
    each = {verb: printed([*shlex.split(verb), "--root", str(place.root)], capsys) for verb in verbs}
    assert all(each.values()), "every verb prints a command"
    every = dict.fromkeys(command for found in each.values() for command in found)
    return [text for command in every if (text := wrong(command, place, expected, told, may_start=may_start))]


def test_an_unfinished_study_is_asked_for_as_it_was(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = tmp_path / "told"
    runs = ask(place, told, make(State.failed, but=1))
    assert {cluster["time_min"] for cluster in runs.values()} == {77}
    assert len(runs) == 4
    verbs = ["verdict two", "report two", "watch two", "bench two"]
    assert not faults(place, verbs, runs, capsys, told, may_start=True)
    one, other = (run for run in Store(place.root).runs("two")[:2])
    verbs = [f"show '{one.path}'", f"compare '{one.path}' '{other.path}'"]
    assert not faults(place, verbs, runs, capsys, told, may_start=True)


def test_what_is_whole_is_looked_at_and_what_is_done_is_compared(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told, root = tmp_path / "told", place.root
    runs = ask(place, told, make(State.cancelled))
    verbs = ["watch two", "watch", "gc", "cancel two"]
    assert not faults(place, verbs, runs, capsys, told, may_start=False)
    assert not [
        each for verb in verbs for each in printed([*verb.split(), "--root", str(root)], capsys) if "verdict" in each
    ]
    for seed in (1, 2):
        make(State.done)([compose([f"train.seed={seed}", f"launch.root={quote(str(root))}"])])
    pair = [run.path for run in Store(root).runs("adhoc")]
    verbs = ["watch adhoc", f"show '{pair[0]}'", f"diff '{pair[0]}' '{pair[1]}'"]
    assert not faults(place, verbs, dict.fromkeys(map(str, pair)), capsys, told, may_start=False)
    every = [each for verb in verbs for each in printed([*shlex.split(verb), "--root", str(root)], capsys)]
    assert [" compare " in each for each in every] == [True, True, True]


def test_runs_that_no_study_asked_for_are_told_from_a_study_that_was_never_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [compose(["study.name=mini", f"sharding={each}"]) for each in ("no_shard", "optim")]
    make(State.done)(cells)
    assert main(["verdict", "mini"]) == 2
    err = capsys.readouterr().err
    assert "no study asked for its 2 runs" in err
    assert "verdict runs/mini --control RUN" in err
    assert not [each for each in printed(["report", "mini"], capsys) if "study=mini" in each]
    assert main(["verdict", "nothing"]) == 2
    assert "no study of this name was run" in capsys.readouterr().err


test_a_mutant_is_found = finds(
    "The terminal",
    test_an_unfinished_study_is_asked_for_as_it_was="""
        next: without overrides: A study is asked for again without its cluster=
            store.study.asked: record.get("request", ()) => ()
            ()
            assert not
        next: in another folder: A study's file is looked for where the verb is typed
            config.words.ask_again: if os.path.isdir(folder) => if False
            ()
            train=mine: no such option
        next: another store: What is missing is trained into ./runs of this folder
            config.words.ask_again: if there != => if False and there !=
            ()
            my work/runs/two
    """,
    test_what_is_whole_is_looked_at_and_what_is_done_is_compared="""
        next: a verdict on nothing: watch proposes the verdict on a study of which no run is done
            store.study.judging_verb: if ended else otherwise => if True else otherwise
            ()
            ^AssertionError: (.|\\n)*verdict two
    """,
)
