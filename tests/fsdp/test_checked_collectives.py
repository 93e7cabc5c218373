"""With check_collectives=True, collectives that are not the same on all ranks are refused before data moves."""

from __future__ import annotations

import torch
import torch.distributed as dist

from harness.fsdp.comm import events
from harness.fsdp.comm.events import Label
from tests.fsdp.hanging import Told, agree, build, provoke, step
from tests.fsdp.pairs import STRATEGIES
from tests.support.spawn import run_ranks


def mismatched(rank: int) -> list[Told]:
    found = []
    for strategy in STRATEGIES:
        _, wrapped, optimizer = build(dist.new_group([0, 1, 2]), strategy, check_collectives=True)
        step(wrapped, optimizer)
        moved: list[Label] = []
        end = events.on_begin(moved.append)
        told = provoke(lambda w=wrapped: w.weight_norm() if rank == 1 else list(w.full_weights()))
        end()
        assert not moved, "no data may move"
        found.append(told)
        provoke(wrapped.close)
        dist.barrier()
    _, wrapped, optimizer = build(dist.new_group([0, 1, 2]), "optim", check_collectives=True)
    values = torch.zeros(2 if rank == 2 else 3, dtype=torch.float64)
    found.append(provoke(lambda: wrapped._parts.everyone.sum_scalars(values, "lengths")))
    return found


def test_checked_collectives_are_refused_before_data_moves() -> None:
    *per_strategy, lengths = zip(*run_ranks(mismatched, 3), strict=True)
    for strategy, told in zip(STRATEGIES, per_strategy, strict=True):
        if strategy == "no_shard":  # whole on every rank: neither asks for data
            assert {each.error for each in told} == {""}
            continue
        message = agree(list(told))
        assert "all_gather blocks.0/float32 weights of " in message
        assert "elements float32 on ranks 0, 2; all_reduce norm of 1 elements float64 on rank 1" in message
    assert (
        "all_reduce lengths of 3 elements float64 on ranks 0, 1; all_reduce lengths of 2 elements float64 on rank 2"
        in agree(list(lengths))
    )
