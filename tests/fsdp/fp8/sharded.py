"""FP8 models under the engine, beside the same model in plain torch; run on ranks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from harness.fp8.quantize import Quantized, quantize
from harness.fsdp import Fp8Linear, MixedPrecisionPolicy, ShardedModel, create_state, fully_shard
from harness.fsdp.options import Fp8
from harness.probe.collectives import CollectiveMeter
from tests.fsdp.pairs import STRATEGIES

WIDTH, HIDDEN, VOCABULARY, TOKENS = 128, 384, 32, 6
"""384 rows over 2 or 4 ranks are cut inside tiles of 128."""
MICROBATCHES = 2


class Block(nn.Module):
    recompute = ""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        with torch.no_grad():  # tiles are to have scales of their own
            self.up.weight.mul_(torch.logspace(-2, 2, HIDDEN, base=2).unsqueeze(1))
            self.down.weight.mul_(torch.logspace(-2, 2, HIDDEN, base=2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.body, x, use_reentrant=False) if self.recompute == "within" else self.body(x)
        return found

    def body(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, seed: int = 3) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.entry = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.exit = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.entry(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if block.recompute == "around" else block(x)
        return self.exit(x)


class Case(NamedTuple):
    """A recipe on a mesh: inner strategy, outer ranks (1: no such axis), what these split.
    recompute: blocks compute their forward again in the backward, called within their own forward or around that."""

    recipe: Fp8
    inner: str
    outer: int = 1
    split: str = "no_shard"
    recompute: Literal["", "within", "around"] = ""

    def mesh(self) -> DeviceMesh:
        """Outer and inner ranks."""
        sizes = self.outer, dist.get_world_size() // self.outer
        return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner"))


MESHES = [(each, 1, "no_shard") for each in STRATEGIES] + list(
    itertools.product(STRATEGIES, (2,), ("no_shard", "optim"))
)


def data(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randint(0, VOCABULARY, (2, TOKENS + 5 * rank), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    return found


def converted(recipe: Fp8, seed: int = 3) -> Model:
    model = Model(seed)
    Fp8Linear.convert(model, recipe, lambda name, layer: "blocks" in name)
    return model


def shard(case: Case, model: Model, **options: object) -> tuple[ShardedModel, torch.optim.Optimizer]:
    mesh = case.mesh()
    arguments: dict[str, object] = {"device_mesh": mesh, "dp_shard_dim": "inner"}
    arguments |= {"dp_outer_dim": "outer"} if case.outer > 1 else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return fully_shard(
        model,
        optimizer,
        fsdp_unit_modules=[Block],
        zero_dp_strategy=case.inner,
        outer_dp_sharding_strategy=case.split,
        **{"mixed_precision_policy": MixedPrecisionPolicy(), **arguments, **options},
    )


Held = tuple[str, bool]
"""A layer's name, and whether a payload is that of the transposed weight."""


def payloads(model: ShardedModel) -> dict[Held, Quantized]:
    """What each layer multiplies, as the weight lies; inside `unsharded()`."""
    return {
        (name, transposed): Quantized(held.payload.clone(), held.scale_inv.clone(), held.tile)
        for name, layer in model.module.named_modules()
        if isinstance(layer, Fp8Linear)
        for transposed in (False, True)
        for held in [layer.weight_for(transposed=True).t if transposed else layer.weight_for(transposed=False)]
    }


def of_whole(layer: Fp8Linear, weight: Tensor, *, transposed: bool = False) -> Quantized:
    """The whole weight quantized, for a product with it or with its transpose; as it lies."""
    operand = layer.recipe.weights
    tile = operand.tile.t if transposed else operand.tile
    return quantize(weight, operand.format, tile, layer.recipe.scaling)


def same(found: Quantized, expected: Quantized) -> bool:
    payload = torch.equal(found.payload.view(torch.uint8), expected.payload.contiguous().view(torch.uint8))
    return payload and torch.equal(found.scale_inv, expected.scale_inv)


def unlike(model: ShardedModel, weights: dict[str, Tensor]) -> list[str]:
    """Layers that do not multiply their whole weight quantized. *Collective.*"""
    told = []
    with model.unsharded():
        for (name, transposed), held in payloads(model).items():
            layer = model.module.get_submodule(name)
            assert isinstance(layer, Fp8Linear)
            whole = of_whole(layer, weights[f"{name}.weight"], transposed=transposed)
            told += [] if same(held, whole) else [f"{name} is not quantized whole, {transposed=}"]
    return told


def whole_copy(value: Tensor) -> Tensor:
    """Put together from all ranks where it is cut. *Collective* there."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


Program = Callable[[Any, Tensor], Tensor]
"""A loss of a model, of tokens."""


def follow(
    rank: int,
    case: Case,
    steps: int = 2,
    program: Program = loss_of,
    reference: Model | None = None,
    micros: int = MICROBATCHES,
    **options: object,
) -> list[str]:
    """What is wrong with a training, step by step beside plain torch, which gets the engine's weights at each."""
    reference = reference or converted(case.recipe)
    for block in reference.blocks:
        block.recompute = case.recompute
    model, optimizer = shard(case, copy.deepcopy(reference), **options)
    told: list[str] = []
    for step in range(steps):
        with torch.no_grad():
            for name, value in model.full_weights():
                reference.get_parameter(name).copy_(value)
        for micro in range(micros):
            expected = program(reference, data(step, micro, rank))
            (expected / micros).backward()
            with nullcontext() if micro == micros - 1 else model.no_sync():
                own = program(model, data(step, micro, rank))
                (own / micros).backward()
            told += [] if torch.equal(own, expected) else [f"step {step}: loss {own} is not {expected}"]
        told += [f"step {step}: {each}" for each in _other_gradients(model, reference)]
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()
        told += [f"step {step}: {each}" for each in unlike(model, dict(model.full_weights()))]
    model.close()
    return told


def _other_gradients(model: ShardedModel, reference: nn.Module) -> list[str]:
    told = []
    for name, value in model.full_gradients():
        param, terms = reference.get_parameter(name), torch.zeros_like(value)
        if param.grad is not None:
            terms.copy_(param.grad)
        dist.all_reduce(terms)
        expected = terms / dist.get_world_size()
        error = float((value - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
        told += [f"gradient of {name} is off by {error}"] if error > 1e-5 else []
    return told


# -- state, and models without memory ----------------------------------------------------------------------------------


def train(model: ShardedModel, optimizer: torch.optim.Optimizer, *steps: int) -> Tensor:
    """The last step's loss."""
    for step in steps:
        loss = loss_of(model, data(step, 0, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def across(rank: int, one: Case, two: Case) -> list[str]:
    """State of one layout in another and back: weights and moments to the bit, payloads of them."""
    saved, optimizer = shard(one, converted(one.recipe))
    train(saved, optimizer, 0, 1)
    told = [f"{name} before saving" for name in unlike(saved, dict(saved.full_weights()))]
    loaded, other = shard(two, converted(two.recipe, seed=9))
    train(loaded, other, 0)
    weights = dict(saved.full_weights())
    told += _move(saved, loaded) + [f"{name} when loaded" for name in unlike(loaded, weights)]
    train(saved, optimizer, 0)
    told += _move(loaded, saved) + [f"{name} when back" for name in unlike(saved, weights)]
    saved.close()
    loaded.close()
    return told


def _move(source: ShardedModel, target: ShardedModel) -> list[str]:
    """Bring every tensor of a state into another model; what is other bits there afterwards."""
    given = {name: whole_copy(value) for name, value in source.sharded_state().items() if value.dim()}
    state = target.sharded_state()
    for name, value in state.items():
        if value.dim():
            value.copy_(given[name])
    found = {name: whole_copy(value) for name, value in target.sharded_state().items() if value.dim()}
    return [name for name, value in found.items() if not torch.equal(value, given[name])]


def meta(rank: int, case: Case) -> list[str]:
    """Built without memory, and reset module by module: weights as of a plain model, and these quantized."""
    with torch.device("meta"):
        hollow = converted(case.recipe)
    torch.manual_seed(11)
    model, optimizer = shard(case, hollow, device=torch.device("cpu"), init_model_with_meta_device=True)
    plain, weights = Model(), dict(model.full_weights())
    torch.manual_seed(11)
    for module in plain.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    told = [name for name, value in plain.named_parameters() if not torch.equal(value, weights[name])]
    told += unlike(model, weights)
    train(model, optimizer, 0)
    told += unlike(model, dict(model.full_weights()))
    model.close()
    return told


Traffic = tuple[dict[tuple[str, str], tuple[int, int]], dict[str, int]]


def traffic(rank: int, case: Case) -> Traffic:
    """Count and bytes by kind and bucket, in a second step; elements of each bucket."""
    model, optimizer = shard(case, converted(case.recipe).bfloat16())
    create_state(optimizer)
    train(model, optimizer, 0)
    meter = CollectiveMeter()
    train(model, optimizer, 1)
    rows = meter.take()
    meter.close()
    moved = {bucket.name: sum(s.numel for s in bucket.layout.segments) for bucket in model.engine.buckets}
    model.close()
    return {(row.kind, row.bucket): (row.count, row.bytes) for row in rows}, moved
