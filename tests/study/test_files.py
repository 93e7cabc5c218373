"""Mistakes in the files of `conf/` and `sweeps/`: named with their file, hinted like typed words."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from harness.cli.failure import REQUEST_ERRORS, explained
from harness.config import catalog
from harness.config.compose import register
from harness.config.errors import BadRequest
from harness.config.overrides import check_overrides, hydra_words
from harness.study import cells
from harness.study.request import cells_of
from tests.support.mutants import finds


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
        ("sweeps/mine.yaml", "- a\n- b", ["sweeps/mine.yaml", "is a list, not a table"]),
        ("sweeps/mine.yaml", "# nothing\n", ["the file says nothing"]),
        ("sweeps/mine.yaml", "base:\n  a: 1\n  a: 2\n", ["found duplicate key a"]),
        ("sweeps/mine.yaml", "grid: {1: [a, b]}", ["bad request:\n  study=mine: '1': no such group", "lists every"]),
        ("sweeps/mine.yaml", "margins: {1: 2}\ngrid: {train.seed: [1]}", ["study.margins.1: is not a measure"]),
        ("sweeps/mine.yaml", "grid: {sharding: [zero3]}", ["study=mine", "sharding=optim_grads_params"]),
        ("sweeps/mine.yaml", "zip: {train.seed: [1, 2], launch.root: [a, b]}", ["launch.root", "in one request"]),
        ("conf/train/mine.yaml", "stps: 5", ["train.stps: train has no such setting", "did you mean train.steps"]),
        ("conf/train/mine.yaml", "steps: abc", ["train.steps=abc", "a whole number"]),
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


def test_a_study_of_ones_own_is_named_in_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As run.py asks: Hydra is told a name of ours, and what is recorded is what was typed."""
    asked_for_by(tmp_path / "conf/study/my seeds.yaml", "study='my seeds'", monkeypatch, tmp_path)
    with pytest.raises(BadRequest, match=r"fix:   a file conf/study/NAME\.yaml, and study=NAME"):
        check_overrides(["study=./mine.yaml"], multirun=True)


test_a_mutant_is_found = finds(
    "own classes",
    test_a_study_of_ones_own_is_named_in_conf="""
        a study in the checkout: A study in one's own conf/study is told to Hydra as it is written
            study.cells.register: normalise(_read(file_of(STUDIES, name)), name) => _read(file_of(STUDIES, name))
            ()
            ^BadRequest: .*(.|\\n)*axes, like
    """,
)


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
