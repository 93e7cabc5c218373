"""Sweepers and launchers of Hydra's, as their documentation has them, over run.py: every job is a run of the store."""

from __future__ import annotations

import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from harness.config.catalog import ROOT
from harness.store.metrics import read_metrics
from harness.store.rundir import RunDir, Store
from harness.store.study import read_study
from tests.cli.test_run import SMALL as FEW, run

SMALL = [*FEW, "mesh.world_size=1", "ckpt=none", "measure.capture_steps=[]"]
FILE = """# @package _global_
defaults:
  - override /hydra/sweeper: optuna
hydra:
  mode: MULTIRUN
  sweeper:
    direction: minimize
    n_trials: 2
    n_jobs: 1
    params:
      optimizer.lr: interval(0.0001, 0.01)
study: {objective: grad_norm}
"""


def plugin(package: str) -> pytest.MarkDecorator:
    missing = find_spec("hydra_plugins") is None or find_spec(f"hydra_plugins.{package}") is None
    return pytest.mark.skipif(missing, reason=f"needs {package.replace('_', '-')} (make peers)")


def runs(folder: Path) -> list[RunDir]:
    return list(Store(folder / "runs").runs()) if (folder / "runs").exists() else []


def done(*words: str, cwd: Path) -> str:
    """What a request that ends well prints."""
    ended = run(*words, cwd=cwd)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@plugin("hydra_joblib_launcher")
def test_a_study_is_carried_out_by_joblib(tmp_path: Path) -> None:
    (tmp_path / "conf" / "study").mkdir(parents=True)
    (tmp_path / "conf" / "study" / "mine.yaml").write_text(
        "question: q\nzip: {sharding: [no_shard, optim], train.seed: [1, 2]}\ncontrol: {sharding: no_shard}\n"
    )
    done("-m", "study=mine", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", *SMALL, cwd=tmp_path)
    assert len(runs(tmp_path)) == 3, "two arms, of which one is a control, and a control of the other"
    study = read_study(tmp_path / "runs", "mine")
    assert study is not None
    assert len(study["cells"]) == 3


@plugin("hydra_joblib_launcher")
def test_a_cell_that_fails_ends_the_request(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("def at_once(config, build):\n    raise RuntimeError('it dies')\n")
    words = ["-m", "train.seed=1,2", "hydra/launcher=joblib", "fault.name=dies:at_once"]
    ended = run(*words, *SMALL, cwd=tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert "not done (exit code 1)" in ended.stderr
    assert "harness show" in ended.stderr


@plugin("hydra_joblib_launcher")
def test_timed_cells_are_not_run_beside_each_other(tmp_path: Path) -> None:
    ended = run("-m", "train.seed=1,2", "hydra/launcher=joblib", "measure=bench", *SMALL[1:], cwd=tmp_path)
    assert ended.returncode == 2
    assert "leave hydra/launcher out" in ended.stderr
    assert not runs(tmp_path)


@plugin("hydra_optuna_sweeper")
def test_optuna_is_given_the_loss(tmp_path: Path) -> None:
    words = ["hydra/sweeper=optuna", "hydra/sweeper/sampler=tpe", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1"]
    done("-m", *words, "hydra.sweep.dir=search", "optimizer.lr=interval(0.0001,0.01)", *SMALL, cwd=tmp_path)
    found = yaml.safe_load((tmp_path / "search" / "optimization_results.yaml").read_text())
    losses = [float(read_metrics(each.metrics)[-1]["loss"]) for each in runs(tmp_path)]
    assert len(losses) == 2
    assert found["best_value"] == min(losses)
    lrs = [each.config()["optimizer"]["lr"] for each in runs(tmp_path)]
    assert found["best_params"]["optimizer.lr"] in lrs


@plugin("hydra_optuna_sweeper")
@pytest.mark.full
def test_optuna_in_a_file_is_given_another_objective(tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "search.yaml").write_text(FILE)
    done("experiment=search", *SMALL, cwd=tmp_path)
    (results,) = (tmp_path / "multirun").rglob("optimization_results.yaml")
    norms = [float(read_metrics(each.metrics)[-1]["grad_norm"]) for each in runs(tmp_path)]
    assert yaml.safe_load(results.read_text())["best_value"] == min(norms)


@pytest.mark.full
def test_hydras_own_sweeper(tmp_path: Path) -> None:
    done("-m", "hydra/sweeper=basic", "train.seed=1,2", "hydra.sweep.dir=here", *SMALL, cwd=tmp_path)
    assert len(runs(tmp_path)) == 2
    assert (tmp_path / "here" / "multirun.yaml").exists()


@plugin("hydra_submitit_launcher")
@pytest.mark.full
def test_submitit_on_this_machine(tmp_path: Path) -> None:
    words = ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5", "train.seed=1,2"]
    done("-m", *words, *SMALL, cwd=tmp_path)
    assert len(runs(tmp_path)) == 2


def test_axes_in_a_file_as_hydras_sweeper_has_them(tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    text = "# @package _global_\nhydra: {sweeper: {params: {train.seed: '1,2', sharding: optim}}}\n"
    (tmp_path / "conf" / "experiment" / "axes.yaml").write_text(text)
    said = done("-m", "experiment=axes", "sharding=no_shard", "launch.dry_run=true", cwd=tmp_path)
    assert "2 cells" in said
    assert "sharding=no_shard" in said
    assert "sharding=optim" not in said, "what is typed takes the place of the file's"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["hydra/sweeper=ax"], "Could not find 'hydra/sweeper/ax' Available options in 'hydra/sweeper': basic harness"),
        (["hydra.sweeper.params=1"], "is no table of axes"),
    ],
)
def test_a_plugin_that_is_not_there_is_named(words: list[str], told: str, tmp_path: Path) -> None:
    ended = run("-m", "train.seed=1,2", *words, cwd=tmp_path)
    assert ended.returncode == 2
    assert told in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("typed", ["sharding=opt", "train.wa"])
def test_hydras_completion_of_bash_completes_run(typed: str) -> None:
    """Its function looks for `@hydra.main` in the file that it completes."""
    line = f"python run.py {typed}"
    script = f"""
PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH
eval "$(python run.py --shell-completion install=bash)"
COMP_LINE={shlex.quote(line)}; COMP_POINT=${{#COMP_LINE}}
read -ra COMP_WORDS <<< "$COMP_LINE"; COMP_CWORD=$((${{#COMP_WORDS[@]}}-1))
hydra_bash_completion python "${{COMP_WORDS[COMP_CWORD]}}" ""
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    ended = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert any(each.startswith(typed) for each in ended.stdout.split()), ended.stdout + ended.stderr
