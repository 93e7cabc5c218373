"""dtype.fp8 through the loop: our engine beside one process bit by bit, and peers; resumed, and taken up by others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.checkpoint.folder import path_of
from harness.checkpoint.manifest import Manifest
from harness.checkpoint.storage import whole_tensor
from harness.config.schema import CkptPolicy, Config, Dtype, EngineName, Fp8, Numerics, Strategy
from harness.data.loader import Loader
from harness.engines.protocol import Microbatch
from harness.fp8.linear import Fp8Linear
from harness.store.metrics import read_metrics
from tests.support.factory import small_config, stopping, train
from tests.support.layouts import build, checkpoints_of
from tests.support.spawn import run_ranks

ZERO_3 = Strategy.optim_grads_params
STEPS, STOPPED = 3, 2
SHARDED = {
    Fp8.current: ZERO_3,
    Fp8.block: Strategy.optim_grads,
    Fp8.mx: Strategy.optim,
    Fp8.mx_32x32: ZERO_3,
}


def config_of(recipe: Fp8, engine: EngineName, strategy: Strategy = Strategy.no_shard, **more: Any) -> Config:
    """Two ranks of a bf16 decoder of one block; `single` is one."""
    mode = Numerics.exact if engine in (EngineName.native, EngineName.single) else Numerics.fast
    world = 1 if engine is EngineName.single else 2
    given: dict[str, Any] = {"numerics__mode": mode, "mesh__world_size": world, "train__steps": STEPS} | more
    return small_config(
        model__dim=128, model__num_heads=4, model__num_kv_heads=4, model__num_layers=1,
        model__ffn_dim=160 if recipe.multiple == 32 else 128,  # of 160 rows two ranks cut a tile of 32
        train__microbatch_size=2, ckpt__policy=CkptPolicy.last, dtype__compute=Dtype.bf16,
        dtype__fp8=recipe, engine__name=engine, sharding__strategy=strategy, **given,
    )  # fmt: skip


PEERS = (
    config_of(Fp8.current, EngineName.ddp),
    config_of(Fp8.current, EngineName.fsdp2, ZERO_3),
    config_of(Fp8.current, EngineName.native, Strategy.optim, numerics__mode=Numerics.fast),
    config_of(Fp8.current, EngineName.single),
)
"""Take up the checkpoint of our engine under ZeRO-3."""


def saved(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the last checkpoint but the ranks' generators."""
    path = path_of(folder / "ckpt", STEPS)
    held = Manifest.read(path).tensors
    return {key: whole_tensor(path, entry) for key, entry in held.items() if not key.startswith("rng/")}


def take_up(folder: Path, config: Config, rank: int) -> tuple[dict[str, Tensor], float]:
    """A checkpoint in an engine of another layout: its state, and the loss of the same microbatch on each rank."""
    engine = build(config, rank)
    loaded = checkpoints_of(folder / "ckpt", config, rank).load_newest(engine)
    assert loaded is not None
    assert not loaded.wrong
    held = {f"weights/{name}": value.clone() for name, value in engine.named_weights()}
    fed = Loader(config, 0).batch(STEPS + 1)[0]
    batch = Microbatch(*(torch.from_numpy(each.copy()) for each in fed))
    loss = float(engine.forward_backward(batch, last=True))
    engine.close()
    return held, loss


def two_ranks(rank: int, root: Path) -> list[tuple[dict[str, Tensor], float]]:
    for recipe, strategy in SHARDED.items():
        config = config_of(recipe, EngineName.native, strategy, measure__capture_steps=[1, STEPS])
        train(config, root / recipe.name, rank)
    current = config_of(Fp8.current, EngineName.native, ZERO_3)
    train(current, root / "resumed", rank, stopping(STOPPED))
    train(current, root / "resumed", rank)
    for config in PEERS[:2]:
        train(config, root / config.engine.name.name, rank)
    return [take_up(root / "current", config, rank) for config in PEERS[:3]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    root = tmp_path_factory.mktemp("runs")
    told = run_ranks(two_ranks, 2, root)
    for recipe in Fp8:
        train(config_of(recipe, EngineName.single, measure__capture_steps=[1]), root / f"single {recipe.name}")
    return root, told


@pytest.mark.parametrize("recipe", Fp8)
def test_our_engine_trains_what_one_process_trains_to_the_bit(recipe: Fp8, trained: tuple[Path, list[Any]]) -> None:
    """Weights, moments and losses: every step multiplied the same payloads."""
    root, _ = trained
    ours, alone = saved(root / recipe.name), saved(root / f"single {recipe.name}")
    assert ours.keys() == alone.keys()
    for key, value in ours.items():
        assert torch.equal(value, alone[key]), key
    lines, others = (read_metrics(root / name / "metrics.jsonl") for name in (recipe.name, f"single {recipe.name}"))
    assert [line["loss"] for line in lines] == [line["loss"] for line in others]
    for name in (recipe.name, f"single {recipe.name}"):
        for file in sorted((root / name / "capture").glob("witness-*.json")):
            assert json.loads(file.read_text())["wrong_weights"] == [], file


def test_a_resumed_run_repeats_the_bits(trained: tuple[Path, list[Any]]) -> None:
    root, _ = trained
    whole, resumed = saved(root / "current"), saved(root / "resumed")
    assert [key for key, value in whole.items() if not torch.equal(value, resumed[key])] == []


def test_others_take_up_its_state_and_go_on(trained: tuple[Path, list[Any]]) -> None:
    root, told = trained
    wanted = saved(root / "current")
    alone = take_up(root / "current", PEERS[3], 0)
    for of_rank in told:
        for held, loss in (*of_rank, alone):
            assert [key for key, value in held.items() if not torch.equal(value, wanted[key])] == []
            assert loss == pytest.approx(alone[1], rel=1e-3)
        assert of_rank[0][1] == of_rank[2][1] == alone[1], "DDP and ours quantize the main weights, as one process does"


def test_peers_train_alike(trained: tuple[Path, list[Any]]) -> None:
    """Not to the bit: DDP scales the loss before the backward, where e5m2 underflows; FSDP2 quantizes bf16 weights."""
    root, _ = trained
    alone = [line["loss"] for line in read_metrics(root / "single current" / "metrics.jsonl")]
    for engine in ("ddp", "fsdp2"):
        losses = [line["loss"] for line in read_metrics(root / engine / "metrics.jsonl")]
        assert losses == pytest.approx(alone, rel=2e-3)


def test_facts_of_recipes_are_said_alike() -> None:
    for name in Fp8:
        layer = nn.Linear(128, 128)
        Fp8Linear.convert(layer, name)
        assert isinstance(layer, Fp8Linear)
        recipe = layer.recipe
        assert name.multiple == recipe.multiple
        units = [torch.finfo(each.format).eps / 2 for each in (recipe.activations, recipe.weights, recipe.gradients)]
        assert units == [2.0**-4, 2.0**-4, 2.0**-name.gradient_precision]
