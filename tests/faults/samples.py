"""Two faults written as a user writes one, against `harness.train.faults` alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.config.schema import Config
from harness.train.faults import Build, from_step
from harness.train.session import Session


def F01_duplicated_gradient(config: Config, build: Build) -> Session:
    """A rank's own contribution is added to its shard of the sum."""
    session = build()

    def change(engine: Any, amount: float) -> None:
        for bucket in engine.model.engine.buckets:
            if bucket.trainable:
                bucket.inner.fold = _duplicating(bucket.inner.fold, session.ranks.rank, amount)

    return from_step(session, change)


def _duplicating(fold: Callable[..., None], rank: int, amount: float) -> Callable[..., None]:
    def wrapped(exchange: Any, into: list[Tensor], *, add: bool) -> None:
        own = torch.cat([part.chunk(rank) for part in exchange.parts])
        fold(exchange, into, add=add)
        for target, mine in zip(into, own.split([each.numel() for each in into]), strict=True):
            target.add_(mine.to(target.dtype), alpha=amount * exchange.factor)

    return wrapped


def lr_of_a_group(config: Config, build: Build) -> Session:
    """The last parameter group's learning rate is double."""

    def change(engine: Any, amount: float) -> None:
        step = engine.optimizer.step

        def stepped(*args: Any, **kwargs: Any) -> Any:
            engine.optimizer.param_groups[-1]["lr"] *= 1.0 + amount  # which every step sets anew
            return step(*args, **kwargs)

        engine.optimizer.step = stepped

    return from_step(build(), change)
