"""Methods beside forward that run parts of a model, and generators; what is computed with has its own class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.fsdp import fully_shard_model
from harness.fsdp.runtime import forward_hooks
from harness.fsdp.runtime.forward import Forward
from harness.fsdp.runtime.forward_hooks import ForwardHooks
from tests.fsdp.checked import RANKS, Mutant, holds, is_found, patched
from tests.fsdp.methods import Block, Marked, Net, built, tokens_of
from tests.fsdp.pairs import STRATEGIES
from tests.fsdp.test_habits import said
from tests.support.mutants import each


def classes(rank: int, strategy: str) -> list[str]:
    """Parameters have their own class while they are computed with, in the backward too."""
    model, optimizer = built(strategy)
    inside: set[type] = set()
    handle = model.module.embed.register_full_backward_hook(lambda *_: inside.add(type(model.module.embed.weight)))
    for _ in range(2):
        model(tokens_of(rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    seen = set().union(*(block.seen for block in model.module.blocks))
    return [] if seen == {nn.Parameter, Marked} and inside == {nn.Parameter} else [str(seen | inside)]


def methods(rank: int, strategy: str) -> list[str]:
    """`generate` and a registered method against one process, on data of each rank's own, and a step through it."""
    model, optimizer = built(strategy)
    plain, told = Net(), []
    for _ in range(2):
        told += [] if torch.equal(model.generate(tokens_of(rank)), plain.generate(tokens_of(rank))) else ["generate"]
    model.register_forward_methods("encode", "blocks.0.forward")
    with torch.no_grad():
        told += [] if torch.equal(model.encode(tokens_of(rank)), plain.encode(tokens_of(rank))) else ["encode"]
    model.encode(tokens_of(rank)).square().mean().backward()
    for other in range(RANKS):
        (plain.encode(tokens_of(other)).square().mean() / RANKS).backward()
    found = dict(model.full_gradients())
    for name, param in plain.named_parameters():
        right = torch.zeros_like(param) if param.grad is None else param.grad
        told += [name] if param.requires_grad and not torch.allclose(found[name], right, atol=1e-6) else []
    optimizer.step()
    told += [] if model._parts.memory.live_bytes == 0 else ["memory is not given back"]
    try:
        model.register_forward_methods("nothing")
        told.append("a method that is none")
    except ValueError as error:
        told += [] if "'nothing'" in str(error) else [str(error)]
    return told


class Yielding(Block):
    def forward(self, x: Tensor) -> Any:
        yield super().forward(x)


def yielding(rank: int, strategy: str) -> list[str]:
    """What a generator computes, it computes when the call of its unit is over."""
    model = fully_shard_model(nn.Sequential(Yielding()), zero_dp_strategy=strategy, fsdp_unit_modules=[Block])
    if strategy != STRATEGIES[0]:
        return said(lambda: next(model(torch.ones(2, 6))), "unit 0 returns a generator.*a list")
    return [] if next(model(torch.ones(2, 6))).shape == (2, 6) else ["another output"]


CHECKS: dict[str, Callable[[int, str], list[str]]] = {each.__name__: each for each in (classes, methods, yielding)}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parts_run_as_in_one_process(strategy: str, check: str) -> None:
    holds(__name__, strategy, check)


# -- mutants -----------------------------------------------------------------------------------------------------------


MUTANTS = {
    "generators": Mutant(
        "A generator finds the weights of its unit released",
        patched(forward_hooks, "refuse_generator", lambda unit: None),
        "yielding",
    ),
    "root let go": Mutant(
        "A forward of the model inside a method ends as one outside does",
        patched(Forward, "in_model", property(lambda self: False)),
        "methods",
    ),
    "method as it is": Mutant(
        "A registered method runs without the root",
        patched(ForwardHooks, "run_as_forward", lambda self, method, *a, **k: method(*a, **k)),
        "methods",
    ),
}


@pytest.mark.parametrize(
    "name", each("The engine, by methods beside forward", [(name, m.breaks) for name, m in MUTANTS.items()])
)
def test_a_wrong_engine_is_found(name: str, killed_in: Callable[[float], None]) -> None:
    is_found(__name__, name, killed_in)
