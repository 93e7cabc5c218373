"""Hydra's sweepers and launchers are honoured, typed and in files; what has no effect is refused where it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config import catalog, overrides
from harness.config.catalog import load_catalog
from harness.config.errors import BadRequest
from harness.config.overrides import check_overrides, read_overrides
from tests.support.mutants import Slip, kills

ALONE, SET, ROOT = "several options", "-m; cluster=slurm", "launch.root=DIR"

TYPED = {
    "hydra.run.dir=x": ROOT,
    "hydra.sweep.subdir=x": ROOT,
    "hydra.output_subdir=x": ROOT,
    "hydra.mode=RUN": "valid: MULTIRUN",
    "hydra.verbose=true": "leave it out",
    "hydra/job_logging=default": "leave it out",
    "+hydra.verbose=true": "leave it out",
}

FILES = {
    "override": "defaults: [override /hydra/launcher: submitit_slurm]",
    "optional": "defaults: [optional /hydra/launcher: submitit_local]",
    "placed": "defaults: [/hydra/launcher@hydra.launcher: joblib]",
    "path": "defaults: [/hydra/launcher/joblib]",
    "params": "hydra:\n  launcher:\n    n_jobs: 2",
    "package": "# @package hydra.launcher\nn_jobs: 2",
    "through": "defaults: [override /model: mine_deep]",
    "several": "defaults: [override /model: [tiny, mine_deep]]",
    "beside": "defaults: [mine_params]",
}
"""Content of an option file that asks for something of a launcher."""
HOLDER = {"through": "model/mine_deep", "several": "model/mine_deep", "beside": "experiment/mine_params"}


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "conf"
    for group in ("experiment", "model"):
        (folder / group).mkdir(parents=True)
    for name, text in FILES.items():
        header = "" if text.startswith("#") else "# @package _global_\n"
        (folder / "experiment" / f"mine_{name}.yaml").write_text(f"{header}{text}\n")
    (folder / "model" / "mine_deep.yaml").write_text("defaults: [tiny, override /hydra/launcher: joblib]\n")
    (folder / "experiment" / "dir.yaml").write_text("# @package _global_\nhydra: {run: {dir: x}}\n")
    (folder / "experiment" / "mode.yaml").write_text("# @package _global_\nhydra: {mode: MULTIRUN}\n")
    (folder / "experiment" / "search.yaml").write_text(
        "# @package _global_\ndefaults: [override /hydra/sweeper: optuna]\nhydra: {sweep: {dir: x}}\n"
    )
    monkeypatch.chdir(tmp_path)
    return folder


def said(*words: str, multirun: bool = True) -> str:
    with pytest.raises(BadRequest) as caught:
        check_overrides(words, multirun=multirun)
    (only,) = caught.value.violations
    return str(only)


@pytest.mark.parametrize("word", TYPED)
def test_what_has_no_effect_is_refused_where_it_is_typed(word: str) -> None:
    assert TYPED[word] in said(word)


@pytest.mark.parametrize("name", FILES)
def test_a_launcher_in_a_file_of_one_cell_is_refused(name: str, conf: Path) -> None:
    """Hydra would ignore it, and the cell would run here."""
    told = said(f"experiment=mine_{name}", multirun=False)
    assert f"{conf / HOLDER.get(name, f'experiment/mine_{name}')}.yaml: " in told
    assert SET in told


@pytest.mark.parametrize("name", FILES)
def test_a_launcher_in_one_of_several_options_is_refused(name: str, conf: Path) -> None:
    """Hydra chooses the launcher before it composes an axis."""
    assert ALONE in said(f"experiment=mine_{name},bitwise")


@pytest.mark.parametrize("name", FILES)
def test_a_launcher_in_a_file_of_a_set_is_honoured(name: str, conf: Path) -> None:
    words, asked = read_overrides([f"experiment=mine_{name}", "train.seed=1,2"], multirun=True)
    assert [word.key for word in words] == ["experiment", "train.seed"]
    assert any(each.part == "launcher" for each in asked.settings)


@pytest.mark.parametrize("name", ["override", "optional", "placed", "path", "through"])
def test_the_launcher_of_a_file_is_known(name: str, conf: Path) -> None:
    known = ("joblib", "submitit_slurm", "submitit_local")
    assert read_overrides([f"experiment=mine_{name}"], multirun=True)[1].launcher in known


def test_a_folder_in_a_file_is_refused(conf: Path) -> None:
    assert ROOT in said("experiment=dir")


def test_a_file_can_ask_for_a_set(conf: Path) -> None:
    assert read_overrides(["experiment=mode", "train.seed=1,2"])[1].multirun
    assert read_overrides(["hydra.mode=MULTIRUN", "train.seed=1,2"])[1].multirun


@pytest.mark.parametrize("words", [["hydra/sweeper=optuna"], ["experiment=search"]])
def test_a_sweeper_of_hydras_has_its_own_words(words: list[str], conf: Path) -> None:
    found, asked = read_overrides(
        [*words, "hydra.sweep.dir=x", "hydra.sweeper.n_trials=3", "optimizer.lr=interval(0.1,0.2)"], multirun=True
    )
    assert asked.by_hydra
    assert found[-1].values == ("0.1", "0.2"), "both ends are checked as values"


def test_an_interval_is_refused_where_nothing_draws_from_it() -> None:
    assert "hydra/sweeper=optuna" in said("optimizer.lr=interval(0.1,0.2)")
    assert "hydra/sweeper=optuna" in said("hydra/sweeper=basic", "optimizer.lr=interval(0.1,0.2)")


@pytest.mark.parametrize("text", ["hydra: {launcher: {x: 1}}", "defaults: [override /hydra/launcher: submitit_slurm]"])
def test_in_a_study_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"question: q\nbase: {{model: tiny}}\n{text}\n")
    words = [f"study={tmp_path / 'mine.yaml'}"]
    assert SET in said(*words, multirun=False)
    assert any(each.part == "launcher" for each in read_overrides(words, multirun=True)[1].settings)


def test_no_shipped_option_asks_anything_of_hydra() -> None:
    for group, names in load_catalog().items():
        assert not [found for name in names for found in overrides.in_option(group, name)], group


@pytest.mark.parametrize(
    ("slip", "name"),
    [
        pytest.param(
            Slip(overrides, "_in_file", "is_hydra(line.path) or is_hydra(line.package)", "is_hydra(line.package)"),
            "override",
            marks=kills(
                "the front end", "a launcher in a file", "A launcher named in an option file is silently ignored"
            ),
            id="a launcher in a file",
        ),
        pytest.param(
            Slip(overrides, "_in_file", "for key in filter(is_hydra, map(str, file.values)):", "for key in ():"),
            "params",
            marks=kills("the front end", "sweeper's parameters", "hydra.sweeper.params in a file is an internal error"),
            id="sweeper's parameters",
        ),
        pytest.param(
            Slip(catalog, "files_of", "for line in found[path].lines", "for line in ()"),
            "through",
            marks=kills("the front end", "files of files", "Only the chosen file is looked into, none that it names"),
            id="files of files",
        ),
    ],
)
def test_what_is_let_through_is_found(slip: Slip, name: str, conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slip.put(monkeypatch)
    with pytest.raises(pytest.fail.Exception):  # nothing is refused
        test_a_launcher_in_a_file_of_one_cell_is_refused(name, conf)


@kills(
    "the front end", "advice that fits nothing", "Who typed Hydra's launcher is told to leave it out, not cluster=slurm"
)
def test_advice_that_fits_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overrides, "INSTEAD", {})
    with pytest.raises(AssertionError):
        test_what_has_no_effect_is_refused_where_it_is_typed("hydra.run.dir=x")


def test_the_catalog_reads_the_folder(conf: Path) -> None:
    assert catalog.own_folder() == conf, "these tests look at files of one's own"
