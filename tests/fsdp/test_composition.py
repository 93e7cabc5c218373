"""torch's own tools around the engine, under every pair of strategies on four ranks: units that are compiled, units
whose activations are recomputed, models that begin on the meta device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.fsdp import ShardedModel
from harness.fsdp.runtime.gather import GatherPipeline
from tests.fsdp.checked import Mutant, each_is_found, patched
from tests.fsdp.pairs import (
    COVERED,
    PAIRS,
    Block,
    Model,
    Pair,
    by_pair,
    close,
    data,
    loss_of,
    plain_gradients,
    same,
    shard,
)
from tests.support.covering import Cover, once
from tests.support.spawn import run_ranks

WORLD = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "double buffer": {"double_buffer": True},
    "exact": {"numerics": "exact", "exact_terms": 2 * WORLD},
}


class Recomputed(Model):
    """Keeps only the inputs of its units; their forwards run again in backward."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        y: Tensor = self.exit(x)
        return y


class RecomputedReentrant(Recomputed):
    reentrant = True


def train(rank: int, pair: Pair, module: nn.Module, world: int = WORLD, **arguments: Any) -> dict[str, Tensor]:
    """Gradients and weights of two steps of two microbatches; the model is closed."""
    model, optimizer = shard(pair, module, grad_divisor=2 * world, **arguments)
    found: dict[str, Tensor] = {}
    for step in range(2):
        step_gradients(rank, model, step)
        found[f"{step} left"] = torch.tensor(model.engine.memory.live_bytes)
        found |= {f"{step} gradient {name}": gradient for name, gradient in model.full_gradients()}
        optimizer.step()
        optimizer.zero_grad()
        found |= {f"{step} weight {name}": weight for name, weight in model.full_weights()}
    model.close()
    return found


def step_gradients(rank: int, model: ShardedModel, step: int) -> None:
    for index in range(2):
        model.set_model_auto_sync(index == 1)
        loss_of(model, data(step, 2 * rank + index)).backward()


def compiled(module: Model) -> nn.Module:
    """Units by their forward, one by a wrapper around it, and one by itself, which takes hooks in that come later."""
    torch._dynamo.reset()
    module.blocks[2].compile(backend="aot_eager")
    for block in module.modules():
        if isinstance(block, Block) and block not in (module.blocks[1], module.blocks[2]):
            block.forward = torch.compile(block.forward, backend="aot_eager")
    module.blocks[1] = torch.compile(module.blocks[1], backend="aot_eager")
    return module


def compiling(rank: int, pairs: list[Pair], world: int) -> list[list[str]]:
    """By pair, what differs from fp64 gradients and, beyond rounding, from the units as they are."""
    return [_compiling(rank, pair, world) for pair in pairs]


def _compiling(rank: int, pair: Pair, world: int) -> list[str]:
    plain, found = train(rank, pair, Model(), world=world), train(rank, pair, compiled(Model()), world=world)
    found = {name.replace("_orig_mod.", ""): value for name, value in found.items()}
    frames = torch._dynamo.utils.counters["frames"]
    told = [] if frames["ok"] else ["nothing was compiled"]
    right = plain_gradients([data(0, index) for index in range(2 * world)], 1 / (2 * world))
    told += close({name: found[f"0 gradient {name}"] for name in right}, right)
    return told + [n for n in plain if not torch.allclose(plain[n], found[n], rtol=1e-5, atol=1e-6)]


RECOMPUTING = Cover(
    (
        (pair, name, kind)
        for pair, (name, options), kind in itertools.product(PAIRS, OPTIONS.items(), (Recomputed, RecomputedReentrant))
        if kind is Recomputed or not options
    ),
    values=lambda trial: (trial[0].inner, trial[0].outer, *trial[1:]),
)


def recomputing(rank: int, trials: list[tuple[Pair, str, type[Model]]]) -> list[list[str]]:
    """By trial, which bits recomputation changes, and whether it leaves weights gathered, or fixed buffers grow."""
    found = []
    for pair, name, kind in trials:
        plain, again = (train(rank, pair, module, **OPTIONS[name]) for module in (Model(), kind()))
        told = same(plain, again)
        if name != "double buffer":
            told += ["weights are left"] if again["0 left"] else []
        elif plain["0 left"] != plain["1 left"] or (pair.inner == "optim_grads_params" and not plain["0 left"]):
            told.append("fixed buffers are not all there is")
        found.append(told)
    return found


@once
def recomputed(trials: tuple[tuple[Pair, str, type[Model]], ...]) -> dict[Any, tuple[list[str], ...]]:
    return dict(zip(trials, zip(*run_ranks(recomputing, WORLD, list(trials)), strict=True), strict=True))


def beginning_on_meta(rank: int, pair: Pair) -> list[str]:
    """Which bits differ where modules reset themselves one by one; ranks that draw other numbers take the first's."""
    torch.manual_seed(21)
    plain = train(rank, pair, Model(seed=21))
    with torch.device("meta"):
        hollow = Model()
    torch.manual_seed(21 + rank)
    found = train(rank, pair, hollow, init_model_with_meta_device=True, device=torch.device("cpu"))
    return same(plain, found)


COMPILED = Cover(
    [pair for pair in PAIRS if not pair.outer or pair.inner == "optim_grads_params"],
    values=lambda pair: (pair.inner == "optim_grads_params", bool(pair.outer)),
    key=lambda pair: bool(pair.outer),
)
"""Compiling takes seconds; hooks, which it must not swallow, are the same where weights stay whole."""


@once
def compiled_pairs(pairs: tuple[Pair, ...]) -> dict[Pair, tuple[list[str], ...]]:
    world = 4 if pairs[0].outer else 2
    return dict(zip(pairs, zip(*run_ranks(compiling, world, list(pairs), world), strict=True), strict=True))


@pytest.mark.parametrize("pair", COMPILED.params())
def test_compiled_units_train_the_same_model(pair: Pair) -> None:
    assert not any(compiled_pairs(COMPILED.batch(pair))[pair])


@pytest.mark.parametrize("trial", RECOMPUTING.params(lambda trial: f"{trial[0]}-{trial[1]}-{trial[2].__name__}"))
def test_recomputed_activations_change_no_bit(trial: tuple[Pair, str, type[Model]]) -> None:
    assert recomputed(RECOMPUTING.batch(trial))[trial] == ([],) * WORLD


def _keeps_at_end(self: GatherPipeline) -> None:
    self._take_turns(len(self._sweep))


def _recomputing_plainly(rank: int, pair: Pair) -> list[list[str]]:
    return recomputing(rank, [(pair, "as it is", Recomputed)])


ZERO3 = Pair("optim_grads_params", "")
MUTANTS = {
    "weights stay": Mutant(
        "What is gathered at the end of the backward stays",
        patched(GatherPipeline, "post_backward", _keeps_at_end),
        _recomputing_plainly,
        ZERO3,
    ),
    "never filled": Mutant(
        "What was materialised is never filled", patched(nn.Linear, "reset_parameters"), beginning_on_meta, ZERO3
    ),
}
test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "The engine, by its oracle")


@pytest.mark.parametrize("pair", COVERED.params())
def test_a_model_from_the_meta_device_starts_as_any_other(pair: Pair) -> None:
    assert by_pair(beginning_on_meta, COVERED.batch(pair))[pair] == [[]] * WORLD
