"""What was frozen when it was sharded stays so; ranks shard with the same flags."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from harness.fsdp import RanksDisagree, fully_shard_model
from tests.fsdp.checked import each_holds, each_is_found, of_slips, said
from tests.fsdp.pairs import WIDTH, Block, Model, data, loss_of


def refused(rank: int, strategy: str) -> list[str]:
    """A backward that would train it says so; the step after, with it frozen again, is as ever."""
    module = Model()
    module.blocks.requires_grad_(False)
    model, told = fully_shard_model(module, fsdp_unit_modules=[Block], zero_dp_strategy=strategy), []
    for part in module.blocks[:2]:
        part.requires_grad_(True)
        told += said(
            lambda: loss_of(model, data(0, rank)).backward(),
            RuntimeError,
            "was frozen when it was sharded",
            "freeze afterwards",
        )
        part.requires_grad_(False)
        model.zero_grad()
        loss_of(model, data(0, rank)).backward()
        model.zero_grad()
    model.close()
    return told


def parted(rank: int, strategy: str) -> list[str]:
    """Ranks that begin with other flags, or other shapes, are told on every rank."""
    frozen, other = Model(), nn.Linear(WIDTH, WIDTH + rank)
    frozen.blocks[rank].requires_grad_(False)
    told = said(
        lambda: fully_shard_model(frozen, zero_dp_strategy=strategy),
        RanksDisagree,
        r"parameter blocks.0.up.weight is float32 \[.*\] frozen on rank 0, float32 \[.*\] trained on rank 1",
    )
    words = f"float32 [{WIDTH}, {WIDTH}] trained on rank 0, float32 [{WIDTH + 1}, {WIDTH}] trained on rank 1"
    return told + said(lambda: fully_shard_model(other, zero_dp_strategy=strategy), RanksDisagree, words)


CHECKS: dict[str, Callable[[int, str], list[str]]] = {each.__name__: each for each in (refused, parted)}
test_what_cannot_be_is_said_on_every_rank = each_holds(__name__, CHECKS)
MUTANTS = of_slips(
    """
    unfreezing is not seen: What was frozen when it was sharded brings a gradient that nobody takes
        fsdp.runtime.backward_hooks.unfrozen_too_late: lambda _: None
        refused
    """
)
test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "The engine, by what programs freeze")
