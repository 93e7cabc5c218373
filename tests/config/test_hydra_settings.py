"""Hydra's own settings are refused wherever they stand, with what to type instead: none is silently without effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config import catalog, hydra_settings
from harness.config.catalog import load_catalog
from harness.config.errors import BadRequest
from harness.config.overrides import check_overrides
from tests.support.mutants import Slip, kills

LAUNCHER, SWEEPER, ROOT = "cluster=slurm", "-m a=1,2", "launch.root=DIR"

TYPED = {
    "hydra/launcher=submitit_slurm": LAUNCHER,
    "hydra.launcher.timeout_min=5": LAUNCHER,
    "hydra/sweeper=optuna": SWEEPER,
    "hydra.sweeper.n_trials=20": SWEEPER,
    "hydra.run.dir=x": ROOT,
    "hydra.sweep.subdir=x": ROOT,
    "hydra.mode=MULTIRUN": "-m for a set of cells",
    "hydra.verbose=true": "leave it out",
}

FILES = {
    "override": ("defaults: [override /hydra/launcher: submitit_slurm]", LAUNCHER),
    "optional": ("defaults: [optional /hydra/launcher: submitit_local]", LAUNCHER),
    "placed": ("defaults: [/hydra/sweeper@hydra.sweeper: optuna]", SWEEPER),
    "place": ("defaults: [/model@hydra.job.x: tiny]", "leave it out"),
    "path": ("defaults: [/hydra/launcher/joblib]", LAUNCHER),
    "params": ("hydra:\n  sweeper:\n    params:\n      train.seed: 1,2", SWEEPER),
    "folder": ("hydra: {sweep: {dir: x}}", ROOT),
    "mode": ("hydra: {mode: MULTIRUN}", "-m for a set of cells"),
    "package": ("# @package hydra.sweeper\nparams: {}", SWEEPER),
    "through": ("defaults: [override /model: mine_deep]", SWEEPER),
    "several": ("defaults: [override /model: [tiny, mine_deep]]", SWEEPER),
    "beside": ("defaults: [mine_params]", SWEEPER),
}
"""Content of an option file, and what the refusal must say to type."""


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "conf"
    for group in ("experiment", "model"):
        (folder / group).mkdir(parents=True)
    for name, (text, _) in FILES.items():
        header = "" if text.startswith("#") else "# @package _global_\n"
        (folder / "experiment" / f"mine_{name}.yaml").write_text(f"{header}{text}\n")
    (folder / "model" / "mine_deep.yaml").write_text("defaults: [tiny, override /hydra/sweeper: optuna]\n")
    monkeypatch.chdir(tmp_path)
    return folder


def said(*words: str) -> str:
    with pytest.raises(BadRequest) as caught:
        check_overrides(words, multirun=True)
    (only,) = caught.value.violations
    assert "Hydra's own settings are fixed" in only.problem
    return str(only)


@pytest.mark.parametrize("word", TYPED)
def test_typed(word: str) -> None:
    assert TYPED[word] in said(word)


@pytest.mark.parametrize("name", FILES)
def test_in_an_option_file(name: str, conf: Path) -> None:
    told = said(f"experiment=mine_{name}")
    holder = {"through": "model/mine_deep", "several": "model/mine_deep", "beside": "experiment/mine_params"}
    assert f"{conf / holder.get(name, f'experiment/mine_{name}')}.yaml: " in told
    assert FILES[name][1] in told


@pytest.mark.parametrize("text", ["hydra: {launcher: {x: 1}}", "defaults: [override /hydra/launcher: submitit_slurm]"])
def test_in_a_study_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"question: q\nbase: {{model: tiny}}\n{text}\n")
    assert LAUNCHER in said(f"study={tmp_path / 'mine.yaml'}")


def test_no_shipped_option_is_refused() -> None:
    for group, names in load_catalog().options.items():
        assert not [found for name in names for found in hydra_settings.in_option(group, name)], group


@pytest.mark.parametrize(
    ("slip", "name"),
    [
        pytest.param(
            Slip(hydra_settings, "_in_default", "is_hydra(path) or is_hydra(package)", "is_hydra(package)"),
            "override",
            marks=kills("the desk", "a launcher in a file", "A launcher named in an option file is silently ignored"),
            id="a launcher in a file",
        ),
        pytest.param(
            Slip(hydra_settings, "_in_file", "for key in filter(is_hydra, map(str, values)):", "for key in ():"),
            "params",
            marks=kills("the desk", "sweeper's parameters", "hydra.sweeper.params in a file is an internal error"),
            id="sweeper's parameters",
        ),
        pytest.param(
            Slip(hydra_settings, "_in_default", "yield from _in_file(", "yield from () and _in_file("),
            "through",
            marks=kills("the desk", "files of files", "Only the chosen file is looked into, none that it names"),
            id="files of files",
        ),
    ],
)
def test_what_is_let_through_is_found(slip: Slip, name: str, conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slip.put(monkeypatch)
    with pytest.raises(pytest.fail.Exception):  # nothing is refused
        test_in_an_option_file(name, conf)


@kills("the desk", "advice that fits nothing", "Who typed Hydra's launcher is told to leave it out, not cluster=slurm")
def test_advice_that_fits_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hydra_settings, "INSTEAD", {})
    with pytest.raises(AssertionError):
        test_typed("hydra/launcher=submitit_slurm")


def test_the_catalog_reads_the_folder(conf: Path) -> None:
    assert catalog.own_folder() == conf, "these tests look at files of one's own"
