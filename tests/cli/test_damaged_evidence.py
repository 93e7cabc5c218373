"""Finished runs, damaged file by file: a verdict names file and damage, and no reader passes on what is not as the run
left it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.analysis import load as tables
from harness.bench import record as bench
from harness.config.typed import load_config
from harness.launch import opening
from harness.parity import Outcome, Verdict, compare
from harness.parity.telling import render
from harness.revisions import Snapshot
from harness.store import checksums, provenance, show, status
from harness.store.errors import StoreError
from harness.store.rank_place import RankPlace
from harness.store.rundir import RunDir, Store
from harness.store.status import State
from harness.study import replay
from harness.wandb_sync import sync
from harness.worker.report import Reporter
from tests.cli.damages import DAMAGES, SILENT, flip, flip_letter
from tests.parity.edits import edit_json
from tests.support.mutants import Slip, each, finds
from tests.support.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
AREA = "Evidence with integrity"
SMALL = (
    *("model.dim=32", "model.num_layers=1", "data=synthetic", "data.seq_len=16", "train.global_batch_size=8"),
    *("train.microbatch_size=2", "sharding=no_shard", "mesh.world_size=1", "train.steps=4", "study.name=pair"),
    *("measure.capture_steps=[1,3]", "measure.update_steps=[1,3]"),
)
PARTS = 3
"""Each kind of damage is tried on every third file in `make test`, on the others elsewhere."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two runs that differ by rounding, each with every file there may be."""
    root = tmp_path_factory.mktemp("evidence") / "runs"
    done = run_program([str(ROOT / "run.py"), "-m", *SMALL, "engine=native,single", f"launch.root={root}"])
    assert done.returncode == 0, done.stdout + done.stderr
    for run in Store(root).runs():
        assert checksums.damage(run.path) == {}
        (run.path / "diff.patch").write_text("-a\n+b\n")  # a clean checkout leaves none
    return root


Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(whole: Path) -> Pair:
    """An arm and its control."""
    arm, control = sorted((run.path for run in Store(whole).runs()), key=lambda path: "single" in path.name)
    return arm, control


@pytest.fixture
def copy(pair: Pair, tmp_path: Path) -> Path:
    return copied(pair[0], tmp_path)


def copied(run: Path, folder: Path) -> Path:
    """A run at another place, as `cp -r` makes it: with new dates."""
    return Path(shutil.copytree(run, folder / "runs" / "pair" / run.name, copy_function=shutil.copyfile))


def told_of(arm: Path, control: Path) -> tuple[Outcome | None, str]:
    """Outcome and all that is told; no outcome where the verdict is refused."""
    try:
        found = compare(arm, control)
    except Exception as error:  # whatever a mutant falls over names nothing
        return None, str(error)
    return found.outcome, " ".join([found.sentence, *(f"{each.observed} {each.allowed}" for each in found.evidence)])


def survives(pair: Pair, folder: Path, kind: str, name: str, clean: Outcome) -> str:
    """What is wrong with the answer over one damaged file, of either run; empty if nothing is."""
    dice = random.Random(f"{kind} {name}")
    damage = DAMAGES[kind]
    place = dice.choice([place for place in (0, 1) if (pair[place] / name).exists()])
    damaged, other = copied(pair[place], folder), pair[1 - place]
    same = kind == "of the other run" and (damaged / name).read_bytes() == (other / name).read_bytes()
    damage(damaged / name, other / name, dice)
    outcome, text = told_of(*((damaged, other) if place == 0 else (other, damaged)))
    shutil.rmtree(folder / "runs")
    if same or name == SILENT:
        good = outcome is clean
    elif name == status.FILE:  # of which a verdict reads no more than that the run is done, and which list it left
        good = outcome is clean or (outcome in (None, Outcome.NOT_COMPARABLE) and "status.json" in text)
    else:
        named = f"{name} is " in text
        refused = outcome is None and name == "config.yaml"
        good = named and (refused or outcome is Outcome.NOT_COMPARABLE)
    return "" if good else f"{kind}, {name}: {outcome}: {text[:300]}"


@pytest.fixture(scope="module")
def clean(pair: Pair) -> Verdict:
    return compare(*pair)


@pytest.fixture(scope="module")
def names(pair: Pair) -> list[str]:
    """All files that a run recorded, its list, and its state."""
    listed = json.loads((pair[0] / checksums.CHECKSUMS).read_text())["files"]
    assert {path.split("/")[0] for path in listed} == {*checksums.FILES, *checksums.FOLDERS} - {"vouch"}
    return [*listed, SILENT, checksums.CHECKSUMS, status.FILE]


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        *((kind, number % PARTS) for number, kind in enumerate(DAMAGES)),
        *(pytest.param(kind, None, marks=pytest.mark.full) for kind in DAMAGES),
    ],
)
def test_damage_is_named(
    kind: str, part: int | None, pair: Pair, names: list[str], clean: Verdict, tmp_path: Path
) -> None:
    chosen = names if part is None else names[part::PARTS]
    assert not [wrong for name in chosen if (wrong := survives(pair, tmp_path, kind, name, clean.outcome))]


# -- what is demanded of the list, in miniature ------------------------------------------------------------------------

OTHER = "is not what the run recorded"
EXPECTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (lambda run: _flip(run / "capture/step-000001.safetensors"), f"step-000001.safetensors {OTHER}"),
    "a cut stream": (lambda run: _cut(run / "step_checks/steps.f64"), f"step_checks/steps.f64 {OTHER}"),
    "no stream": (lambda run: shutil.rmtree(run / "step_checks"), f"step_checks/steps.f64 {OTHER}"),
    "no metrics": (lambda run: (run / "metrics.jsonl").unlink(), f"metrics.jsonl {OTHER}"),
    "no list": (lambda run: (run / checksums.CHECKSUMS).unlink(), "checksums.json is missing"),
    "a flipped list": (lambda run: _flip(run / checksums.CHECKSUMS), "checksums.json is not the list"),
    "an unnamed list": (lambda run: edit_json(run / status.FILE, checksums=""), "checksums.json is not the list"),
    "no status": (lambda run: (run / status.FILE).unlink(), "status.json is missing"),
    "a folder in its place": (lambda run: _folder(run / "summary.json"), f"summary.json {OTHER}"),
}
"""How a run is damaged, and what is told of it."""


def _flip(path: Path) -> None:
    flip(path, path, random.Random(0))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / ("x" * 60)).touch()


def expectations_that_fail(pair: Pair, folder: Path) -> Iterator[str]:
    """What a verdict fails to say of damaged runs, of a whole one, and of one without a list."""
    for name, (damage, told) in EXPECTED.items():
        run = copied(pair[0], folder)
        damage(run)
        outcome, text = told_of(run, pair[1])
        if outcome is not Outcome.NOT_COMPARABLE or told not in text:
            yield f"{name}: {outcome}: {text[:200]}"
        shutil.rmtree(folder / "runs")
    for name, change, told in (
        ("whole", lambda run: None, ""),
        ("no diff", lambda run: (run / "diff.patch").unlink(), ""),
        ("a diff in its list", lists_its_diff, ""),
        ("old", older, "not known"),
    ):
        run = copied(pair[0], folder)
        change(run)
        found = compare(run, pair[1])
        rows = [finding for finding in found.evidence if finding.check == "files as the run left them"]
        if found.outcome is not Outcome.EQUIVALENT or [str(row.observed) for row in rows] != [told] * bool(told):
            yield f"{name}: {found.outcome}: {rows}"
        shutil.rmtree(folder / "runs")


def lists_its_diff(run: Path) -> None:
    """As a version left it that listed the diff too, in a copy without one."""
    listed = json.loads((run / checksums.CHECKSUMS).read_text())
    listed["files"] |= {"diff.patch": {"bytes": 1, "xxh3": "0"}}
    (run / checksums.CHECKSUMS).write_text(json.dumps({**listed, "attempts": 1}))
    (run / "diff.patch").unlink()
    status.note(run, checksums=str(checksums.of_file(run / checksums.CHECKSUMS)["xxh3"]))


def older(run: Path) -> None:
    """As a version that listed nothing left it."""
    (run / checksums.CHECKSUMS).unlink()
    written = json.loads((run / status.FILE).read_text())
    del written["checksums"]
    (run / status.FILE).write_text(json.dumps(written))


test_a_mutant_is_found = finds(
    AREA,
    expectations_that_fail="""
        sizes alone: Checksums are not compared
            store.checksums._is: of_file(path) == entry => True
        missing is nothing: A file that is gone is no damage
            store.checksums._is: return False => return True
        any list: Any list is believed
            store.checksums.damage:  != ended.checksums =>  == 0
        no list is old: A run whose list was removed is read as one of an older version
            store.checksums.damage: not ended.checksums and not (there and ended.state is State.done) => not there
        status is believed: A list that nobody names is no damage
            store.checksums.damage: (there and ended.state is State.done) => False
        no status is new: It is a new run
            store.checksums.damage: if there else None => if False else None
        told aside: A diff that is gone spoils a verdict
            store.checksums.damage:  and name != ASIDE =>
        no problem: Damage is no problem
            parity.record.load: (*damaged.values(), *others) => tuple(others)
        no remark: An old store is called whole
            parity.tiers.comparable.unlisted: arm.files == control.files == "whole" => True
    """,
)


@pytest.fixture
def damaged(copy: Path) -> Path:
    """A run with one digit of its summary changed; no reader could tell from the file."""
    return damaged_summary(copy)


def damaged_summary(run: Path) -> Path:
    (run / "summary.json").write_text((run / "summary.json").read_text().replace('"wall_s": ', '"wall_s": 1'))
    return run


# -- who reads a run beside a verdict ----------------------------------------------------------------------------------

TOLD = "summary.json is not what the run recorded"


def refusal(ask: Callable[[], object]) -> str:
    """What a request over a damaged run is refused with; empty where it is not."""
    try:
        ask()
    except StoreError as error:
        return str(error)
    return ""


def _zoom(run: Path) -> str:
    return refusal(lambda: render.zoom(run, run, "head.norm.weight"))


def _table(run: Path) -> str:
    row = tables.runs(run.parents[1]).iloc[0]
    return str(row.reason) if row.state == "damaged" else ""


def _steps(run: Path) -> str:
    return TOLD if tables.steps([run]).empty and not tables.memory([run]).size else ""


def _shown_broken(run: Path) -> str:
    (run / "summary.json").write_text("x" * (run / "summary.json").stat().st_size)
    return refusal(lambda: show.show(RunDir(run)))


def _again(run: Path) -> str:
    flip_letter(run / "config.yaml")
    return refusal(lambda: replay.replay_run(str(run), [f"launch.root={run.parents[1]}"]))


def _differ(run: Path) -> str:
    flip_letter(run / "config.yaml")
    return refusal(lambda: show.diff(RunDir(run), RunDir(run)))


def _resumed(run: Path) -> str:
    edit_json(run / status.FILE, state="preempted")
    return obstacle(run)


def obstacle(run: Path) -> str:
    """Why a run would not be gone on with."""
    config = RunDir(run).config()
    cell: Any = SimpleNamespace(config=config, typed=load_config(config))
    return opening._obstacle(RunDir(run), cell, stale=False)


def _requeued(run: Path) -> str:
    edit_json(run / status.FILE, state="preempted")
    return refusal(reporter(run).started)


def reporter(run: Path) -> Reporter:
    return Reporter(run, 1, RankPlace(0, 1, 0, "", "torchrun"))


READERS: dict[str, tuple[Callable[[Path], str], str, Slip]] = {
    "runs": (_table, TOLD, Slip(tables, "_run_row", "checksums.demand(run.path, *checksums.TOLD)", "pass")),
    "steps": (_steps, TOLD, Slip(tables, "_rows", "checksums.demand(Path(path), *checksums.TOLD)", "pass")),
    "bench": (
        lambda run: str(bench.load(run)),
        TOLD,
        Slip(bench, "load", "checksums.damage(path, *checksums.TOLD)", "{}"),
    ),
    "sync": (
        lambda run: refusal(lambda: sync._held_back(RunDir(run), None)),
        TOLD,
        Slip(sync, "_held_back", "checksums.demand(run.path, *checksums.TOLD)", "pass"),
    ),
    "show": (
        lambda run: " ".join(show.show(RunDir(run)).split()),
        f"record damaged: {TOLD}",
        Slip(show, "_shown", "checksums.condition(run.path)", "''"),
    ),
    "show of what is no JSON": (_shown_broken, TOLD, Slip(show, "show", "checksums.demand(run.path)", "pass")),
    "diff": (
        _differ,
        "config.yaml is not",
        Slip(show, "diff", "checksums.demand(run.path, CONFIG, run.provenance.name)", "pass"),
    ),
    "--from": (
        _again,
        "config.yaml is not",
        Slip(replay, "replay_run", 'checksums.demand(run.path, CONFIG, "overrides.txt")', "pass"),
    ),
    "resume": (_resumed, TOLD, Slip(opening, "_obstacle", "else checksums.damage(run.path)", "else {}")),
    "--tensor": (_zoom, TOLD, Slip(render, "zoom", "checksums.demand(Path(path))", "pass")),
    "requeue": (_requeued, TOLD, Slip(Reporter, "started", "checksums.demand(self.run)", "pass")),
}
"""Readers beside a verdict, what each says of a damaged run, and each as if it did not ask."""


@pytest.mark.parametrize("name", READERS)
def test_a_reader_tells_of_damage(name: str, damaged: Path) -> None:
    read, told, _ = READERS[name]
    assert told in read(damaged)


@pytest.mark.parametrize("name", each(AREA, [(name, f"{name} passes on what was damaged") for name in READERS]))
def test_a_reader_that_does_not_ask_is_noticed(name: str, damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, told, slip = READERS[name]
    slip.put(monkeypatch)
    assert told not in read(damaged)


# -- when it is written ------------------------------------------------------------------------------------------------


def test_an_end_lists(copy: Path) -> None:
    status.write(copy, replace(RunDir(copy).status(), state=State.running, attempt=2))
    (copy / "attempts/2").mkdir()
    (copy / "metrics.jsonl").write_text("")
    Reporter(copy, 2, RankPlace(0, 1, 0, "", "torchrun")).ended(State.preempted, "asked to")
    assert checksums.damage(copy) == {}


def test_a_run_that_was_started_again_writes_into_its_files_and_nobody_complains(copy: Path) -> None:
    status.write(copy, replace(RunDir(copy).status(), state=State.queued, attempt=2))
    (copy / "metrics.jsonl").write_text("")
    assert checksums.damage(copy) is None


def test_a_bisected_version_is_signed(copy: Path) -> None:
    """It cannot ask git which commit it is."""
    edit_json(copy / "provenance.json", git=None)
    checksums.renew(copy)
    version: Any = SimpleNamespace(version=SimpleNamespace(commit="0" * 40, asked="HEAD"))
    Snapshot._sign(version, copy)
    assert provenance.read(copy)["git"]["sha"] == "0" * 40
    assert checksums.damage(copy) == {}


def test_a_run_that_starts_over_takes_its_list_away(copy: Path) -> None:
    (copy / "attempts/2").mkdir()
    RunDir(copy).start_over(2)
    assert (copy / "attempts/2/before" / checksums.CHECKSUMS).is_file()
    assert not (copy / checksums.CHECKSUMS).exists()


def test_a_damaged_run_is_asked_for_once_more_and_one_that_cannot_be_is_shown(copy: Path) -> None:
    """Its configuration or status is damaged."""
    other, unclear = (Path(shutil.copytree(copy, copy.with_name(name))) for name in ("other", "unclear"))
    damaged_summary(copy)
    (again,) = compare(copy, other).commands
    flip_letter(copy / "config.yaml")
    (unclear / status.FILE).write_text('{"state": "do')
    assert again.endswith("launch.rerun=always")
    assert [compare(each, other).commands[0].split()[-2] for each in (copy, unclear)] == ["show", "show"]


test_another_list_is_noticed = finds(
    AREA,
    test_an_end_lists="""
        no list at an end: Nobody lists
            worker.report.Reporter.ended: , checksums=checksums.write(self.run) =>
        a list while it runs: Kept
            store.status.write: replace(status, checksums="") if status.state in RESTARTS else status => status
            test_a_run_that_was_started_again_writes_into_its_files_and_nobody_complains
        signed in secret: A signature is damage
            revisions.Snapshot._sign: checksums.renew(run) => pass
            test_a_bisected_version_is_signed
        asked for again: What cannot say what it is is asked for again
            parity.telling.wording._renewed: if any( => if False and any(
            test_a_damaged_run_is_asked_for_once_more_and_one_that_cannot_be_is_shown
        left behind: A run that starts over keeps the list of what it was
            store.rundir.RECORD: was[:-1]
            test_a_run_that_starts_over_takes_its_list_away
    """,
)
