"""The branches that only NCCL takes, on real process groups: the backend's own gathers and reductions.

Over gloo the engine moves data by its own sends and reads. Here it is told that its peers are NCCL's, and calls gloo's
collectives as it would call NCCL's, through torch's own bindings, which refuse a wrong argument. The training must be
the one that sends and reads make. What NCCL demands beyond gloo is checked by `tests/streams/group.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from harness.fsdp.comm.communicator import Communicator
from tests.fsdp.pairs import STRATEGIES, Pair, data, loss_of, shard
from tests.support.spawn import run_ranks

GATHER, SCATTER, REDUCE = "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "allreduce"
ASKED = {strategy: {REDUCE} if strategy == "no_shard" else {GATHER, SCATTER} for strategy in STRATEGIES}
"""What each strategy asks of the backend."""


@contextmanager
def as_over_nccl(calls: set[str]) -> Iterator[None]:
    """Communicators made in the body call the backend; what they call is noted."""

    def noted(name: str) -> Callable[..., Any]:
        real = getattr(dist.ProcessGroup, name)

        def call(group: dist.ProcessGroup, *given: Any) -> Any:
            calls.add(name)
            return real(group, *given)

        return call

    told = property(lambda self: False, lambda self, is_gloo: None)
    with mock.patch.object(Communicator, "is_gloo", told, create=True):
        names = {name: noted(name) for name in (GATHER, SCATTER, REDUCE)}
        with mock.patch.multiple(dist.ProcessGroup, **names):
            yield


def train(rank: int, strategy: str) -> list[Tensor]:
    """Three steps of two microbatches, of data that every rank has for itself; the weights at the end."""
    model, optimizer = shard(Pair(strategy, ""))
    model.set_model_auto_sync(False)
    for step in range(3):
        for microbatch in range(2):
            with model.sync() if microbatch else model.no_sync():
                (loss_of(model, data(step, 2 * rank + microbatch)) / 2).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    held = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in model.state_dict().values()]
    model.close()
    return held


def both_ways(rank: int) -> dict[str, tuple[list[Tensor], list[Tensor], set[str]]]:
    """Every strategy by the engine's own means and by the backend's."""
    found = {}
    for strategy in STRATEGIES:
        own, calls = train(rank, strategy), set[str]()
        with as_over_nccl(calls):
            found[strategy] = own, train(rank, strategy), calls
    return found


def test_the_backends_own_collectives_are_called_as_torch_binds_them_and_train_the_same() -> None:
    for found in run_ranks(both_ways, 2):
        for strategy, (own, native, calls) in found.items():
            assert ASKED[strategy] <= calls, f"{strategy} called {calls}"
            for mine, theirs in zip(own, native, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
