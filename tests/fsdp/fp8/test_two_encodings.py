"""Weights that have other bits in the backward: what is gathered when, and programs that use them in other ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harness.fsdp import ShardedModel
from harness.fsdp.runtime.gather import TwoEncodings
from harness.fsdp.storage.codec import BACKWARD_COPY, BOTH, PURPOSE as SCALES, Encoding, Fp8Codec, Fp8Weight
from harness.fsdp.vocabulary import Fp8
from harness.probe.collectives import CollectiveMeter
from tests.fsdp.checked import Mutant, each_holds, each_is_found, patched
from tests.fsdp.fp8.sharded import HIDDEN, WIDTH, Case, Model, Program, converted, data, follow, loss_of, shard

ELEMENTS = WIDTH * HIDDEN * 2
"""Of the FP8 weights of a block."""
BLOCKS = 2
APART = 2.0**-16
"""More than e4m3 tells apart under one scale."""


def _follows(rank: int, strategy: str, program: Program = loss_of, steps: int = 3, recipe: Fp8 = Fp8.mx) -> list[str]:
    """A training by a program beside one of plain torch, which quantizes at each use."""
    reference = converted(recipe)
    with torch.no_grad():  # tiles along rows and along columns are to give other bits, which count
        for block in reference.blocks:
            block.up.weight[1::2] *= APART
            block.down.weight[:, 1::2] /= APART
    return follow(rank, Case(recipe, strategy), steps, program, reference, micros=1)


def plain(rank: int, strategy: str) -> list[str]:
    return _follows(rank, strategy)


def twice(rank: int, strategy: str) -> list[str]:
    """Two forwards, then one backward of both, with an evaluation in between."""

    def program(model: Any, tokens: Tensor) -> Tensor:
        first = loss_of(model, tokens)
        with torch.no_grad():
            loss_of(model, tokens.flip(0))
        return first + 2.0 * loss_of(model, tokens.flip(1))

    return _follows(rank, strategy, program)


def hidden(rank: int, strategy: str) -> list[str]:
    """A block gives its output where no hook sees it, so that its weights stay until the backward."""

    def program(model: Any, tokens: Tensor) -> Tensor:
        module = model.module if isinstance(model, ShardedModel) else model
        block = module.blocks[0]

        def forward(x: Tensor) -> None:
            block.found = block.body(block.taken)

        def call(tokens: Tensor) -> Tensor:
            block.taken = module.entry(tokens)
            block(torch.empty(0))
            found = module.exit(module.blocks[1](block.found))
            block.taken = block.found = None
            return found  # type: ignore[no-any-return] # modules are called as Any

        block.forward, module.forward = forward, call
        try:
            return loss_of(model, tokens)
        finally:
            del block.forward, module.forward

    return [told for recipe in (Fp8.mx, Fp8.block) for told in _follows(rank, strategy, program, 2, recipe)]


def begins_to_recompute(rank: int, strategy: str) -> list[str]:
    """Checkpointing begins in the second step: within blocks, then around them, then in the way that hides the
    graph."""
    count = 0

    def program(model: Any, tokens: Tensor) -> Tensor:
        module = model.module if isinstance(model, ShardedModel) else model
        ways = ("", "within", "around", "reentrant")
        for block in module.blocks:
            block.recompute = ways[count // 2]
        if ways[count // 2] != "reentrant":
            return loss_of(model, tokens)
        first = module.blocks[0]
        own = first.forward
        first.forward = lambda x: checkpoint(own, x, use_reentrant=True)
        try:
            return loss_of(model, tokens)
        finally:
            del first.forward

    def counting(model: Any, tokens: Tensor) -> Tensor:
        nonlocal count
        found = program(model, tokens)
        count += 1  # by step: the reference, then the engine
        return found

    return _follows(rank, strategy, counting, 4)


def different_units(rank: int, strategy: str) -> list[str]:
    """Each rank runs one block of two, now this one and now that."""

    def program(model: Any, tokens: Tensor) -> Tensor:
        module = model.module if isinstance(model, ShardedModel) else model
        chosen = int(tokens.sum()) % BLOCKS
        block = module.blocks[chosen]

        def forward(tokens: Tensor) -> Any:
            return module.exit(block(module.entry(tokens)))

        module.forward = forward
        try:
            return loss_of(model, tokens)
        finally:
            del module.forward

    return _follows(rank, strategy, program, 4)


def unsharded(rank: int, strategy: str) -> list[str]:
    """Inside unsharded() layers multiply, and tell their weights, in both directions."""
    model, _ = shard(Case(Fp8.mx, strategy), converted(Fp8.mx))
    weights, told = dict(model.full_weights()), []
    with model.unsharded(model.module.blocks[1].up):
        layer = model.module.blocks[1].up
        for transposed in (False, True):
            found = layer.weight_for(transposed=transposed)
            whole = layer.quantize_weight(weights["blocks.1.up.weight"], transposed=transposed)
            payload = found.payload.t() if transposed else found.payload
            told += [] if _same(payload, whole.payload) else [f"transposed: {transposed}"]
        x = torch.randn(3, WIDTH, requires_grad=True)
        layer(x).sum().backward()
        told += [] if x.grad is not None and x.grad.abs().sum() > 0 else ["no gradient"]
        layer.weight.grad = layer.bias.grad = None
    model.close()
    return told


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def traffic(rank: int, strategy: str) -> list[str]:
    """A step gathers, to the byte, one a parameter and direction; the forward's twice where it runs again. The last
    unit does not stay. Updated weights are quantized when the next forward begins."""
    told = []
    for recompute, forwards in (("", 1), ("within", 2), ("around", 2)):
        built = converted(Fp8.mx).bfloat16()
        for block in built.blocks:
            block.recompute = recompute
        model, optimizer = shard(Case(Fp8.mx, strategy), built)
        halves = {name: [0, 0] for name in ("blocks.0", "blocks.1")}
        meter = CollectiveMeter()
        for step in range(3):
            loss_of(model, data(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            rows = {(row.kind, row.bucket): (row.count, row.bytes) for row in meter.take()}
            label = "{}/bfloat16/fp8x2"
            found = {
                name: [rows.get(("all_gather", label.format(name) + suffix), (0, 0)) for suffix in ("", BACKWARD_COPY)]
                for name in halves
            }
            of_forward = forwards if strategy == "optim_grads_params" else 1
            side = ELEMENTS // 2
            updated = step > 0 and strategy != "no_shard"
            wanted = [(of_forward, of_forward * side), (1, side)]
            wanted = wanted if updated or strategy == "optim_grads_params" else [(0, 0), (0, 0)]
            told += [
                f"{recompute or 'plain'}, step {step}: {name} {each} is not {wanted}"
                for name, each in found.items()
                if each != wanted
            ]
            exponents = rows.get(("all_reduce", SCALES), (0, 0))
            right = (1, BLOCKS * ELEMENTS // 16) if updated else (0, 0)
            told += [] if exponents == right else [f"exponents {exponents} are not {right}"]
        meter.close()
        model.close()
    return told


def kept(rank: int, strategy: str) -> list[str]:
    """Bytes between uses: two payloads where weights are whole, and two exponents for 32 parameters everywhere."""
    model, _ = shard(Case(Fp8.mx, strategy), converted(Fp8.mx).bfloat16())
    bytes_kept = model.engine.persistent_bytes()
    others = 2 * sum(p.numel() for p in Model().parameters()) - 2 * BLOCKS * ELEMENTS
    whole = 0 if strategy == "optim_grads_params" else 2 * BLOCKS * ELEMENTS
    told = []
    if strategy != "optim_grads_params":
        whole += others
    if bytes_kept["compute_weights"] != whole:
        told.append(f"compute weights {bytes_kept['compute_weights']} are not {whole}")
    if bytes_kept["buffers"] != BLOCKS * ELEMENTS // 16:
        told.append(f"scales {bytes_kept['buffers']} are not {BLOCKS * ELEMENTS // 16}")
    model.close()
    return told


CHECKS: dict[str, Callable[[int, str], list[str]]] = {
    "plain": plain,
    "twice": twice,
    "hidden": hidden,
    "begins to recompute": begins_to_recompute,
    "different units": different_units,
    "unsharded": unsharded,
    "traffic": traffic,
    "kept": kept,
}


test_it_holds = each_holds(__name__, CHECKS)


def _whatever_is_here(self: Fp8Weight, *, transposed: bool) -> Any:
    return self.read(0)


def _of_one_encoding(self: Fp8Codec) -> int:
    return sum(weight.scales[0].nbytes for weight in self.weights)


ENCODE = Fp8Codec.encode
MUTANTS = {
    "the forward's again": Mutant(
        "A backward multiplies by what the forward did",
        patched(Fp8Weight, "__call__", _whatever_is_here),
        "plain",
        "optim",
    ),
    "one payload twice": Mutant(
        "Both encodings get the payload of the forward",
        patched(Fp8Codec, "encode", lambda self, shards, encoding: ENCODE(self, shards, Encoding("", BOTH))),
        "unsharded",
    ),
    "always both": Mutant(
        "A backward gathers both encodings for good",
        patched(TwoEncodings, "_directions", lambda self, unit: BOTH),
        "traffic",
    ),
    "the last one stays": Mutant(
        "The last unit stays for the backward, which takes other weights",
        patched(TwoEncodings, "last", property(lambda self: self.order[-1] if self.order else None)),
        "traffic",
    ),
    "gradients of 8 bits": Mutant(
        "A gradient that comes before its unit's backward has begun is cast to the dtype of the weight",
        patched(Fp8Codec, "prepare", lambda self, gradients: None),
        "hidden",
    ),
    "not brought": Mutant(
        "An encoding that is not here when it is asked for is not brought",
        patched(TwoEncodings, "complete", lambda self, unit, direction: None),
        "begins to recompute",
    ),
    "nobody asks": Mutant(
        "A layer takes what there is of its other payload, where nothing told of its backward before",
        patched(Fp8Weight, "request", property(lambda self: None, lambda self, value: None)),
        "hidden",
    ),
    "half the scales": Mutant(
        "Exponents of one payload are counted",
        patched(Fp8Codec, "scale_bytes", property(_of_one_encoding)),
        "kept",
    ),
}


test_a_mutant_is_found = each_is_found(__name__, MUTANTS, "FP8 weights of two payloads")
