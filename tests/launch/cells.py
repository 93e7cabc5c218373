"""Cells for launch tests, made without composing."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from omegaconf import DictConfig, OmegaConf

from harness.config.compose import Cell, plain
from harness.config.schema import Config
from harness.launch.local import ranks

SMALL = (
    "engine.name=ddp",
    "sharding.strategy=no_shard",
    "model.dim=32",
    "model.num_layers=2",
    "model.ffn_dim=48",
    "data.kind=synthetic",
    "data.seq_len=16",
    "train.global_batch_size=8",
    "train.microbatch_size=2",
)
"""A two-layer model on synthetic data under DDP: a few milliseconds a step."""


def make_cell(root: Path, *overrides: str) -> Cell:
    """A small cell stored under `root`; later overrides win."""
    config = deepcopy(_small())
    asked = OmegaConf.from_dotlist([f"launch.root={root}", *overrides])
    for group, settings in asked.items():
        config[group] = plain(OmegaConf.merge(_group(str(group)), {group: settings}))[group]
    return Cell(config, tuple(overrides))


@cache
def _small() -> dict[str, Any]:
    """Plain values of `SMALL`."""
    return plain(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.from_dotlist(list(SMALL))))


@cache
def _group(name: str) -> DictConfig:
    """The typed root's group alone, with what `SMALL` says of it: to merge into all of the root takes 20 ms."""
    field = OmegaConf.create({name: OmegaConf.structured(Config)[name]})
    return cast(DictConfig, OmegaConf.merge(field, {name: _small()[name]}))


def fake_ranks(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let `fake_rank.py` stand in for ranks: "what rank 0 does|what rank 1 does"."""
    words = lambda run, attempt: ["python", "-P", "-m", "tests.launch.fake_rank", str(run), "--attempt", str(attempt)]  # noqa: E731
    monkeypatch.setattr(ranks, "worker_command", words)
    monkeypatch.setenv("FAKE", script)
