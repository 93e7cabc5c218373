"""torch's own tools around the engine, under every pair of strategies on four ranks: units that are compiled, units
whose activations are recomputed, models that begin on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.fsdp import ShardedModel
from tests.fsdp.pairs import PAIRS, Block, Model, Pair, by_pair, close, data, loss_of, plain_gradients, same, shard

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


def train(rank: int, pair: Pair, module: nn.Module, **arguments: Any) -> dict[str, Tensor]:
    """Gradients and weights of two steps of two microbatches; the model is closed."""
    model, optimizer = shard(pair, module, grad_divisor=2 * WORLD, **arguments)
    found: dict[str, Tensor] = {}
    for step in range(2):
        step_gradients(rank, model, step)
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


def compiled(module: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    for block in module.modules():
        if isinstance(block, Block):
            block.forward = torch.compile(block.forward, backend="aot_eager")
    return module


def compiling(rank: int, pair: Pair) -> list[str]:
    """What differs from fp64 gradients and, beyond rounding, from the units as they are."""
    plain, found = train(rank, pair, Model()), train(rank, pair, compiled(Model()))
    frames = torch._dynamo.utils.counters["frames"]
    told = [] if frames["ok"] else ["nothing was compiled"]
    right = plain_gradients([data(0, index) for index in range(2 * WORLD)], 1 / (2 * WORLD))
    told += close({name: found[f"0 gradient {name}"] for name in right}, right)
    return told + [n for n in plain if not torch.allclose(plain[n], found[n], rtol=1e-5, atol=1e-6)]


def recomputing(rank: int, pair: Pair) -> list[str]:
    """Which bits recomputation changes, reentrant or not, option by option."""
    found = []
    for name, options in OPTIONS.items():
        plain = train(rank, pair, Model(), **options)
        for kind in (Recomputed, RecomputedReentrant) if not options else (Recomputed,):
            found += [f"{name}, {kind.__name__}: {n}" for n in same(plain, train(rank, pair, kind(), **options))]
    return found


def beginning_on_meta(rank: int, pair: Pair) -> list[str]:
    """Which bits differ where modules reset themselves one by one; ranks that draw other numbers take the first's."""
    torch.manual_seed(21)
    plain = train(rank, pair, Model(seed=21))
    with torch.device("meta"):
        hollow = Model()
    torch.manual_seed(21 + rank)
    found = train(rank, pair, hollow, init_model_with_meta_device=True, device=torch.device("cpu"))
    return same(plain, found)


COMPILED = tuple(pair for pair in PAIRS if not pair.outer or pair.inner == "optim_grads_params")
"""Compiling takes seconds; hooks, which it must not swallow, are those of the inner strategy."""


every_pair = pytest.mark.parametrize("pair", PAIRS, ids=str)


@pytest.mark.parametrize("pair", COMPILED, ids=str)
def test_compiled_units_train_the_same_model(pair: Pair) -> None:
    assert by_pair(compiling, COMPILED)[pair] == [[]] * WORLD


@every_pair
def test_recomputed_activations_change_no_bit(pair: Pair) -> None:
    assert by_pair(recomputing)[pair] == [[]] * WORLD


@every_pair
def test_a_model_from_the_meta_device_starts_as_any_other(pair: Pair) -> None:
    assert by_pair(beginning_on_meta)[pair] == [[]] * WORLD
