"""The branches that only NCCL takes, on real process groups: the backend's own gathers and reductions.

Over gloo the engine moves data by its own sends and reads. Here it is told that its peers are NCCL's, and calls gloo's
collectives as it would call NCCL's, through torch's own bindings, which refuse a wrong argument; what NCCL demands
beyond gloo is checked on the way. The training must be the one that sends and reads make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.fsdp import fully_shard
from harness.fsdp.comm.communicator import Communicator
from tests.support.spawn import RankFailed, run_ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
GATHER, SCATTER, REDUCE = "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "allreduce"
ASKED = {
    "no_shard": {REDUCE},
    "optim": {GATHER, SCATTER},
    "optim_grads": {GATHER, SCATTER},
    "optim_grads_params": {GATHER, SCATTER},
}
"""What each strategy asks of the backend."""


def refuse_what_nccl_refuses(name: str, size: int, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Dense tensors of one dtype a pair, and sizes that fit: gloo looks at fewer of these."""
    assert len(outputs) == len(inputs) > 0, name
    for output, given in zip(outputs, inputs, strict=True):
        assert output.dtype == given.dtype, f"{name}: {output.dtype} and {given.dtype}"
        assert output.is_contiguous(), name
        assert given.is_contiguous(), name
        whole, part = (output, given) if name == GATHER else (given, output)
        assert whole.numel() == size * part.numel(), f"{name}: {whole.numel()} for {size} ranks of {part.numel()}"


@contextmanager
def as_over_nccl(calls: set[str]) -> Iterator[None]:
    """Communicators made in the body call the backend; what they call is noted and checked."""

    def checked(name: str) -> Callable[..., Any]:
        real = getattr(dist.ProcessGroup, name)

        def call(group: dist.ProcessGroup, *given: Any) -> Any:
            calls.add(name)
            if name != REDUCE:
                refuse_what_nccl_refuses(name, group.size(), *given)
            return real(group, *given)

        return call

    told = property(lambda self: False, lambda self, is_gloo: None)
    with mock.patch.object(Communicator, "is_gloo", told, create=True):
        names = {name: checked(name) for name in (GATHER, SCATTER, REDUCE)}
        with mock.patch.multiple(dist.ProcessGroup, **names):
            yield


def train(rank: int, strategy: str) -> list[Tensor]:
    """Three steps of two microbatches, of data that every rank has for itself; the weights at the end."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3), nn.Linear(3, 1))
    model, optimizer = fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=0.1),
        fsdp_unit_modules=[nn.Linear],
        zero_dp_strategy=strategy,
    )
    model.set_model_auto_sync(False)
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(3):
        for microbatch in range(2):
            with model.sync() if microbatch else model.no_sync():
                model(torch.randn(4, 6, generator=generator)).square().mean().div(2).backward()
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


def one_element_short(rank: int) -> None:
    """A gather whose output has no room for the last element."""
    with as_over_nccl(set()):
        outputs, inputs = [torch.empty(2 * 4 - 1)], [torch.ones(4)]
        dist.group.WORLD.allgather_into_tensor_coalesced(outputs, inputs).wait()


def test_a_call_that_nccl_would_refuse_is_refused_here() -> None:
    with pytest.raises(RankFailed, match="7 for 2 ranks of 4"):
        run_ranks(one_element_short, 2)
