"""Mistakes in the files of `conf/` and `sweeps/`: named with their file, hinted like typed words."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cli.failure import explained, request_errors
from harness.config import catalog
from harness.config.errors import BadRequest
from harness.config.overrides import check_overrides
from tests.study.test_cells import ask
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
    with pytest.raises(request_errors()) as caught:
        ask(f"{group}=mine", root=checkout)
    message = explained(caught.value)
    assert message.startswith("bad request:")
    for part in told:
        assert part in message
    assert "full_key" not in message


def test_a_study_of_ones_own_is_named_in_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As run.py asks: Hydra is told a name of ours, and what is recorded is what was typed."""
    (tmp_path / "conf/study").mkdir(parents=True)
    study = "name: mine\ngrid: {train.seed: [1, 2], model: tiny}\nbase: {data: synthetic}\n"
    (tmp_path / "conf/study/my seeds.yaml").write_text(study)
    monkeypatch.chdir(tmp_path)
    found = ask("study='my seeds'", "train.steps=3", "train.warmup_steps=0").cells
    assert [(cell.study, cell.config["train"]["seed"]) for cell in found] == [("mine", 1), ("mine", 2)]
    assert all("study='my seeds'" in cell.overrides for cell in found)
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
