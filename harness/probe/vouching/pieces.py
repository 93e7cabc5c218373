"""What each rank keeps of every tensor, by whichever engine: pieces, how many ranks hold the same one, which counts.

An engine's state hands out DTensors that say where their rows belong, or whole tensors. Which ranks hold copies of a
piece is not asked of it: ranks tell each other once what they hold, and equal places are copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.probe.vouching.sketch import Place


@dataclass(frozen=True)
class Piece:
    name: str
    shape: tuple[int, ...]
    source: Tensor
    place: Place | None
    """Where this rank's part belongs; None where it holds none."""

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Piece:
        """Take a DTensor, whose local part the piece is, or a whole tensor.

        Raises:
            ValueError: the part is not one block of whole trailing dimensions.
        """
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return cls(name, shape, tensor, Place.whole(shape))
        chunks = _chunks(tensor)
        if not chunks or not local_part(tensor).numel():
            return cls(name, shape, tensor, None)
        (chunk,) = chunks
        return cls(name, shape, tensor, Place.of(shape, list(chunk.offsets), list(chunk.sizes)))

    @property
    def local(self) -> Tensor:
        """This rank's part, the engine's own memory, as it is now (engines replace the tensor that looks at it)."""
        return local_part(self.source)

    @property
    def is_whole(self) -> bool:
        return self.place == Place.whole(self.shape)

    def indices(self, wanted: Sequence[int]) -> Tensor:
        """Flat indices into `local` of those of the tensor's elements (flat, of the whole) that are here; int64."""
        if self.place is None:
            return torch.empty(0, dtype=torch.int64)
        (top, bottom), (left, right) = self.place.rows, self.place.columns
        width = math.prod(self.shape[1:])
        found = [
            (row - top) * (right - left) + column - left
            for row, column in (divmod(index, width) for index in wanted)
            if top <= row < bottom and left <= column < right
        ]
        return torch.tensor(found, dtype=torch.int64)


def local_part(tensor: Tensor) -> Tensor:
    """A DTensor's local part, not copied; any other tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    return tensor._local_tensor.detach()  # to_local() makes a graph, and of ours a whole tensor


def _chunks(tensor: DTensor) -> list[Any]:
    chunks: list[Any] = tensor.__create_chunk_list__()
    return chunks


def own_places(pieces: Sequence[Piece]) -> list[int]:
    told: list[int] = []
    for piece in pieces:
        told += [0, 0, 0, 0] if piece.place is None else [*piece.place.rows, *piece.place.columns]
    return told


def shares(pieces: Sequence[Piece], rows: Sequence[Sequence[int]], rank: int) -> tuple[Tensor, Tensor]:
    """How this rank's pieces count: 1 or 0 in sums over the whole tensor, and a weight among copies.

    The weights of a piece's copies add up to nought, so that a weighted sum of equal copies does too, and of others
    does not. A piece of which there is one copy has weight 0. Of a tensor that this rank has no part of, both are 0.

    Returns fp64 [pieces] twice.

    Args:
        pieces: this rank's.
        rows: what `own_places` of every rank says, in rank order.
        rank: this one.
    """
    counted, among = [], []
    for index in range(len(pieces)):
        copies, earlier = _copies(index, rows, rank)
        counted.append(1.0 if earlier == 0 and pieces[index].place is not None else 0.0)
        # cosines over a whole period add up to nought, and the offset leaves none of them 0
        alone = copies == 1 or pieces[index].place is None
        among.append(0.0 if alone else math.cos(2 * math.pi * (earlier + 0.21) / copies))
    return torch.tensor(counted, dtype=torch.float64), torch.tensor(among, dtype=torch.float64)


def portions(pieces: Sequence[Piece], rows: Sequence[Sequence[int]], rank: int) -> list[Place | None]:
    """Which part of each piece is this rank's to look at, where each row of a tensor is looked at once, on one of the
    ranks that keep copies of it; the whole piece where there is one copy. Arguments are those of `shares`."""
    found: list[Place | None] = []
    for index, piece in enumerate(pieces):
        copies, earlier = _copies(index, rows, rank)
        if piece.place is None:
            found.append(None)
            continue
        top, bottom = piece.place.rows
        begin, end = (top + (bottom - top) * part // copies for part in (earlier, earlier + 1))
        found.append(Place((begin, end), piece.place.columns))
    return found


def _copies(index: int, rows: Sequence[Sequence[int]], rank: int) -> tuple[int, int]:
    """How many ranks keep the same part of a tensor as this one, and how many of them come before it."""
    places = [tuple(row[4 * index : 4 * index + 4]) for row in rows]
    return places.count(places[rank]), places[:rank].count(places[rank])
