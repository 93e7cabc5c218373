"""Pieces of weights and optimizer state on this rank, and moments assembled from them, for any engine.

Muon's rule is worked out for one whole matrix a step, each in turn: an element tells of its momentum alone. See [Note:
Whole matrices] of `harness.config.update_rule`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from harness.config.update_rule import OWN, TINY, Rule
from harness.control import Control
from harness.engines.base import whole
from harness.engines.protocol import Engine
from harness.probe.step_checks.pieces import Piece, own_places, shares
from harness.probe.step_checks.sample import unit_of
from harness.train.session import Session

WEIGHTS = "weights/"


def pieces_of(engine: Engine) -> dict[str, Piece] | None:
    """This rank's piece of every tensor of an engine's state, by key; None if the state has no places.

    Collective over all ranks where the engine's state is.
    """
    if (flat := engine.flat_pieces()) is not None:
        return dict(flat)
    try:
        state = engine.state()
        found = {key: Piece.of(key.removeprefix(WEIGHTS), tensor) for key, tensor in state.tensors.items()}
    except (ValueError, NotImplementedError):  # parts that are no block of rows and columns, or have no one name
        return None
    return found if state.portable else None


def whole_moments(session: Session, control: Control, entries: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Unsharded moments as `<parameter>/<entry>`, on the CPU and in their dtype, of parameters with all of them.

    Over a separate group, each element from one rank. Collective over all ranks; empty if the state has no places.
    """
    found = pieces_of(session.engine)
    weights = [piece for key, piece in (found or {}).items() if key.startswith(WEIGHTS)]
    for entry in entries:
        pieces = [
            (found or {}).get(f"optimizer/{weight.name}/{entry}")
            or Piece(weight.name, weight.shape, torch.empty(0), ())
            for weight in weights
        ]
        rows = control.gather(own_places(pieces))
        counted, _ = shares(rows, session.ranks.rank)
        for index, (weight, piece) in enumerate(zip(weights, pieces, strict=True)):
            if any(row[index] for row in rows):
                part = piece.local if counted[index] else None
                moment = whole(piece, part, [session.control], torch.float64, torch.device("cpu"))
                yield f"{weight.name}/{entry}", moment.to(piece.local.dtype if piece.blocks else torch.float32)


MOST = 1 << 34
"""Elements times the shorter side of the largest matrix that is worked out: some seconds of a processor in fp64."""


class WholeMatrices:
    """Matrices of one run. *Collective over all ranks.*

    Args: weights: this rank's pieces by place in the model. momenta, decays: by name; momenta are missing where another
    rank has them.
    """

    def __init__(
        self,
        rule: Rule,
        weights: Mapping[int, Piece],
        momenta: Mapping[str, Sequence[Piece]],
        decays: Mapping[str, float],
        control: Control,
    ) -> None:
        self.rule, self.decays, self.control = rule, decays, control
        self.places, self.weights = list(weights), list(weights.values())
        self.momenta = [
            next(iter(momenta[each.name]), Piece(each.name, each.shape, torch.empty(0), ())) for each in self.weights
        ]
        rows = [control.gather(own_places(pieces)) for pieces in (self.weights, self.momenta)]
        self.counted = [shares(each, control.ranks.rank)[0].tolist() for each in rows]
        sizes = [math.prod(each.shape) * min(each.shape[-2:]) for each in self.weights]
        self.drawn = [at for at, size in enumerate(sizes) if size <= MOST]

    def before(self, step: int) -> None:
        self.at = self.drawn[step % len(self.drawn)] if self.drawn else None
        if self.at is not None:
            self.left = self.weights[self.at].local.to(torch.float64, copy=True)

    def reduced(self, gradients: Mapping[str, Tensor]) -> None:
        """Args: gradients: averaged, not clipped, in the places of the weights."""
        if self.at is not None:
            found = gradients.get(self.weights[self.at].name, torch.empty(0))
            self.gradient = found.to(torch.float64, copy=True).flatten()

    @torch.no_grad()
    def ratio(self, clipping: float, lr: float) -> tuple[int, float] | None:
        """The matrix's place in the model, and its distance from the rule over what rounding explains; on the first
        rank. *Collective over all ranks.*"""
        if self.at is None:
            return None
        weight, momentum = self.weights[self.at], self.momenta[self.at]
        parts = torch.zeros(3, *weight.shape, dtype=torch.float64)
        if self.counted[0][self.at]:
            weight.put(parts[0], self.left)
            weight.put(parts[1], weight.local.double() - self.left * (1 - lr * self.decays[weight.name]))
        if self.counted[1][self.at]:
            after = momentum.local.double().flatten()
            momentum.put(parts[2], self.rule.mix(after, self.gradient * clipping))
        self.control.begin_totals(parts, torch.zeros(1))()
        if self.control.ranks.rank:
            return None
        before, moved, mixed = parts
        wanted, rounding = self.rule.matrix_step(mixed, lr)
        stored = 4 * (unit_of(weight.local.dtype) + OWN) * float(before.norm() + moved.norm())
        return self.places[self.at], float((moved - wanted).norm()) / (float(rounding) + stored + TINY)
