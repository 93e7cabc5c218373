"""Points become cells: as Hydra would compose each, every violation once, the same cell once."""

from __future__ import annotations

import shutil
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import yaml
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from harness.config.catalog import ROOT, load_catalog, read_option
from harness.config.compose import compose, hydra_begun, register
from harness.config.errors import BadRequest
from harness.config.overrides import hydra_words
from harness.config.schema import Config, EngineName, MeasureMode
from harness.config.typed import load_config
from harness.store.rundir import Store
from harness.study import cells
from harness.study.cells import Composer, Desired
from harness.study.replay import replay, replay_run
from harness.study.request import cells_of
from tests.support.mutants import finds


def ask(*words: str, root: Path = ROOT) -> Desired:
    """What `run.py -m WORDS` asks for, with the files of `conf/` in `root`."""
    cells.register(words)
    register()
    with initialize_config_dir(str(root / "conf"), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        return cells_of(
            loader, loader.load_configuration("config", hydra_words(words), RunMode.MULTIRUN), cells.as_asked(words)
        )


NARROWED = {"engine_step_time": "train.replicate=0,1", "engines": "dtype=fp32"}
"""What `make test` asks of studies of hundreds of cells, which take ten seconds each: all their ways of sharding."""
PLANNED = ("will_it_fit",)
"""Studies for `harness plan` alone: nothing is compared, and no machine need be able to start them."""


@cache
def shipped(study: str, *, whole: bool = False) -> Desired:
    """What `run.py -m study=STUDY` asks for."""
    narrowed = () if whole or study not in NARROWED else (NARROWED[study],)
    started = ("launch.dry_run=true",) if study in PLANNED else ()
    return ask(f"study={study}", *narrowed, *started)


OVERRIDES = [
    (),
    ("engine=ddp", "train.steps=5"),
    ("train.steps=5", "engine=single", "dtype=fp64", "optimizer.betas=[0.8,0.9]", "optimizer.clip_norm=null"),
    ("experiment=bitwise", "train.global_batch_size=16", "debug=one_step"),
    ("cluster=slurm", "cluster.additional={a: 1}", "launch.dry_run=true", "notes='x, y'"),
    ("train.warmup_steps=${train.steps}",),
    ("fault=scale_by_two", "optimizer=sgd", "mesh=two_by_two", "sharding=hfsdp", "ckpt=none"),
    ("engine=deepspeed", "sharding=optim", "dtype=bf16"),
    ("experiment=bench_compute", "measure=bench", "model=odd", "cluster=local"),
    ("experiment=oracle", "engine=native", "numerics=ordered", "measure.rounding_draws=0", "mesh=two"),
    ("ckpt=last", "debug=one_step", "model=odd_units"),
]


def test_the_fast_way_gives_what_hydra_gives() -> None:
    with hydra_begun():
        loader = GlobalHydra.instance().config_loader()
        composer = Composer(loader, loader.load_configuration("config", [], RunMode.MULTIRUN))
        fast = [composer.cell(overrides) for overrides in OVERRIDES * 2]
    assert [cell.config for cell in fast[: len(OVERRIDES)]] == [compose(o).config for o in OVERRIDES]
    assert fast[len(OVERRIDES) :] == fast[: len(OVERRIDES)], "a cell leaves no trace in the next"


test_a_mutant_is_found = finds(
    "the front end",
    test_the_fast_way_gives_what_hydra_gives="""
        effects of an option: A cell of a set keeps sharding and mesh that its engine rules out
            config.catalog._read: reach |= read_option(override[1], chosen).reach | {override[1]} => pass
    """,
)


def test_what_a_request_starts_from_reaches_nothing_else() -> None:
    """Else what replaces one of these options would leave behind what it did to another group."""
    defaults = yaml.safe_load((ROOT / "conf" / "config.yaml").read_text())["defaults"]
    begun = [next(iter(each.items())) for each in defaults if isinstance(each, dict)]
    chosen = [(group, name) for group, name in begun if group in load_catalog() and name]
    assert len(chosen) >= 16
    assert not [f"{group}={name}" for group, name in chosen if read_option(group, name).reach]


@pytest.mark.parametrize(
    ("study", "whole"),
    [
        *((study, False) for study in load_catalog()["study"]),
        *(pytest.param(study, True, marks=pytest.mark.full) for study in NARROWED),
    ],
)
def test_every_shipped_study_expands_and_has_its_controls(study: str, whole: bool) -> None:
    wanted = shipped(study, whole=whole)
    assert {cell.study for cell in wanted.cells} == {study}
    signatures = [cell.signature for cell in wanted.cells]
    assert len(set(signatures)) == len(signatures)
    arms = [s for s in signatures if s in wanted.controls]
    assert bool(arms) == (study not in PLANNED)
    assert set(wanted.controls.values()) <= set(signatures)
    assert wanted.cells[0].typed.study.question.endswith("?")
    first, last = wanted.cells[0], wanted.cells[-1]
    assert [load_config(cell.config) for cell in (first, last)] == [first.typed, last.typed], "as a rank reads it"


def test_the_command_line_narrows_a_study_and_its_control_stays() -> None:
    wanted = ask("study=strategies", "sharding=optim", "train.steps=5")
    assert [c.typed.sharding.strategy.name for c in wanted.cells] == ["no_shard", "optim"]
    assert {c.typed.train.steps for c in wanted.cells} == {5}
    assert wanted.controls == {wanted.cells[1].signature: wanted.cells[0].signature}


def test_the_same_cell_asked_for_twice_is_one() -> None:
    assert len(ask("sharding=optim,optim", "train.seed=0,0").cells) == 1


def test_violations_of_many_cells_are_told_once_with_their_count() -> None:
    with pytest.raises(BadRequest) as caught:
        ask("engine=ddp,native", "sharding=optim_grads,no_shard", "train.steps=0")
    texts = [str(v) for v in caught.value.violations]
    assert len(texts) == 2
    assert "(in 1 of 4 cells)" in next(t for t in texts if "sharding" in t)
    assert "cells" not in next(t for t in texts if "train.steps" in t)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["launch.root=a,b"], "launch.root=.*one run in two ways"),
        (["cluster.threads_per_rank=1,2"], "cluster.threads_per_rank=1,2: asks for one run in two ways"),
        (["launch.dry_run=true,false"], "launch.dry_run"),
        (["debug=inline", "train.seed=1,2"], "2 are asked for"),
        (["study=parity_pair,strategies"], "several studies"),
    ],
)
def test_a_request_is_carried_out_in_one_way(words: list[str], told: str) -> None:
    with pytest.raises(BadRequest, match=told):
        ask(*words)


def test_a_frozen_cell_again_is_the_same_run_and_changed_as_if_asked_for() -> None:
    cell = compose(["dtype=bf16", "train.steps=7", "dtype.grad_comm=bf16", "train.seed=3"])
    assert replay(cell.config, cell.overrides, []) == cell
    changed = replay(cell.config, cell.overrides, ["dtype=fp32", "engine=ddp", "train.steps=9"])
    assert changed.overrides == ("train.seed=3", "dtype=fp32", "engine=ddp", "train.steps=9")
    assert changed.config == compose(changed.overrides).config


def test_what_was_frozen_stays_where_files_changed_since(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = compose(["train.steps=7"])
    frozen = {**cell.config, "optimizer": {**cell.config["optimizer"], "lr": 0.5}}
    assert replay(frozen, [], ["dtype=bf16"]).typed.optimizer.lr == 0.5
    assert replay(frozen, [], ["optimizer=adamw"]).typed.optimizer.lr == 1e-3


def test_an_effectless_setting_of_the_frozen_cell_is_not_held_against_a_change(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("x" * 10_000)
    cell = compose(["data=text", f"data.path={text}"])
    assert replay(cell.config, cell.overrides, ["data=stdlib"]).typed.data.path is None


def test_a_run_is_made_again_in_the_store_in_which_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moved with its store, copied out of it, and copied out of one that is gone."""
    before, after, alone = (tmp_path / name for name in ("before", "after", "alone/run"))
    run = Store(before).create(compose([f"launch.root={before}"])).path
    shutil.copytree(before, after)
    shutil.copytree(run, alone)
    there = after / run.relative_to(before)
    assert replay_run(str(there), []).config["launch"]["root"] == str(after)
    assert replay_run(str(alone), []).config["launch"]["root"] == str(before)
    assert replay_run(str(there), [f"launch.root={alone}"]).config["launch"]["root"] == str(alone)
    shutil.rmtree(before)
    monkeypatch.chdir(tmp_path)
    assert replay_run(str(alone), []).config["launch"]["root"] == str(tmp_path / "runs")


# -- timed studies -----------------------------------------------------------------------------------------------------


def arm_of(c: Config) -> tuple[object, ...]:
    """What tells an arm from the others."""
    split = c.sharding.strategy, c.sharding.outer, c.mesh.world_size, c.mesh.dp_outer
    return c.model.name, c.engine.name, c.dtype.name, *split


@pytest.mark.parametrize(("whole", "blocks"), [(False, 2), pytest.param(True, 5, marks=pytest.mark.full)])
def test_the_study_of_step_time_is_whole_blocks_of_both_regimes(whole: bool, blocks: int) -> None:
    wanted = shipped("engine_step_time", whole=whole)
    configs = [cell.typed for cell in wanted.cells]
    assert all(config.measure.mode is MeasureMode.bench for config in configs)
    assert [config.train.replicate for config in configs] == sorted(config.train.replicate for config in configs)
    arms = Counter(arm_of(c) for c in configs)
    assert set(arms.values()) == {blocks}
    assert len(arms) == 2 * 17 + 2 * 5 + 6
    assert {arm[1] for arm in arms} == set(EngineName) - {EngineName.single, EngineName.ext}
    assert {c.model.name for c in configs if c.mesh.dp_outer > 1} == {"bench_comm"}, "they ask about communication"
    block = {cell.signature: cell.typed.train.replicate for cell in wanted.cells}
    assert all(block[arm] == block[control] for arm, control in wanted.controls.items()), "arms are paired by block"


def test_a_set_of_timed_jobs_is_refused_and_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ("measure=bench", "cluster=slurm")
    with pytest.raises(BadRequest, match="inside one allocation"):
        ask(*words, "train.replicate=0,1")
    assert len(ask(*words).cells) == 1
