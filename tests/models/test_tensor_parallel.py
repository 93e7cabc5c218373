"""mesh.tp: the decoder cut by its plan, trained by the loop, against one process; resumed by other meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.config.schema import CkptPolicy, Config, Dtype, EngineName, OuterStrategy, Strategy
from harness.engines.protocol import engine_class
from harness.models.workload import workload_for
from harness.store.metrics import read_metrics
from tests.support.covering import once
from tests.support.factory import ranks_of, small_config, train, with_dtypes
from tests.support.layouts import checkpoints_of
from tests.support.spawn import run_ranks

MESHES = {"2x2": (1, 2), "1x4": (1, 4), "4x1": (1, 1), "2x1x2": (2, 2)}
"""Outer and tensor-parallel ranks, of four."""
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"model__tie_embeddings": True},
    "sequence": {"mesh__sequence_parallel": True},
    "tied sequence, grouped": {
        "model__tie_embeddings": True, "mesh__sequence_parallel": True, "model__num_kv_heads": 4,
        "model__num_heads": 8, "model__dim": 48,
    },
}  # fmt: skip


def config_of(
    mesh: str | None,
    model: str,
    strategy: Strategy = Strategy.optim_grads_params,
    engine: EngineName = EngineName.native,
    **more: Any,
) -> Config:
    """Four ranks of a mesh, or one process (None); fp64, eight sequences a step."""
    given = {"model__num_heads": 4, "model__num_kv_heads": 4, "train__microbatch_size": 2} | MODELS[model] | more
    if mesh is not None:
        outer, tp = MESHES[mesh]
        given |= {
            "engine__name": engine, "sharding__strategy": strategy, "mesh__world_size": 4,
            "mesh__dp_outer": outer, "mesh__tp": tp,
            "sharding__outer": OuterStrategy[
                "optim" if outer > 1 and engine is EngineName.native else "no_shard"
            ],
        }  # fmt: skip
    given["mesh__sequence_parallel"] = bool(given.get("mesh__sequence_parallel")) and given.get("mesh__tp", 1) > 1
    return with_dtypes(small_config(**given), Dtype.fp64, Dtype.fp64)


CASES = [
    ("2x2", "plain", Strategy.no_shard),
    ("2x2", "sequence", Strategy.optim_grads),
    ("1x4", "tied sequence, grouped", Strategy.optim_grads_params),
    ("4x1", "plain", Strategy.optim_grads_params),
    ("2x1x2", "tied sequence, grouped", Strategy.optim),
    ("2x1x2", "tied sequence, grouped", Strategy.optim_grads, EngineName.fsdp2),
]
"""Every engine, mesh, model and strategy, and what tied, cut and grouped weights are met by."""
MORE = [
    ("2x2", "tied", Strategy.optim),
    ("2x2", "sequence", Strategy.optim_grads_params, EngineName.fsdp2),
    ("2x2", "tied sequence, grouped", Strategy.optim_grads_params),
    ("1x4", "tied", Strategy.optim_grads_params),
    ("1x4", "sequence", Strategy.no_shard),
    ("2x1x2", "sequence", Strategy.optim_grads_params),
    ("1x4", "tied", Strategy.optim_grads, EngineName.fsdp2),
    ("2x1x2", "tied sequence, grouped", Strategy.optim_grads_params, EngineName.fsdp2),
]
"""What `make test-all` adds."""


def name_of(case: tuple[Any, ...]) -> str:
    return "-".join(map(str, case))


def run_all(rank: int, folder: Path, cases: list[Any]) -> dict[str, dict[str, Tensor]]:
    """Train every case by the loop; its last weights, by its name."""
    found = {}
    for case in cases:
        config = config_of(*case, ckpt__policy=CkptPolicy.last)
        train(config, folder / name_of(case), rank)
        found[name_of(case)] = weights_of(config, rank, load=folder / name_of(case))
    return found


def weights_of(config: Config, rank: int, load: Path) -> dict[str, Tensor]:
    """Whole weights of a run's checkpoint, in an engine of this configuration."""
    engine = engine_class(config.engine.name)(workload_for(config), config, ranks_of(config, rank))
    checkpoints_of(load / "ckpt", config, rank).load_newest(engine)
    found = {name: value.clone() for name, value in engine.named_weights()}
    engine.close()
    return found


@once
def trained(folder: Path, more: bool = False) -> list[dict[str, dict[str, Tensor]]]:
    return run_ranks(run_all, 4, folder, MORE if more else CASES)


@once
def trained_alone(folder: Path, model: str) -> dict[str, Tensor]:
    """By one process: its record, and its last weights."""
    train(config_of(None, model, ckpt__policy=CkptPolicy.last), folder / f"alone {model}")
    return weights_of(config_of(None, model), 0, load=folder / f"alone {model}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)], ids=name_of)
def test_the_loop_trains_what_one_process_trains(case: tuple[Any, ...], folder: Path) -> None:
    """Losses, norms and data are recorded once for each microbatch, and the checkpoint holds what one process has."""
    ran, name, model = trained(folder, case in MORE), name_of(case), case[1]
    alone = trained_alone(folder, model)
    for of_rank in ran:
        assert list(of_rank[name]) == list(alone)
        assert max(float((value - alone[key]).abs().max()) for key, value in of_rank[name].items()) < 1e-10
    mine, theirs = (read_metrics(folder / each / "metrics.jsonl") for each in (name, f"alone {model}"))
    for line, other in zip(mine, theirs, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-12)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-12)
        assert (line["data_digest"], line["tokens"]) == (other["data_digest"], other["tokens"])


def loads(rank: int, folder: Path) -> list[dict[str, Tensor]]:
    """The first case's checkpoint in every mesh of four ranks, and in FSDP2 over the same plan."""
    wanted: list[Any] = [(mesh, "plain") for mesh in MESHES]
    wanted.append(("2x2", "plain", Strategy.optim_grads, EngineName.fsdp2))
    return [weights_of(config_of(*case), rank, load=folder / name_of(CASES[0])) for case in wanted]


def test_every_mesh_takes_up_what_another_saved(folder: Path) -> None:
    wanted = trained(folder)[0][name_of(CASES[0])]
    for of_rank in run_ranks(loads, 4, folder):
        for found in of_rank:
            assert [name for name, value in found.items() if not torch.equal(value, wanted[name])] == []
    alone = weights_of(config_of(None, "plain"), 0, load=folder / name_of(CASES[0]))
    assert [name for name, value in alone.items() if not torch.equal(value, wanted[name])] == []
