"""Sampled elements of every tensor, followed through every step: the optimizer's rule, and unchanged weights and
moments in between."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.config.update_rule import Rule, Units, Update, UpdateState
from harness.probe.step_checks.pieces import Piece
from harness.store.check_stream import MOMENTS

PER_TENSOR = 32
"""Elements followed of each tensor, over all ranks.

A fault in a share p of a tensor's elements is among them with probability 1 - (1 - p)^32: 96 % for a tenth of them.
Smaller faults show in the sketches.
"""

ALIKE = 3


def unit_of(dtype: torch.dtype) -> float:
    """Unit roundoff: half the gap between 1 and the next number."""
    return torch.finfo(dtype).eps / 2


def chosen(name: str, numel: int) -> list[int]:
    if numel <= PER_TENSOR:
        return list(range(numel))
    return sorted(random.Random(zlib.crc32(name.encode())).sample(range(numel), PER_TENSOR))


@dataclass(frozen=True)
class Followed:
    tensor: int
    weight: Piece
    moments: tuple[Piece, ...]
    indices: Tensor
    """Flat, into the pieces; int64."""
    decay: float
    rule: Rule


@dataclass(frozen=True)
class Values:
    """Values of a rank's followed elements, concatenated; fp64 [elements] on the CPU."""

    weights: Tensor
    moments: tuple[Tensor, ...]


class Made(NamedTuple):
    step: int
    lr: float
    gradient_unit: float


class Sample:
    """Followed elements of one rank.

    Args: rule: of the optimizer. weights: this rank's pieces, in model order. moments: by tensor name, this rank's.
    trained: names of tensors with gradients. decay_of: weight decay by name. orthogonalized: names of those that Muon
    steps.
    """

    def __init__(
        self,
        rule: Rule,
        weights: Sequence[Piece],
        moments: Mapping[str, Sequence[Piece]],
        trained: set[str],
        decay_of: Mapping[str, float],
        orthogonalized: Collection[str] = (),
    ) -> None:
        self.rule = rule
        self.beside = rule.of_tensor(orthogonalized=False)
        self.count = len(self.beside.entries)
        self.followed: list[Followed] = []
        for tensor, weight in enumerate(weights):
            step = rule.of_tensor(orthogonalized=weight.name in orthogonalized)
            own, count = tuple(moments.get(weight.name, ())), len(step.entries)
            if weight.name in trained and (len(own) != count or any(m.own != weight.own for m in own)):
                continue  # another rank steps it
            indices = weight.indices(chosen(weight.name, math.prod(weight.shape)))
            if len(indices):
                decay = decay_of[weight.name]
                self.followed.append(Followed(tensor, weight, own, indices.to(weight.local.device), decay, step))
        self.tensor_of = self._spread([each.tensor for each in self.followed]).long()
        """Tensor index of each followed element; int64."""
        signs = [_signs(each.weight.name, len(each.indices)) for each in self.followed]
        self._signs = torch.cat([torch.empty(0, dtype=torch.float64), *signs])
        self._decays = self._spread([each.decay for each in self.followed])
        self._trained = self._spread([float(each.weight.name in trained) for each in self.followed])
        self._of_muon = self._spread([float(each.rule.name == "muon") for each in self.followed]) > 0
        self._reach = self._spread([each.rule.reach(each.weight.shape) for each in self.followed])
        self.units = Units(
            max((unit_of(e.weight.local.dtype) for e in self.followed), default=0.0),
            0.0,
            max((unit_of(m.local.dtype) for e in self.followed for m in e.moments), default=0.0),
        )

    def _spread(self, values: Sequence[float]) -> Tensor:
        counts = torch.tensor([len(each.indices) for each in self.followed], dtype=torch.int64)
        return torch.tensor(values, dtype=torch.float64).repeat_interleave(counts)

    @torch.no_grad()
    def look(self) -> Values:
        weights = self._take([each.weight.local for each in self.followed])
        moments = tuple(
            self._take([each.moments[number].local if number < len(each.moments) else None for each in self.followed])
            for number in range(self.count)
        )
        return Values(weights, moments)

    @torch.no_grad()
    def gradients(self, pieces: Mapping[str, Tensor]) -> Tensor:
        """Averaged gradients of trained tensors; 0 of others. `pieces` has the places of the weights."""
        return self._take([pieces.get(each.weight.name) for each in self.followed])

    def _take(self, sources: Sequence[Tensor | None]) -> Tensor:
        parts = [
            torch.zeros(len(each.indices), dtype=torch.float64)
            if source is None
            else source.take(each.indices).to("cpu", torch.float64)
            for each, source in zip(self.followed, sources, strict=True)
        ]
        return torch.cat(parts or [torch.empty(0, dtype=torch.float64)])

    def moved(self, left: Values, found: Values) -> Tensor:
        """Relative change of weights and moments between two looks, by element; fp64 [elements].

        Each moment is relative to itself, even if small beside others.
        """
        off = torch.zeros_like(found.weights)
        pairs = ((left.weights, found.weights), *zip(left.moments, found.moments, strict=True))
        for before, now in pairs:
            apart = (now - before).abs()
            off = torch.maximum(off, torch.where(apart == 0, 0.0, apart / before.abs()))
        return off

    def of_moments(self, values: Values, tensors: int) -> Tensor:
        """Signed sum of each moment's followed elements, by tensor; 0 if missing. fp64 [tensors, 2]."""
        found = torch.zeros(tensors, len(MOMENTS), dtype=torch.float64)
        for number, moment in enumerate(values.moments):
            found[:, number].index_add_(0, self.tensor_of, self._signs * moment)
        return found

    def held_to_rule(
        self, before: Values, after: Values, gradients: Tensor, clipping: float, made: Made
    ) -> tuple[Tensor, float]:
        """Distance of a step from the rule over the bound of rounding, by element, at most 1 if right; and the relative
        error of the clipping factor.

        If all elements, or those of each tensor, follow the rule with another factor, the rule is right and the factor
        wrong. Args: before, after: weights and moments around the step. gradients: averaged, not clipped. clipping:
        expected factor.
        """
        nothing = torch.zeros_like(gradients)
        state = UpdateState(before.weights, *(*before.moments, nothing, nothing)[:2])
        ratios = self._ratios(state, after, clipping * gradients, made)
        if not len(ratios) or not ratios.max() > 1:
            return ratios, 0.0
        first = after.moments[0] if after.moments else nothing
        taken = self.beside.gradient_taken(state, first, self._decays)
        if taken is None:
            return ratios, 0.0
        if self._of_muon.any():
            taken = torch.where(self._of_muon, self.rule.gradient_taken(state, first, self._decays), taken)
        everywhere = torch.ones_like(ratios, dtype=torch.bool)
        of_tensors = [self.tensor_of == tensor for tensor in torch.unique(self.tensor_of[ratios > 1])]
        for parts in ([everywhere], of_tensors):
            factors = self._factors_taken(taken, gradients, parts, clipping)
            again = self._ratios(state, after, factors * gradients, made)
            if not again.max() > 1:
                return again, float((factors / clipping - 1).abs().max())
        return ratios, 0.0

    def _factors_taken(self, taken: Tensor, gradients: Tensor, parts: list[Tensor], clipping: float) -> Tensor:
        """Factor of gradients for each element, fp64 [elements]: by part, the median over elements with gradients that
        are not small.

        Parts with fewer than `ALIKE` take the nearest factor of others, the expected one, or that of no clipping.
        """
        found, few = [clipping, 1.0], []
        factors = torch.full_like(gradients, clipping)
        for part in parts:
            moves = part & (gradients != 0) & (self._trained > 0)
            large = moves & (gradients.abs() >= gradients[moves].abs().quantile(0.5)) if moves.any() else moves
            if not large.any():
                continue
            factor = float((taken[large] / gradients[large]).median())
            if int(large.sum()) >= ALIKE:
                factors[part] = factor
                found.append(factor)
            else:
                few.append((part, factor))
        for part, factor in few:
            factors[part] = min(found, key=lambda each: abs(each - factor))
        return factors

    def _ratios(self, state: UpdateState, after: Values, gradients: Tensor, made: Made) -> Tensor:
        """Distance from the rule over the bound of rounding, by element; at most 1 if right. fp64 [elements].

        Frozen elements must not move at all.
        """
        units = self.units._replace(gradients=made.gradient_unit)
        rule = self.beside.bounded(state, gradients, made.step, made.lr, self._decays, units)
        if self._of_muon.any():
            of_muon = self.rule.bounded(state, gradients, made.step, made.lr, self._decays, units, self._reach)
            rule = Update(*(torch.where(self._of_muon, *both) for both in zip(of_muon, rule, strict=True)))
        ratio = _ratio(after.weights, rule.weights, rule.weights_error)
        expected = ((rule.first, rule.first_error), (rule.second, rule.second_error))
        for value, (wanted, allowed) in zip(after.moments, expected, strict=False):
            ratio = torch.maximum(ratio, _ratio(value, wanted, allowed))
        unmoved = _ratio(after.weights, state.weights, torch.zeros_like(ratio))
        return torch.where(self._trained > 0, ratio, unmoved)

    def largest(self, values: Tensor, tensors: int) -> Tensor:
        """Maximum by tensor; 0 for tensors without elements here. fp64 [tensors]."""
        found = torch.zeros(tensors, dtype=torch.float64)
        np.maximum.at(found.numpy(), self.tensor_of.numpy(), values.numpy())
        return found

    def elements(self, tensors: int) -> Tensor:
        """Number of followed elements on this rank, by tensor; fp64 [tensors]."""
        return torch.bincount(self.tensor_of, minlength=tensors).to(torch.float64)


def _signs(name: str, count: int) -> Tensor:
    """Random signs, fixed for a tensor; fp64 [count]."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"moments of {name}".encode()))
    return torch.randint(0, 2, (count,), generator=generator).mul_(2).sub_(1).to(torch.float64)


def _ratio(value: Tensor, wanted: Tensor, allowed: Tensor) -> Tensor:
    off = (value - wanted).abs()
    return torch.where(off == 0, torch.zeros_like(off), off / allowed)
