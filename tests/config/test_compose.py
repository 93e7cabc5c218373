"""Cells: every option composes, what is frozen comes back, and nothing but the schema gets in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.config.catalog import NULLABLE, load_catalog
from harness.config.compose import Cell, compose, compose_cell, composed, defaults
from harness.config.derived import may_leave_unused, parameter_count
from harness.config.doc import settings
from harness.config.errors import BadRequest
from harness.config.schema import Config
from harness.config.typed import MISSING, load_config
from harness.store.rundir import Store, flatten
from tests.support import composing
from tests.support.programs import fork_trials

DRY = "launch.dry_run=true"
NEEDS = {
    "data=text": [f"data.path={__file__}", "data.seq_len=16"],
    "sharp=dp_outer": ["mesh=two_by_two"],
    "sharding=hsdp": ["mesh=two_by_two"],
    "dtype=fp8_block": ["model=tiny_wide"],
    "dtype=mxfp8": ["model=tiny_wide"],
    "dtype=mxfp8_32x32": ["model=tiny_wide"],
    "sharding=hfsdp": ["mesh=two_by_two"],
    "model=ext": ["model.target=tests.own.parts:Workload"],
    "data=ext": ["data.target=tests.own.parts:Counting"],
    "optimizer=ext": ["optimizer.target=tests.own.parts:Plain"],
    "engine=ext": ["engine.adapter=tests.engines.adapter:Adapter", "sharding=optim"],
    "data=tokens": [f"data.path={__file__}", "model.vocab_size=65536", "data.seq_len=16", "data.header_bytes={odd}"],
}
"""What an option cannot do without."""


def _needs(choice: str) -> list[str]:
    odd = str(Path(__file__).stat().st_size % 2)
    needed = [text.replace("{odd}", odd) for text in NEEDS.get(choice, [])]
    return [text for text in needed if text != "data.header_bytes=0"]


OPTIONS = {group: options for group, options in load_catalog().items() if group != "study"}
LEAVES = [
    pytest.param(f"{group}={option}", composer, marks=pytest.mark.full if number and composer is compose else ())
    for group, options in OPTIONS.items()
    for number, option in enumerate(options)
    for composer in (composing.compose, compose)
]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of one's own are tried as tests/own and tests/engines/test_ext.py try them whole."""
    fork_trials(monkeypatch)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("leaf", "composer"), LEAVES)
def test_every_option_composes(leaf: str, composer: Callable[[list[str]], Cell]) -> None:
    """A file of conf/ as studies read it, and as Hydra does."""
    group, option = leaf.split("=")
    cell = composer([leaf, *_needs(leaf), DRY])
    if group in ("model", "dtype", "engine", "optimizer", "fault"):
        assert cell.config[group]["name"] == option
    assert cell.overrides[0] == leaf


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("name", "said"),
    [("drop_rnk", "fix:   fault.name=tests.faults.sums:drop_rank"), ("torch", "valid: .*F02_doubled_each_microbatch")],
)
def test_a_name_that_is_no_fault_is_told_those_beside_it(name: str, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        compose([f"fault.name=tests.faults.sums:{name}", DRY])


IMPLIED: dict[str, dict[str, object]] = {
    "": {
        "engine.name": "native",
        "sharding.strategy": "optim_grads_params",
        "mesh.world_size": 2,
        "train.steps": 20,
        "model.name": "tiny",
        "data.kind": "stdlib",
        "study.name": "adhoc",
    },
    "engine=ddp": {"sharding.strategy": "no_shard", "mesh.world_size": 2, "dtype.compute": "fp32"},
    "engine=single": {"sharding.strategy": "no_shard", "mesh.world_size": 1},
    "experiment=oracle": {"sharding.strategy": "no_shard", "mesh.world_size": 1, "dtype.compute": "fp64"},
    "engine=deepspeed sharding=optim": {"sharding.strategy": "optim"},
    "measure=bench": {"measure.mode": "bench", "ckpt.policy": "none", "measure.capture_steps": []},
    "train.warmup_steps=${train.steps}": {"train.warmup_steps": 20},
}
"""What follows from words, but for what is typed."""


@pytest.mark.parametrize("words", IMPLIED)
def test_what_is_implied(words: str) -> None:
    found = flatten(compose(words.split()).config)
    assert {key: found[key] for key in IMPLIED[words]} == IMPLIED[words]
    assert words != "measure=bench" or 3 <= found["measure.warmup_steps"] < found["train.steps"]


def test_frozen_values_come_back_whole() -> None:
    cell = compose(["dtype=bf16_comm", "optimizer.betas=[0.8,0.9]", "optimizer.clip_norm=null"])
    through_json = json.loads(json.dumps(cell.config))
    assert through_json == cell.config
    assert load_config(through_json) == cell.typed
    assert cell.typed.optimizer.clip_norm is None
    assert cell.config["dtype"]["grad_comm"] == "bf16"


def test_what_got_past_hydra_is_refused_when_frozen() -> None:
    cfg = composed()
    OmegaConf.set_struct(cfg, False)
    cfg.new = 1
    with pytest.raises(BadRequest, match="new: no such group or setting"):
        compose_cell(cfg, [])


def test_paths_mean_the_same_wherever_a_rank_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("x" * 10_000)
    monkeypatch.chdir(tmp_path)
    cell = compose(["data=text", "data.path=text.txt", "launch.root=here"])
    assert cell.typed.data.path == str(tmp_path / "text.txt")
    assert cell.typed.launch.root == str(tmp_path / "here")
    with pytest.raises(BadRequest, match=f"ckpt.load={tmp_path}/there: holds no checkpoint"):
        compose(["ckpt.load=there"])


def test_a_reference_to_nothing_is_refused() -> None:
    with pytest.raises(BadRequest, match="nowhere"):
        compose(["notes=${nowhere}"])


def test_what_may_be_left_unused_is_known_without_building() -> None:
    asked = ["tiny", "odd model.skip_idle=false", "moe model.experts_per_token=8", "moe model.skip_idle=false"]
    asked += ["odd", "moe"]
    found = [may_leave_unused(composing.compose(f"model={words}".split()).typed) for words in asked]
    assert found == [False, False, False, False, True, True]


@pytest.mark.parametrize(
    ("model", "published"), [("gpt_125m", 124e6), ("llama_1b", 1.236e9), ("llama_8b", 8.03e9), ("llama_70b", 70.55e9)]
)
def test_models_have_the_size_of_their_name(model: str, published: float) -> None:
    cfg = compose([f"model={model}", DRY]).typed
    assert parameter_count(cfg) == pytest.approx(published, rel=0.01)


def test_every_setting_has_a_sentence_and_groups_packages_and_fields_share_names() -> None:
    assert all(s.sentence.endswith(".") for s in settings().values())
    assert set(load_catalog()) - set(NULLABLE) | {"study"} == set(Config.__dataclass_fields__) - {"notes", "run"}


def test_a_model_that_does_not_say_its_family_is_refused() -> None:
    """As a file copied into conf/model/ without the line would be; a llama would train silently."""
    cfg = composed([])
    cfg.model.family = "???"
    with pytest.raises(BadRequest, match=r"(?s)model=tiny does not say it.*valid: llama, moe, odd, ext.*conf/model/"):
        compose_cell(cfg, [])
    assert defaults()["model"]["family"] == MISSING
    for name in load_catalog()["model"]:
        assert not OmegaConf.is_missing(composed([f"model={name}"]).model, "family")


def test_a_run_to_load_is_named_as_everywhere(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = store.create(compose([f"launch.root={tmp_path}", "train.seed=3"]))
    saved = run.path / "ckpt" / "step-000005"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    store.remember(run)
    for name in ("@last", run.signature()[:8], f"{run.path.parent.name}/{run.path.name}", str(run.path)):
        assert compose([f"launch.root={tmp_path}", f"ckpt.load={name}"]).typed.ckpt.load == str(run.path), name
    with pytest.raises(BadRequest, match="or @last"):
        compose([f"launch.root={tmp_path}", "ckpt.load=@first"])
