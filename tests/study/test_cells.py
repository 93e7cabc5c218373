"""Points become cells: as Hydra would compose each, every violation once, the same cell once."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import yaml
from hydra import initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from harness.config import catalog
from harness.config.catalog import ROOT, load_catalog, read_option
from harness.config.compose import compose, register
from harness.config.errors import BadRequest
from harness.config.overrides import hydra_words
from harness.config.schema import Config, EngineName, MeasureMode
from harness.config.typed import load_config
from harness.store.rundir import Store
from harness.store.study import read_study, write_study
from harness.study import cells
from harness.study.cells import Composer, Desired
from harness.study.replay import replay, replay_run
from harness.study.request import carry_out, cells_of
from tests.support.mutants import Slip, kills


@contextmanager
def begun() -> Iterator[Hydra]:
    """Hydra, as `run.py` begins it."""
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        instance = GlobalHydra.instance().hydra
        assert instance is not None
        yield instance


@pytest.fixture
def hydra() -> Iterator[Hydra]:
    with begun() as instance:
        yield instance


def ask(hydra: Hydra, *words: str) -> Desired:
    """What `run.py -m WORDS` asks for."""
    cells.register(words)
    master = hydra.compose_config("config", hydra_words(words), RunMode.MULTIRUN)
    return cells_of(hydra.config_loader, master, list(words))


NARROWED = {"engine_step_time": "train.replicate=0,1", "engines": "dtype=fp32"}
"""What `make test` asks of studies of hundreds of cells, which take ten seconds each: all their ways of sharding."""
PLANNED = ("will_it_fit",)
"""Studies for `harness plan` alone: nothing is compared, and no machine need be able to start them."""


@cache
def shipped(study: str, *, whole: bool = False) -> Desired:
    """What `run.py -m study=STUDY` asks for."""
    narrowed = () if whole or study not in NARROWED else (NARROWED[study],)
    started = ("launch.dry_run=true",) if study in PLANNED else ()
    with begun() as instance:
        return ask(instance, f"study={study}", *narrowed, *started)


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


def test_the_fast_way_gives_what_hydra_gives(hydra: Hydra) -> None:
    master = hydra.compose_config("config", [], RunMode.MULTIRUN)
    composer = Composer(hydra.config_loader, master)
    fast = [composer.cell(overrides) for overrides in OVERRIDES * 2]
    GlobalHydra.instance().clear()
    assert [cell.config for cell in fast[: len(OVERRIDES)]] == [compose(o).config for o in OVERRIDES]
    assert fast[len(OVERRIDES) :] == fast[: len(OVERRIDES)], "a cell leaves no trace in the next"


@kills("the front end", "effects of an option", "A cell of a set keeps sharding and mesh that its engine rules out")
def test_effects_that_are_left_out_are_found(hydra: Hydra, monkeypatch: pytest.MonkeyPatch) -> None:
    old = "reach |= read_option(override[1], chosen).reach | {override[1]}"
    Slip(catalog, "_read", old, "pass").put(monkeypatch)
    with pytest.raises(AssertionError):
        test_the_fast_way_gives_what_hydra_gives(hydra)


def test_what_a_request_starts_from_reaches_nothing_else() -> None:
    """Else what replaces one of these options would leave behind what it did to another group."""
    defaults = yaml.safe_load((ROOT / "conf" / "config.yaml").read_text())["defaults"]
    begun = [next(iter(each.items())) for each in defaults if isinstance(each, dict)]
    chosen = [(group, name) for group, name in begun if group in load_catalog() and name]
    assert len(chosen) >= 16
    assert not [f"{group}={name}" for group, name in chosen if read_option(group, name).reach]


def test_every_large_study_is_shipped() -> None:
    assert set(NARROWED) <= set(load_catalog()["study"])


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


def test_parity_pair_is_one_process_against_two_ranks() -> None:
    control, arm = shipped("parity_pair").cells
    assert (control.typed.engine.name.name, control.typed.mesh.world_size) == ("single", 1)
    assert (arm.typed.engine.name.name, arm.typed.mesh.world_size) == ("native", 2)
    assert control.typed.train == arm.typed.train
    assert control.typed.data == arm.typed.data


def test_the_command_line_narrows_a_study_and_its_control_stays(hydra: Hydra) -> None:
    wanted = ask(hydra, "study=strategies", "sharding=optim", "train.steps=5")
    assert [c.typed.sharding.strategy.name for c in wanted.cells] == ["no_shard", "optim"]
    assert {c.typed.train.steps for c in wanted.cells} == {5}
    assert wanted.controls == {wanted.cells[1].signature: wanted.cells[0].signature}


def test_the_same_cell_asked_for_twice_is_one(hydra: Hydra) -> None:
    assert len(ask(hydra, "sharding=optim,optim", "train.seed=0,0").cells) == 1


def test_violations_of_many_cells_are_told_once_with_their_count(hydra: Hydra) -> None:
    with pytest.raises(BadRequest) as caught:
        ask(hydra, "engine=ddp,native", "sharding=optim_grads,no_shard", "train.steps=0")
    texts = [str(v) for v in caught.value.violations]
    assert len(texts) == 2
    assert "(in 1 of 4 cells)" in next(t for t in texts if "sharding" in t)
    assert "cells" not in next(t for t in texts if "train.steps" in t)


def test_two_studies_at_once_are_refused(hydra: Hydra) -> None:
    with pytest.raises(BadRequest, match="several studies"):
        ask(hydra, "study=parity_pair,strategies")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["launch.root=a,b"], "launch.root=.*one run in two ways"),
        (["cluster.threads_per_rank=1,2"], "cluster.threads_per_rank=1,2: asks for one run in two ways"),
        (["launch.dry_run=true,false"], "launch.dry_run"),
        (["debug=inline", "train.seed=1,2"], "2 are asked for"),
    ],
)
def test_a_request_is_carried_out_in_one_way(words: list[str], told: str, hydra: Hydra) -> None:
    with pytest.raises(BadRequest, match=told):
        ask(hydra, *words)


def test_a_large_sweep_is_composed_quickly(hydra: Hydra) -> None:
    started = time.process_time()
    wanted = ask(hydra, "train.seed=range(0,40)", "sharding=optim,no_shard", "train.steps=5,6")
    assert len(wanted.cells) == 160
    assert time.process_time() - started < 160 * 0.1, "composing anew takes more than 0.1 s a cell"


def test_a_dry_run_of_a_study_writes_nothing(
    hydra: Hydra, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = ask(hydra, "study=strategies", "launch.dry_run=true")
    assert carry_out(wanted.cells) == 0
    assert list(tmp_path.iterdir()) == []
    out = capsys.readouterr().out
    assert all(cell.name in out for cell in wanted.cells)


def test_the_record_of_a_study_names_arms_and_controls(tmp_path: Path) -> None:
    wanted = shipped("parity_pair")
    write_study(tmp_path, wanted.cells, wanted.controls)
    record = read_study(tmp_path, "parity_pair")
    assert record is not None
    control, arm = record["cells"]
    assert (control["control"], arm["control"]) == (None, control["signature"])
    assert arm["signature"] == wanted.cells[1].signature
    assert arm["directory"].endswith(arm["signature"][:8])
    assert json.dumps(record)
    assert read_study(tmp_path, "never_asked") is None


def test_a_frozen_cell_again_is_the_same_run() -> None:
    cell = compose(["dtype=bf16", "train.steps=7"])
    again = replay(cell.config, cell.overrides, [])
    assert again == cell


def test_a_frozen_cell_changed() -> None:
    cell = compose(["dtype=bf16", "train.steps=7", "dtype.grad_comm=bf16", "train.seed=3"])
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


def test_an_unknown_run_is_refused(tmp_path: Path) -> None:
    from harness.store.errors import StoreError

    with pytest.raises(StoreError, match="no run 'abcd1234'"):
        replay_run("abcd1234", [f"launch.root={tmp_path}"])


# -- timed studies -----------------------------------------------------------------------------------------------------


def arm_of(c: Config) -> tuple[object, ...]:
    """What tells an arm from the others."""
    split = c.sharding.strategy, c.sharding.outer, c.mesh.world_size, c.mesh.dp_outer
    return c.model.name, c.engine.name, c.dtype.name, *split


@pytest.mark.parametrize(("whole", "blocks"), [(False, 2), pytest.param(True, 5, marks=pytest.mark.full)])
def test_the_study_of_step_time_is_whole_blocks_of_both_regimes(whole: bool, blocks: int, tmp_path: Path) -> None:
    wanted = shipped("engine_step_time", whole=whole)
    configs = [cell.typed for cell in wanted.cells]
    assert all(config.measure.mode is MeasureMode.bench for config in configs)
    assert [config.train.replicate for config in configs] == sorted(config.train.replicate for config in configs)
    arms = Counter(arm_of(c) for c in configs)
    assert set(arms.values()) == {blocks}
    assert len(arms) == 2 * 17 + 2 * 5 + 6
    assert {arm[1] for arm in arms} == set(EngineName) - {EngineName.single, EngineName.ext}
    assert len({c.train.steps for c in configs}) == 1
    hybrid = [c for c in configs if c.mesh.dp_outer > 1]
    assert len({arm_of(c)[1:] for c in hybrid}) == 5
    assert {c.model.name for c in hybrid} == {"bench_comm"}, "they ask about communication"
    write_study(tmp_path, wanted.cells, wanted.controls)
    record = read_study(tmp_path, wanted.cells[0].study)
    assert record is not None
    assert record["order_seed"] == 0
    assert [cell["signature"] for cell in record["cells"]] == [cell.signature for cell in wanted.cells]
    block = {cell.signature: cell.typed.train.replicate for cell in wanted.cells}
    assert all(block[arm] == block[control] for arm, control in wanted.controls.items()), "arms are paired by block"


def test_a_set_of_timed_jobs_is_refused_and_one_is_not(
    hydra: Hydra, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ("measure=bench", "cluster=slurm")
    with pytest.raises(BadRequest, match="inside one allocation"):
        ask(hydra, *words, "train.replicate=0,1")
    assert len(ask(hydra, *words).cells) == 1
