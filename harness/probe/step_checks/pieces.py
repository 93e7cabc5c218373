"""Pieces of every tensor on each rank, for any engine, and ranks with copies.

An engine's state has DTensors with places, or unsharded tensors; others cut flattened tensors without regard to rows.
Ranks exchange their places once: equal places are copies.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.probe.step_checks.sketch import SKETCHES, Place, Signs, Sketch

NOTHING = Sketch(torch.zeros(SKETCHES, dtype=torch.float64), torch.zeros((), dtype=torch.float64))


class Block(NamedTuple):
    place: Place
    begin: int = 0
    """Index of the first element in the flattened memory that holds it."""

    @property
    def end(self) -> int:
        return self.begin + self.place.numel

    def share(self, part: int, parts: int) -> Block:
        """Rows of this block that are one of so many parts."""
        top, bottom = self.place.rows
        first, last = (top + (bottom - top) * each // parts for each in (part, part + 1))
        left, right = self.place.columns
        return Block(Place((first, last), (left, right)), self.begin + (first - top) * (right - left))


Blocks = tuple[Block, ...]


def blocks_of(shape: Sequence[int], start: int, stop: int, begin: int = 0) -> Blocks:
    """A range of a tensor's flattened elements, which lie from `begin` on: the end of a row, whole rows and the begin
    of a row; none where it is empty."""
    if start >= stop:
        return ()
    width = math.prod(shape[1:])
    (top, left), (bottom, right) = divmod(start, width), divmod(stop, width)
    if top == bottom:
        places = [Place((top, top + 1), (left, right))]
    else:
        first, whole = Place((top, top + 1), (left, width)), Place((top + bool(left), bottom), (0, width))
        places = [*([first] if left else []), whole, Place((bottom, bottom + 1), (0, right))]
    found: list[Block] = []
    for place in places:
        if place.numel:
            found.append(Block(place, found[-1].end if found else begin))
    return tuple(found)


@dataclass(frozen=True)
class Piece:
    name: str
    shape: tuple[int, ...]
    source: Tensor
    """Parameter, moment, or flat buffer of several, that holds it."""
    blocks: Blocks
    """Where this rank's part is in the tensor and in its source; empty without one."""

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Self:
        """Piece of a DTensor (its local part), or of an unsharded tensor.

        Raises `ValueError`: the part is not one block of whole trailing dimensions.
        """
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return cls(name, shape, tensor, (Block(Place.whole(shape)),))
        chunks: list[Any] = tensor.__create_chunk_list__()
        if not chunks or not local_part(tensor).numel():
            return cls(name, shape, tensor, ())
        (chunk,) = chunks
        return cls(name, shape, tensor, (Block(Place.of(shape, list(chunk.offsets), list(chunk.sizes))),))

    @property
    def local(self) -> Tensor:
        """This rank's part, in the engine's present memory (engines replace the viewing tensor)."""
        return self.within(self.source)

    def within(self, tensor: Tensor) -> Tensor:
        """This rank's part of the source, its gradient or a moment: all of its local part, or flat; a view where it
        lies together."""
        held = local_part(tensor)
        if self._together == (0, held.numel()):
            return held
        flat = held.reshape(-1)
        if self._together is not None:
            return flat[slice(*self._together)]
        return torch.cat([flat[each.begin : each.end] for each in self.blocks])

    @cached_property
    def numel(self) -> int:
        return sum(each.place.numel for each in self.blocks)

    @cached_property
    def _together(self) -> tuple[int, int] | None:
        """Begin and end in flattened memory, where the blocks follow each other there."""
        if any(before.end != after.begin for before, after in pairwise(self.blocks)):
            return None
        return (self.blocks[0].begin, self.blocks[-1].end) if self.blocks else (0, 0)

    @cached_property
    def own(self) -> Blocks:
        """The blocks by their begin in `local`."""
        ends = accumulate(each.place.numel for each in self.blocks)
        return tuple(Block(each.place, end - each.place.numel) for each, end in zip(self.blocks, ends, strict=True))

    @property
    def is_whole(self) -> bool:
        return [each.place for each in self.blocks] == [Place.whole(self.shape)]

    def indices(self, wanted: Sequence[int]) -> Tensor:
        """Flat int64 indices into `local` of the wanted global elements that are here."""
        width = math.prod(self.shape[1:])
        found = [
            begin + at for each in wanted for place, begin in self.own if (at := place.index(each, width)) is not None
        ]
        return torch.tensor(found, dtype=torch.int64)

    def sketch(self, signs: Signs, local: Tensor, blocks: Blocks | None = None, *, squares: bool = True) -> Sketch:
        """Sketch of `local` or a tensor with its elements. Args: blocks: those to look at, with their begins there;
        None: all."""
        chosen = self.own if blocks is None else blocks
        if len(chosen) == 1 and chosen[0].place.numel == local.numel():
            return signs.sketch(self.name, self.shape, local, chosen[0].place, squares=squares)
        flat = local.reshape(-1)
        found = [
            signs.sketch(self.name, self.shape, flat[each.begin : each.end], each.place, squares=squares)
            for each in chosen
        ]
        return Sketch(*(torch.stack(parts).sum(0) for parts in zip(*found, strict=True))) if found else NOTHING

    def put(self, whole: Tensor, local: Tensor) -> None:
        """Copy this rank's part to its place in a contiguous whole tensor."""
        matrix, flat = whole.view(self.shape[0] if self.shape else 1, -1), local.reshape(-1)
        for each in self.own:
            part = matrix[slice(*each.place.rows), slice(*each.place.columns)]
            part.copy_(flat[each.begin : each.end].view(part.shape))


def sketches(signs: Signs, pieces: Iterable[Piece], *, squares: bool = True) -> Sketch:
    """Sketches of this rank's parts [tensors, m], and squared norms [tensors]; 0 for tensors without one."""
    return Sketch.stack([piece.sketch(signs, piece.local, squares=squares) for piece in pieces])


def local_part(tensor: Tensor) -> Tensor:
    """Local part of a DTensor, not copied; any other tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    return tensor._local_tensor.detach()  # to_local() makes a graph, and of ours a whole tensor


def own_places(pieces: Iterable[Piece]) -> list[int]:
    """A number for the place of each piece, equal for copies; 0 without one."""
    found = []
    for piece in pieces:
        places = str([each.place.numbers for each in piece.blocks]).encode()
        digest = hashlib.blake2b(places, digest_size=7).digest()  # within 64 bits with a sign
        found.append(int.from_bytes(digest) if piece.blocks else 0)
    return found


def shares(rows: Sequence[Sequence[int]], rank: int) -> tuple[Tensor, Tensor]:
    """Weights of this rank's pieces, fp64 [pieces] twice: 1 or 0 in sums over the unsharded tensor, and a weight among
    copies.

    The weights of a piece's copies add up to 0, so that a weighted sum vanishes exactly for equal copies. Single and
    missing pieces have weight 0. Args: rows: `own_places` of every rank, in rank order.
    """
    counted, among = [], []
    for index, place in enumerate(rows[rank]):
        copies, earlier = _copies(index, rows, rank)
        counted.append(1.0 if earlier == 0 and place else 0.0)
        # cosines over a whole period add up to nought, and the offset leaves none of them 0
        alone = copies == 1 or not place
        among.append(0.0 if alone else math.cos(2 * math.pi * (earlier + 0.21) / copies))
    return torch.tensor(counted, dtype=torch.float64), torch.tensor(among, dtype=torch.float64)


def portions(pieces: Sequence[Piece], rows: Sequence[Sequence[int]], rank: int) -> list[Blocks]:
    """Blocks of each piece for this rank to observe, by their begin in `local`, so that each row is observed once
    among its copies.

    The entire piece where there is one copy. Args: rows, rank: those of `shares`.
    """
    found: list[Blocks] = []
    for index, piece in enumerate(pieces):
        copies, earlier = _copies(index, rows, rank)
        found.append(tuple(each.share(earlier, copies) for each in piece.own))
    return found


def _copies(index: int, rows: Sequence[Sequence[int]], rank: int) -> tuple[int, int]:
    places = [row[index] for row in rows]
    return places.count(places[rank]), places[:rank].count(places[rank])
