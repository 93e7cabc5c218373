"""Pieces of weights and optimizer state on this rank, and moments assembled from them, for any engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from harness.control import Control
from harness.engines.protocol import Engine
from harness.probe.step_checks.pieces import Piece, own_places, shares
from harness.train.session import Session

WEIGHTS = "weights/"


def pieces_of(engine: Engine) -> dict[str, Piece] | None:
    """This rank's piece of every tensor of an engine's state, by key; None if the state has no places.

    Collective over all ranks where the engine's state is.
    """
    if (flat := engine.flat_pieces()) is not None:
        return {key: Piece.flat(key.removeprefix(WEIGHTS), *each) for key, each in flat.items()}
    if getattr(type(engine), "state", None) is Engine.state:  # a copy of what has no places
        return None
    try:
        state = engine.state()
        found = {key: Piece.of(key.removeprefix(WEIGHTS), tensor) for key, tensor in state.tensors.items()}
    except (ValueError, NotImplementedError):  # parts that are no block of rows and columns, or have no one name
        return None
    return found if state.portable else None


def whole_moments(session: Session, control: Control, entries: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Unsharded moments as `<parameter>/<entry>`, on the CPU and in their dtype, of parameters with all of them.

    Summed in fp64 over a separate group, each element from one rank, independent of the engine's gathers. Collective
    over all ranks; empty if the state has no places.
    """
    found = pieces_of(session.engine)
    weights = [piece for key, piece in (found or {}).items() if key.startswith(WEIGHTS)]
    for entry in entries:
        pieces = [
            (found or {}).get(f"optimizer/{weight.name}/{entry}")
            or Piece(weight.name, weight.shape, torch.empty(0), None)
            for weight in weights
        ]
        rows = control.gather(own_places(pieces))
        counted, _ = shares(pieces, rows, session.ranks.rank)
        for index, (weight, piece) in enumerate(zip(weights, pieces, strict=True)):
            if any(any(row[4 * index : 4 * index + 4]) for row in rows):
                yield f"{weight.name}/{entry}", _whole(piece, bool(counted[index]), session.control)


def put(whole: Tensor, piece: Piece, values: Tensor) -> None:
    """Copy the values of a piece to its place in a whole tensor, if it has one."""
    matrix = whole.view(piece.shape[0] if piece.shape else 1, -1)
    for block, elements in piece.place.blocks(values.to("cpu", torch.float64), matrix.shape[1]) if piece.place else ():
        part = matrix[slice(*block.rows), slice(*block.columns)]
        part.copy_(elements.reshape(part.shape))


def _whole(piece: Piece, counts: bool, group: dist.ProcessGroup | None) -> Tensor:
    whole = torch.zeros(piece.shape, dtype=torch.float64)
    if counts:
        put(whole, piece, piece.local)
    if group is not None:
        dist.all_reduce(whole, group=group)
    return whole.to(piece.local.dtype if piece.place is not None else torch.float32)
