"""The nearest requests that fit into cluster.device_memory: one setting changed, or two; each is planned."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from harness.config.compose import Cell
from harness.config.errors import BadRequest
from harness.config.schema import Config, OuterStrategy, Strategy
from harness.study.replay import replay

Plans = Callable[[Sequence[Cell]], list[dict[str, Any]]]
SHOWN = 5


def changes(config: Config) -> Iterator[tuple[str, ...]]:
    """Settings that may be changed, the least intrusive first: recomputation, then the layout, then dtypes."""
    if not config.model.activation_checkpointing:
        yield ("model.activation_checkpointing=true",)
    strategies = list(Strategy)
    for stronger in strategies[strategies.index(config.sharding.strategy) + 1 :]:
        yield (f"sharding.strategy={stronger.name}",)
    outer = config.mesh.dp_outer
    if outer > 1:
        if config.sharding.outer is not OuterStrategy.optim:
            yield ("sharding.outer=optim",)
        yield ("mesh.dp_outer=1", "sharding.outer=no_shard")
    if config.train.microbatch_size > 1:
        yield ("train.microbatch_size=1",)
    if not config.engine.offload_optimizer:
        yield ("engine.offload_optimizer=true",)
    for dtype in ("bf16", "bf16_comm"):
        if config.dtype.name != dtype and config.dtype.compute.bytes >= 4:
            yield (f"dtype={dtype}",)


def nearest(cell: Cell, plans: Plans) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """Changes after which a cell fits, each with its plan; two at once only where no single one does."""
    single = list(changes(cell.typed))
    pairs = [(*one, *other) for one, other in itertools.combinations(single, 2) if not _same(one, other)]
    for asked in (single, pairs):
        made = [(each, found) for each in asked if (found := _changed(cell, each)) is not None]
        planned = plans([found for _, found in made]) if made else []
        fitting = [(each, plan) for (each, _), plan in zip(made, planned, strict=True) if plan.get("fits")]
        if fitting:
            return fitting[:SHOWN]
    return []


def _same(one: Sequence[str], other: Sequence[str]) -> bool:
    keys = ({word.partition("=")[0] for word in each} for each in (one, other))
    return bool(set.intersection(*keys))


def _changed(cell: Cell, words: Sequence[str]) -> Cell | None:
    """None where the change is refused."""
    try:
        return replay(cell.config, cell.overrides, words)
    except BadRequest:
        return None
