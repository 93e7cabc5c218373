"""Cells for launch tests, made without composing."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from harness.config.compose import Cell, plain
from harness.config.schema import Config

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
    """A small cell stored under `root`; later overrides win.

    Its ranks are started by `worker_command`, which tests replace.
    """
    typed = OmegaConf.from_dotlist([*SMALL, f"launch.root={root}", "launch.fork=false", *overrides])
    return Cell(plain(OmegaConf.merge(OmegaConf.structured(Config), typed)), tuple(overrides))
