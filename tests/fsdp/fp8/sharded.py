"""FP8 models under the engine, beside the same model in plain torch; run on ranks."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from harness.fp8.quantize import Quantized, quantize
from harness.fsdp import Fp8Linear, MixedPrecisionPolicy, Portion, ShardedModel, fully_shard
from harness.fsdp.vocabulary import Fp8

WIDTH, HIDDEN, VOCABULARY, TOKENS = 128, 384, 32, 6
"""384 rows over 2 or 4 ranks are cut inside tiles of 128."""
MICROBATCHES = 2


class Block(nn.Module):
    recompute = ""

    def __init__(self, tp: int = 1) -> None:
        super().__init__()
        hidden = HIDDEN * tp
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=tp > 1)
        with torch.no_grad():  # tiles, and portions, are to have scales of their own
            self.up.weight.mul_(torch.logspace(-2, 2, hidden, base=2).unsqueeze(1))
            self.down.weight.mul_(torch.logspace(-2, 2, hidden, base=2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.body, x, use_reentrant=False) if self.recompute == "within" else self.body(x)
        return found

    def body(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """tp: how many times as wide blocks are, so that a portion of as many has the same size."""

    def __init__(self, seed: int = 3, tp: int = 1) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.entry = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(tp), Block(tp)])
        self.exit = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.entry(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if block.recompute == "around" else block(x)
        return self.exit(x)


class Case(NamedTuple):
    """A recipe on a mesh: inner strategy, outer ranks (1: no such axis), what these split, tensor-parallel ranks.
    recompute: blocks compute their forward again in the backward, called within their own forward or around that."""

    recipe: Fp8
    inner: str
    outer: int = 1
    split: str = "no_shard"
    tp: int = 1
    recompute: Literal["", "within", "around"] = ""

    def mesh(self) -> DeviceMesh:
        """Outer, inner and tensor-parallel ranks."""
        sizes = self.outer, dist.get_world_size() // (self.outer * self.tp), self.tp
        return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner", "tp"))

    @property
    def place(self) -> int:
        """This rank's number among those with data of their own."""
        return dist.get_rank() // self.tp


STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
MESHES = [(each, 1, "no_shard") for each in STRATEGIES] + list(
    itertools.product(STRATEGIES, (2,), ("no_shard", "optim"))
)


def data(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randint(0, VOCABULARY, (2, TOKENS + 5 * rank), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    return found


def converted(recipe: Fp8, seed: int = 3, tp: int = 1) -> Model:
    model = Model(seed, tp)
    Fp8Linear.convert(model, recipe, lambda name, layer: "blocks" in name, history=3, margin=1)
    return model


def cut(model: Model, case: Case, mesh: DeviceMesh) -> Model:
    """Cut blocks over the tensor-parallel axis: the first matrix by rows, the second by columns."""
    for block in model.blocks if case.tp > 1 else ():
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def shard(case: Case, model: Model, **options: object) -> tuple[ShardedModel, torch.optim.Optimizer]:
    mesh = case.mesh()
    arguments: dict[str, object] = {"device_mesh": mesh, "dp_shard_dim": "inner"}
    arguments |= {"dp_outer_dim": "outer"} if case.outer > 1 else {}
    arguments |= {"tp_dim": "tp"} if case.tp > 1 else {}
    cut(model, case, mesh)
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
    """What each layer multiplies, as the weight lies; from weights gathered for the purpose. *Collective.*"""
    with model.unsharded():
        return gathered_payloads(model)


def gathered_payloads(model: ShardedModel) -> dict[Held, Quantized]:
    """As `payloads`, inside `unsharded()`."""
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
    scale = None if layer.history is None else layer.history.scale[1].view(1, 1)
    tile = operand.tile.t if transposed else operand.tile
    return quantize(weight, operand.format, tile, layer.recipe.scaling, scale)


def here(layer: Fp8Linear, whole: Quantized) -> Quantized:
    """This rank's portion of a weight that was quantized whole."""
    weight = layer.weight
    dim = weight.placements[0].dim if isinstance(weight, DTensor) else None
    if dim is None:
        return whole
    place, size = weight.device_mesh.get_local_rank(), weight.device_mesh.size()
    scales = whole.scale_inv if whole.scale_inv.shape[dim] == 1 else whole.scale_inv.chunk(size, dim)[place]
    return Quantized(whole.payload.chunk(size, dim)[place], scales, whole.tile)


def same(found: Quantized, expected: Quantized) -> bool:
    payload = torch.equal(found.payload.view(torch.uint8), expected.payload.contiguous().view(torch.uint8))
    return payload and torch.equal(found.scale_inv, expected.scale_inv)


def unlike(model: ShardedModel, weights: dict[str, Tensor]) -> list[str]:
    """Layers that do not multiply their whole weight quantized, or this rank's portion of that. *Collective.*"""
    told = []
    with model.unsharded():
        for (name, transposed), held in gathered_payloads(model).items():
            layer = model.module.get_submodule(name)
            assert isinstance(layer, Fp8Linear)
            whole = of_whole(layer, weights[f"{name}.weight"], transposed=transposed)
            told += [] if same(held, here(layer, whole)) else [f"{name} is not quantized whole, {transposed=}"]
    return told


def here_of(param: Tensor, whole: Tensor) -> Tensor:
    """This rank's portion of a whole tensor."""
    group = param.device_mesh.get_group() if isinstance(param, DTensor) else None
    return Portion.of("it", param, group).cut(whole)


def whole_copy(value: Tensor) -> Tensor:
    """Put together from all ranks where it is cut. *Collective* there."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def follow(rank: int, case: Case, steps: int = 2, **options: object) -> list[str]:
    """What is wrong with a training, step by step beside plain torch, which gets the engine's weights at each."""
    reference = converted(case.recipe, tp=case.tp)
    for block in reference.blocks:
        block.recompute = case.recompute
    model, optimizer = shard(case, copy.deepcopy(reference), **options)
    cut(reference, case, case.mesh())
    told: list[str] = []
    for step in range(steps):
        with torch.no_grad():
            for name, value in model.full_weights():
                param = reference.get_parameter(name)
                local(param).copy_(here_of(param, value))
        told += _step(model, reference, case, step)
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()
        Fp8Linear.update_scales(reference, lambda amaxes: dist.all_reduce(amaxes, dist.ReduceOp.MAX))
        told += [f"step {step}: {each}" for each in _unlike(model, reference)]
    model.close()
    return told


def _step(model: ShardedModel, reference: nn.Module, case: Case, step: int) -> list[str]:
    told, world = [], dist.get_world_size()
    for micro in range(MICROBATCHES):
        expected_loss = loss_of(reference, data(step, micro, case.place))
        (expected_loss / MICROBATCHES).backward()
        with nullcontext() if micro == MICROBATCHES - 1 else model.no_sync():
            own = loss_of(model, data(step, micro, case.place))
            (own / MICROBATCHES).backward()
        told += [] if torch.equal(own, expected_loss) else [f"step {step}: loss {own} is not {expected_loss}"]
    for name, value in model.full_gradients():
        param = reference.get_parameter(name)
        assert param.grad is not None
        terms = torch.zeros_like(value)
        here_of(param, terms).copy_(local(param.grad))
        dist.all_reduce(terms)
        expected = terms / (world // case.tp if here_of(param, value).shape != value.shape else world)
        error = float((value - expected).abs().max() / expected.abs().max())
        told += [f"step {step}: gradient of {name} is off by {error}"] if error > 1e-5 else []
    return told


def _unlike(model: ShardedModel, reference: nn.Module) -> list[str]:
    """Which layers do not multiply their whole weight quantized, or have other scales than plain torch."""
    told = unlike(model, dict(model.full_weights()))
    for name, layer in model.module.named_modules():
        other = reference.get_submodule(name)
        if not isinstance(layer, Fp8Linear) or not isinstance(other, Fp8Linear):
            continue
        mine, theirs = layer.history, other.history
        if mine is not None and theirs is not None:
            told += [] if torch.equal(mine.scale, theirs.scale) else [f"{name}: {mine.scale} is not {theirs.scale}"]
            told += [] if torch.equal(mine.amax[1:], theirs.amax[1:]) else [f"{name}: other history"]
    return told
