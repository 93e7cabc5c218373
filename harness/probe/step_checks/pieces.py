"""Pieces of every tensor on each rank, for any engine, and ranks with copies.

An engine's state has DTensors with places, or unsharded tensors. Ranks exchange their places once: equal places are
copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.probe.step_checks.sketch import Place, Range


@dataclass(frozen=True)
class Piece:
    name: str
    shape: tuple[int, ...]
    source: Tensor
    place: Place | Range | None
    """Place of this rank's part; None without one."""

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Piece:
        """Piece of a DTensor (its local part), or of an unsharded tensor.

        Raises `ValueError`: the part is not one block of whole trailing dimensions.
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
        """This rank's part, in the engine's present memory (engines replace the viewing tensor)."""
        return local_part(self.source)

    @property
    def is_whole(self) -> bool:
        return self.place == Place.whole(self.shape)

    def indices(self, wanted: Sequence[int]) -> Tensor:
        """Flat int64 indices into `local` of the wanted global elements that are here."""
        if self.place is None:
            return torch.empty(0, dtype=torch.int64)
        width = math.prod(self.shape[1:])
        found = (self.place.index(each, width) for each in wanted)
        return torch.tensor([each for each in found if each is not None], dtype=torch.int64)


def local_part(tensor: Tensor) -> Tensor:
    """Local part of a DTensor, not copied; any other tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    return tensor._local_tensor.detach()  # to_local() makes a graph, and of ours a whole tensor


def _chunks(tensor: DTensor) -> list[Any]:
    chunks: list[Any] = tensor.__create_chunk_list__()
    return chunks


def own_places(pieces: Sequence[Piece]) -> list[int]:
    numbers: list[int] = []
    for piece in pieces:
        numbers += [0, 0, 0, 0] if piece.place is None else piece.place.numbers
    return numbers


def shares(pieces: Sequence[Piece], rows: Sequence[Sequence[int]], rank: int) -> tuple[Tensor, Tensor]:
    """Weights of this rank's pieces, fp64 [pieces] twice: 1 or 0 in sums over the unsharded tensor, and a weight among
    copies.

    The weights of a piece's copies add up to 0, so that a weighted sum vanishes exactly for equal copies. Single and
    missing pieces have weight 0. Args: rows: `own_places` of every rank, in rank order.
    """
    counted, among = [], []
    for index in range(len(pieces)):
        copies, earlier = _copies(index, rows, rank)
        counted.append(1.0 if earlier == 0 and pieces[index].place is not None else 0.0)
        # cosines over a whole period add up to nought, and the offset leaves none of them 0
        alone = copies == 1 or pieces[index].place is None
        among.append(0.0 if alone else math.cos(2 * math.pi * (earlier + 0.21) / copies))
    return torch.tensor(counted, dtype=torch.float64), torch.tensor(among, dtype=torch.float64)


def portions(pieces: Sequence[Piece], rows: Sequence[Sequence[int]], rank: int) -> list[Place | Range | None]:
    """Rows of each piece for this rank to observe, so that each row is observed once among its copies.

    The entire piece where there is one copy. Arguments are those of `shares`.
    """
    found: list[Place | Range | None] = []
    for index, piece in enumerate(pieces):
        copies, earlier = _copies(index, rows, rank)
        found.append(None if piece.place is None else piece.place.share(earlier, copies))
    return found


def _copies(index: int, rows: Sequence[Sequence[int]], rank: int) -> tuple[int, int]:
    places = [tuple(row[4 * index : 4 * index + 4]) for row in rows]
    return places.count(places[rank]), places[:rank].count(places[rank])
