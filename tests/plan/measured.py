"""Steps of real engines on real ranks, counted by the meters: what plans are held against."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from harness.config.derived import microbatches_per_rank
from harness.config.schema import Config
from harness.engines.protocol import Microbatch, engine_class
from harness.models.workload import workload_for
from harness.probe.collectives import CollectiveMeter, by_kind
from harness.probe.storage import StorageMeter
from tests.support.composing import compose
from tests.support.factory import ranks_of

STEPS = 3


class Measured(NamedTuple):
    """kept: the engine's own account. sent: count and bytes by kind, of the last step. peak: at most in a step, the
    least of all but the first: ranks that part hold more for a while."""

    kept: dict[str, int]
    sent: dict[str, dict[str, int]]
    peak: int


def measure(rank: int, cells: Sequence[tuple[str, ...]]) -> list[Measured]:
    return [measure_cell(rank, compose(cell).typed) for cell in cells]


def measure_cell(rank: int, config: Config) -> Measured:
    gc.collect()
    storage = StorageMeter()
    engine: Any = engine_class(config.engine.name)(workload_for(config), config, ranks_of(config, rank))
    meter = CollectiveMeter()
    generator = torch.Generator().manual_seed(rank // config.mesh.tp)
    k, shape = microbatches_per_rank(config), (config.train.microbatch_size, config.data.seq_len + 1)
    for _ in range(STEPS):
        meter.take()
        given = [torch.randint(0, config.model.vocab_size, shape, generator=generator) for _ in range(k)]
        batches = [Microbatch(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in given]
        gc.collect()
        with storage.step():
            for number, each in enumerate(batches, start=1):
                engine.forward_backward(each, last=number == k)
            engine.finish_gradients()
            engine.step(1e-3)
    sent, kept = by_kind(meter.take()), engine.accounted_bytes()
    meter.close()
    steps = storage.finish()
    engine.close()
    assert steps is not None
    return Measured(kept, sent, min(each.peak for each in steps[1:]))
