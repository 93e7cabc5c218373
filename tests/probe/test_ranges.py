"""Ranges of flattened tensors, as FSDP1, DeepSpeed and Megatron cut them: sketches, elements and copies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from harness.probe.step_checks import pieces as module
from harness.probe.step_checks.pieces import Piece, own_places, portions
from harness.probe.step_checks.sketch import Place, Signs
from tests.support.mutants import finds

SHAPES = ((7, 6), (5, 4, 3), (11,), (1, 40), (9, 1), ())
CUTS = ((), (1,), (5,), (6,), (7,), (4, 9), (2, 3, 10))


def flat(shape: tuple[int, ...], whole: Tensor, begin: int, end: int) -> Piece:
    """Elements of a flattened tensor in a buffer that has others before and behind them."""
    buffer = torch.cat([torch.full((3,), 7.0), whole.flatten()[begin:end], torch.full((2,), 7.0)])
    return Piece("w", shape, buffer, module.blocks_of(shape, begin, end, 3))


def wrong() -> Iterator[str]:
    for shape, cuts in itertools.product(SHAPES, CUTS):
        numel = math.prod(shape)
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(numel))
        bounds = [0, *(cut for cut in cuts if cut < numel), numel]
        pieces = [flat(shape, whole, a, b) for a, b in itertools.pairwise(bounds)]
        wanted = Signs().sketch("w", shape, whole, Place.whole(shape))
        parts = [each.sketch(Signs(), each.local) for each in pieces]
        if not torch.allclose(torch.stack([part.values for part in parts]).sum(0), wanted.values, rtol=0, atol=1e-12):
            yield f"{shape} cut at {cuts}: another sketch"
        if abs(sum(float(part.squares) for part in parts) - float(wanted.squares)) > 1e-12 * numel:
            yield f"{shape} cut at {cuts}: other squares"
        found = torch.cat([each.local.take(each.indices(range(numel))) for each in pieces])
        if not torch.equal(found, whole.flatten()):
            yield f"{shape} cut at {cuts}: other elements"
        put = torch.zeros(shape)
        for piece in pieces:
            piece.put(put, piece.local)
        if not torch.equal(put, whole):
            yield f"{shape} cut at {cuts}: put elsewhere"
    yield from wrong_copies()


def wrong_copies() -> Iterator[str]:
    """Three ranks that keep the same range look at each element of it once."""
    whole = torch.arange(30.0).view(5, 6)
    held = [[flat((5, 6), whole, 4, 27)] for _ in range(3)]
    rows = [own_places(pieces) for pieces in held]
    shares = [portions(pieces, rows, rank)[0] for rank, pieces in enumerate(held)]
    seen = torch.cat([held[0][0].local[each.begin : each.end] for share in shares for each in share])
    if not torch.equal(seen.sort().values, whole.flatten()[4:27]):
        yield "copies do not look at each element once"
    wanted = held[0][0].sketch(Signs(), held[0][0].local)
    parts = [held[0][0].sketch(Signs(), held[0][0].local, share).values for share in shares]
    if not torch.allclose(torch.stack(parts).sum(0), wanted.values, rtol=0, atol=1e-12):
        yield "what copies look at has another sketch"


test_a_mutant_is_found = finds(
    "The comparator: sketches",
    wrong="""
        a range begins with a row: The end of a row has the signs of its begin
            probe.step_checks.pieces.blocks_of: (left, width)) => (0, width - left))
        rows one on: A range that begins with a row has the signs of the next
            probe.step_checks.pieces.blocks_of: top + bool(left), bottom => top + 1, bottom + (not left)
            ()
            ^RuntimeError
        elements from the begin of the tensor: A range's element is looked up where the tensor's lies
            probe.step_checks.sketch.Place.index: (row - top) * => row *
            ()
            ^IndexError
        all copies look at all: What copies hold counts several times
            probe.step_checks.pieces.Block.share: (bottom - top) * each // parts => (bottom - top) * (each > part)
    """,
)
