"""Mistakes in the files of `conf/` and `sweeps/`: named with their file, hinted like typed words."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from harness.cli.failure import REQUEST_ERRORS, explained
from harness.config import catalog, overrides
from harness.config.compose import register
from harness.config.errors import BadRequest
from harness.config.overrides import check_overrides, hydra_words
from harness.study import cells
from harness.study.request import cells_of
from tests.support.mutants import Slip, kills


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of `conf/` and `sweeps/` that a test may spoil."""
    for folder in ("conf", "sweeps"):
        shutil.copytree(catalog.ROOT / folder, tmp_path / folder)
    monkeypatch.setattr(catalog, "ROOT", tmp_path)
    catalog._catalog.cache_clear()
    yield tmp_path
    catalog._catalog.cache_clear()


def refusal(checkout: Path, *words: str) -> str:
    register()
    with initialize_config_dir(str(checkout / "conf"), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        try:
            cells.register(words)
            master = hydra.compose_config("config", hydra_words(words), RunMode.MULTIRUN)
            cells_of(hydra.config_loader, master, list(words))
        except REQUEST_ERRORS as error:
            return explained(error)
    pytest.fail("DID NOT RAISE")


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("sweeps/mine.yaml", "gird: {sharding: [optim]}", ["sweeps/mine.yaml: study.gird", "did you mean study.grid"]),
        ("sweeps/mine.yaml", "grid: [sharding\n", ["is not YAML", "mine.yaml", "line 1"]),
        ("sweeps/mine.yaml", "grid: 5", ["sweeps/mine.yaml: study.grid", "axes, like"]),
        ("sweeps/mine.yaml", "replicates: many", ["sweeps/mine.yaml: study.replicates", "a whole number"]),
        ("sweeps/mine.yaml", "- a\n- b", ["sweeps/mine.yaml", "list"]),
        ("sweeps/mine.yaml", "grid: {1: [a, b]}", ["bad request:\n  study=mine: '1': no such group", "lists every"]),
        ("sweeps/mine.yaml", "margins: {1: 2}\ngrid: {train.seed: [1]}", ["study.margins.1: is not a measure"]),
        ("sweeps/mine.yaml", "grid: {sharding: [zero3]}", ["study=mine", "sharding=optim_grads_params"]),
        ("sweeps/mine.yaml", "zip: {train.seed: [1, 2], launch.root: [a, b]}", ["launch.root", "in one request"]),
        ("conf/train/mine.yaml", "stps: 5", ["conf/train/mine.yaml: train.stps", "did you mean train.steps"]),
        ("conf/train/mine.yaml", "steps: abc", ["conf/train/mine.yaml: train.steps", "a whole number"]),
        ("conf/train/mine.yaml", "steps: [", ["is not YAML", "mine.yaml"]),
    ],
)
def test_a_mistake_in_a_file_names_the_file(file: str, content: str, told: list[str], checkout: Path) -> None:
    (checkout / file).write_text(content)
    group = "study" if file.startswith("sweeps") else "train"
    message = refusal(checkout, f"{group}=mine")
    assert message.startswith("bad request:")
    for part in told:
        assert part in message
    assert "full_key" not in message


@pytest.mark.parametrize(
    ("file", "word"), [("my study.yaml", "study='./my study.yaml'"), ("conf/study/seeds.yaml", "study=seeds")]
)
def test_a_study_of_ones_own_is_named_by_its_path_or_in_conf(
    file: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As run.py asks: Hydra is told a name of ours, and what is recorded is what was typed."""
    asked_for_by(tmp_path / file, word, monkeypatch, tmp_path)


def test_a_study_in_the_conf_of_the_checkout_is_named_too(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who walks docs/own.md in the checkout itself writes it there, beside the options of the other groups."""
    asked_for_by(checkout / "conf/study/seeds.yaml", "study=seeds", monkeypatch, checkout)
    (checkout / "conf/study/strategies.yaml").write_text("grid: {train.seed: [1]}\n")
    catalog._catalog.cache_clear()
    with pytest.raises(BadRequest, match="has the name of an option that is here, study=strategies"):
        catalog.load_catalog()


@kills("own classes", "a study in the checkout", "A study in the checkout's conf/study is no option")
def test_a_study_that_is_not_looked_for_is_found(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Slip(catalog, "study_path", '(own_folder(), ROOT / "conf")', "(own_folder(),)").put(monkeypatch)
    with pytest.raises(BadRequest, match="axes, like"):
        asked_for_by(checkout / "conf/study/seeds.yaml", "study=seeds", monkeypatch, checkout)


def asked_for_by(file: Path, word: str, monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    """Write a study, ask for it as run.py does, and look at its cells."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("name: mine\ngrid: {train.seed: [1, 2], model: tiny}\nbase: {data: synthetic}\n")
    monkeypatch.chdir(here)
    typed = [word, "train.steps=3", "train.warmup_steps=0"]
    check_overrides(typed, multirun=True)
    words = hydra_words(typed)
    cells.register(typed)
    register()
    with initialize_config_dir(str(catalog.ROOT / "conf"), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        master = hydra.compose_config("config", words, RunMode.MULTIRUN)
        wanted = cells_of(hydra.config_loader, master, cells.as_asked(words))
    assert [(cell.study, cell.config["train"]["seed"]) for cell in wanted.cells] == [("mine", 1), ("mine", 2)]
    assert all(typed[0] in cell.overrides for cell in wanted.cells)


@pytest.mark.parametrize("word", ["study=./mine.yml", "study=./mien.yaml", "study=mime.yaml"])
def test_a_study_file_of_nearly_that_name_is_proposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("grid: {train.seed: [1]}\n")
    folder = word.removeprefix("study=").rpartition("/")[0]
    with pytest.raises(BadRequest, match=rf"did you mean study={folder and './'}mine\.yaml\?"):
        check_overrides([word], multirun=True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "there is no file"),
        ("- a list\n", "is a list, not a table"),
        ("{}\n", "the file says nothing"),
        ("gird: {train.seed: [1]}\n", "mine.yaml: study.gird"),
        ("grid: {train.seed: [1]}\nbase:\n  a: 1\n  a: 2\n", "found duplicate key a"),
    ],
)
def test_a_study_file_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "mine.yaml").write_text(text)
    command = [sys.executable, str(catalog.ROOT / "run.py"), "-m", "study=mine.yaml", "launch.dry_run=true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


@kills(
    "The terminal",
    "a study's file of nearly that name",
    "A study's path with a letter wrong gets a list of all studies",
)
def test_a_study_file_that_is_not_proposed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Slip(overrides, "_no_study_file", "difflib.get_close_matches(file.name, beside)", "[]").put(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_study_file_of_nearly_that_name_is_proposed(tmp_path, monkeypatch, "study=./mien.yaml")
