"""Hydra's sweepers and launchers are honoured, typed and in files; what has no effect is refused where it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from harness.config import catalog, hydra_settings
from harness.config.catalog import load_catalog
from harness.config.compose import hydra_begun
from harness.config.errors import BadRequest
from harness.config.overrides import check_overrides, hydra_words
from harness.study.request import cells_asked
from tests.support.mutants import finds

ALONE, SET, ROOT = "several options", "-m", "launch.root=DIR"

TYPED = {
    "hydra.run.dir=x": ROOT,
    "hydra.output_subdir=x": ROOT,
    "hydra.mode=RUN": "valid: MULTIRUN",
    "hydra/job_logging=default": "leave it out",
    "hydra.verbose=true": "leave it out",
    "+hydra.verbose=true": "leave it out",
    "+hydra.sweep.dir=x": ROOT,
}
OF_ONE = {"hydra/launcher=joblib": "-m; cluster=slurm", "hydra.sweeper.n_trials=3": SET, "hydra.sweep.dir=x": ROOT}
"""What is refused without -m alone."""

FILES = {
    "override": "defaults: [override /hydra/launcher: mine]",
    "through": "defaults: [/experiment/mine_override]",
    "sweeper": "defaults: [override /hydra/sweeper: mine]",
    "params": "hydra: {sweeper: {params: {train.seed: '1,2'}}}",
}
"""Content of an option file that asks for something of a launcher or sweeper."""


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "conf"
    (folder / "experiment").mkdir(parents=True)
    files = {f"mine_{name}": text for name, text in FILES.items()}
    files |= {"dir": "hydra: {run: {dir: x}}", "jobs": "hydra: {sweep: {dir: x}}"}
    files |= {"search": "defaults: [override /hydra/sweeper: mine]\nhydra: {sweep: {dir: x}}"}
    for name, text in files.items():
        (folder / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    for part in ("launcher", "sweeper"):
        ConfigStore.instance().store(group=f"hydra/{part}", name="mine", node={"_target_": "mine.Other"})
    monkeypatch.chdir(tmp_path)
    return folder


def said(*words: str, multirun: bool = True) -> str:
    """What is said of words, or of what Hydra composes of them."""
    with pytest.raises(BadRequest) as caught:
        composed(*words, multirun=multirun)
    (only,) = caught.value.violations
    return str(only)


def composed(*words: str, multirun: bool = True) -> None:
    check_overrides(words, multirun=multirun)
    with hydra_begun() as path:
        loader = GlobalHydra.instance().config_loader()
        mode = RunMode.MULTIRUN if multirun else RunMode.RUN
        hydra_settings.check_hydra(
            loader.load_configuration("config", [*hydra_words(words), *path], mode).hydra, multirun=multirun
        )


@pytest.mark.parametrize("word", TYPED)
def test_what_has_no_effect_is_refused_where_it_is_typed(word: str) -> None:
    assert TYPED[word] in said(word)


@pytest.mark.parametrize("word", OF_ONE)
def test_what_acts_in_a_set_alone_is_refused_for_one_cell(word: str) -> None:
    assert OF_ONE[word] in said(word, multirun=False)


@pytest.mark.parametrize("name", FILES)
def test_a_launcher_in_a_file_of_one_cell_is_refused(name: str, conf: Path) -> None:
    """Hydra would ignore it, and the cell would run here."""
    told = said(f"experiment=mine_{name}", multirun=False)
    assert "set by an option: is for a set of cells" in told
    assert ("cluster=slurm" in told) == (name in ("override", "through"))


@pytest.mark.parametrize("name", FILES)
def test_a_launcher_in_one_of_several_options_is_refused(name: str, conf: Path) -> None:
    """Hydra chooses the launcher before it composes an axis."""
    with pytest.raises(BadRequest, match=ALONE):
        cells_asked([f"experiment=mine_{name},bitwise"])


@pytest.mark.parametrize("name", FILES)
def test_a_launcher_in_a_file_of_a_set_is_honoured(name: str, conf: Path) -> None:
    composed(f"experiment=mine_{name}", "train.seed=1,2")


@pytest.mark.parametrize("word", ["experiment=dir", "experiment=jobs", "hydra.sweep.subdir=x"])
def test_a_folder_that_nobody_reads_is_refused(word: str, conf: Path) -> None:
    assert ROOT in said(word, "train.seed=1,2")


def test_a_sweeper_of_hydras_has_its_own_words(conf: Path) -> None:
    composed("experiment=search", "hydra.sweep.subdir=x", "train.seed=1,2")
    (word,) = check_overrides(["optimizer.lr=interval(0.1,0.2)"], multirun=True, draws=True)
    assert word.values == ("0.1", "0.2"), "both ends are checked as values"
    assert "hydra/sweeper=optuna" in said("optimizer.lr=interval(0.1,0.2)")


def test_no_shipped_option_asks_anything_of_hydra() -> None:
    """What a request starts from, and every option that Hydra must compose for its effects elsewhere."""
    for group, names in load_catalog().items():
        for name in names:
            if group != catalog.STUDIES and catalog.read_option(group, name).reach:
                composed(f"{group}={name}", multirun=False)


test_a_mutant_is_found = finds(
    "the front end",
    test_a_launcher_in_a_file_of_one_cell_is_refused="""
        a launcher in a file: A launcher named in an option file is silently ignored
            config.hydra_settings.check_hydra: (by_hydra or node["sweeper"].get("params")) => False
            (name="override")
        sweeper's parameters: hydra.sweeper.params in a file is silently ignored
            config.hydra_settings.check_hydra: by_hydra or node["sweeper"].get("params") => by_hydra
            (name="params")
    """,
    test_a_launcher_in_one_of_several_options_is_refused="""
        a launcher of one cell of a set: A launcher in one of several options is silently ignored
            config.hydra_settings.same_jobs: asked[part] != others[part] => False
            (name="override")
    """,
    test_a_folder_that_nobody_reads_is_refused="""
        a folder of jobs: A folder for jobs of Hydra is silently ignored where it starts none
            config.hydra_settings.check_hydra: (part in OF_JOBS and multirun and by_hydra) => part in OF_JOBS
            (word="experiment=jobs")
    """,
    test_a_sweeper_of_hydras_has_its_own_words="""
        an interval: An interval from which nothing draws is taken for its two ends
            config.overrides._refused: not draws => False
    """,
    test_what_has_no_effect_is_refused_where_it_is_typed="""
        advice that fits nothing: Who typed Hydra's launcher is told to leave it out, not cluster=slurm
            config.hydra_settings.INSTEAD: {}
            (word="hydra.run.dir=x")
    """,
)
