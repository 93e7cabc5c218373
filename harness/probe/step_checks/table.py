"""Sums and maxima over ranks at the end of a step, and the resulting numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.probe.step_checks.sketch import SKETCHES, Sketch
from harness.store.check_stream import CHECKS, MOMENTS

Table = NDArray[np.float64]

WITH_SQUARES = ("reduced", "before", "after")
SUMMED = ("local", "reduced", "before", "cast", "after", "dissent")
"""Sketches summed over ranks: of local and reduced gradients, of weights before the step, in the main and compute
dtype, and after it.

Those of copies count with their weight (`pieces.shares`).
"""
BLIND = ("blind", "blind_twice")
"""Above 0 where a rank could not recompute local gradients, or evaluate the plain model twice."""

MAXIMA = ("drift", "again", "clipping", "kept", "rule")
"""Distances of what `harness.parity.alone.every_step` asks of a step, and the relative error of the clipping factor."""

ORDER = 1e-12
"""Largest relative difference of fp64 sums of the same numbers in another order."""


class StepTable:
    """Numbers of one rank in a step: named columns, or blocks of them; a row a tensor."""

    def __init__(self, tensors: int, widths: Mapping[str, int], nothing: float = 0.0) -> None:
        self._places = columns_of(widths)
        self.values = torch.full((tensors, sum(widths.values())), nothing, dtype=torch.float64)

    def __getitem__(self, name: str) -> Tensor:
        """A view: [tensors], or [tensors, columns] of a block."""
        found = self.values[:, self._places[name]]
        return found if found.shape[1] > 1 else found[:, 0]

    def read(self, name: str) -> Table:
        return self[name].numpy()

    def put(self, name: str, found: Sketch, at: slice | list[int] = slice(None)) -> None:
        """Store sketches [tensors, m], and their squares where there is a column for them. Args: at: some tensors."""
        self[name][at] = found.values
        if f"{name}_squares" in self._places:
            self[f"{name}_squares"][at] = found.squares

    def put_shares(self, name: str, found: Sketch, shares: Tensor) -> None:
        """Store sketches of this rank's pieces, each times its share [tensors]."""
        self.put(name, Sketch(shares[:, None] * found.values, shares * found.squares))


def columns_of(widths: Mapping[str, int]) -> dict[str, slice]:
    ends = list(accumulate(widths.values(), initial=0))
    return {name: slice(begin, end) for name, (begin, end) in zip(widths, pairwise(ends), strict=True)}


def summed_table(tensors: int) -> StepTable:
    """Sums: sketches [tensors, sketches], moments [tensors, 2], and single columns; NaN: not seen."""
    single = ("terms", *(f"{kind}_squares" for kind in WITH_SQUARES), "saw", "hidden", "followed", *BLIND)
    moments = dict.fromkeys(("moments_before", "moments_after"), len(MOMENTS))
    made = StepTable(tensors, {**dict.fromkeys(SUMMED, SKETCHES), **moments, **dict.fromkeys(single, 1)})
    made["reduced"][:], made["reduced_squares"][:] = torch.nan, torch.nan
    return made


def largest_table(tensors: int) -> StepTable:
    """Maxima: of forwards' weights the largest sketch and the negative of the least, [tensors, 2 sketches]; and single
    columns, of which `clipping` is equal for all tensors. NaN: not seen."""
    made = StepTable(tensors, {"used": 2 * SKETCHES, **dict.fromkeys(MAXIMA, 1)})
    made["used"][:], made["again"][:], made["drift"][:] = -torch.inf, torch.nan, torch.nan
    return made


def differ_from(largest: StepTable, summed: StepTable, weights: Table | None, moments: Table | None) -> None:
    """Raise `kept` to the distance of weights and moments before the step from those after the last one, where they
    are known: sketches [tensors, sketches], and [tensors, 2] (`MOMENTS`)."""
    if weights is not None:
        off = np.abs(summed.read("before") - weights).max(1)
        _keep(largest, relative(off, np.sqrt(summed.read("before_squares"))))
    if moments is not None:
        _keep(largest, relative(np.abs(summed.read("moments_before") - moments), np.abs(moments)).max(1))


def _keep(largest: StepTable, off: Table) -> None:
    largest["kept"][:] = torch.maximum(largest["kept"], torch.from_numpy(np.where(off > ORDER, off, 0.0)))


def step_numbers(
    summed: StepTable, largest: StepTable, divisor: float, norm: float, least: Table | float = 0.0
) -> tuple[list[float], Table]:
    """Row of the stream for a step, and for its tensors (`harness.store.check_stream`).

    Args: summed, largest: over all ranks. divisor: of the sum of local gradients. norm: logged gradient norm. least:
    norm [tensors] that a sum is at least compared with, where rounding does not shrink with it.
    """
    saw = bool(summed.read("saw").any())
    local, terms = summed.read("local") / divisor, summed.read("terms") / divisor**2
    reduced, squares = summed.read("reduced"), summed.read("reduced_squares")
    before, after = np.sqrt(summed.read("before_squares")), np.sqrt(summed.read("after_squares"))
    nothing = np.full(len(terms), np.nan)
    # M equal terms have a sum that is sqrt(M) times as long as all of them
    added = np.maximum(np.sqrt(np.fmax(terms, squares)), least)
    with np.errstate(invalid="ignore"):  # of gradients that overflowed
        off = np.abs(reduced - local).max(1)
    sums = relative(off, added) if saw else nothing
    used = largest.read("used")
    apart = np.abs(used * np.repeat([1.0, -1.0], SKETCHES) - np.tile(summed.read("cast"), 2)).max(1)
    gathered = np.where(np.isinf(used).any(1), 0.0, relative(apart, before)) if saw else nothing
    gathered = np.where(summed.read("hidden") > 0, np.nan, gathered)
    dissent = relative(np.abs(summed.read("dissent")).max(1), after)
    rule = np.where(summed.read("followed") > 0, largest.read("rule"), np.nan)
    blind, blind_twice = (bool(summed.read(name).any()) for name in BLIND)
    again = largest.read("again") if saw and not blind else nothing
    drift = nothing if blind_twice else largest.read("drift")
    checks = {"sum": sums, "gather": gathered, "kept": largest.read("kept"), "replicas": dissent, "rule": rule}
    whole = math.sqrt(float(squares.sum()))
    clipping = max(largest["clipping"].tolist(), default=0.0)
    off_norm = max(abs(norm - whole) / whole, clipping) if whole > 0 else math.nan
    local = local if saw else np.full_like(local, np.nan)
    tensors = [local, terms, reduced, squares, summed.read("after"), after**2, summed.read("moments_after")]
    return rows_of(checks | {"again": again, "drift": drift}, off_norm, tensors)


def rows_of(
    checks: Mapping[str, Table],
    norm: float,
    tensors: Sequence[Table],
    total: Callable[[Table], Any] = lambda values: values.sum(0),
) -> tuple[list[float], Table]:
    """Row of the stream for a step, and for its tensors.

    Args: checks: by name, of every tensor; others were not made. tensors: sketches of local gradients, squares of
    their terms, sketches and squares of reduced ones and of weights after the step, and moments; [tensors], or
    [tensors, columns]. total: over the tensors.
    """
    row = [number for name in CHECKS for number in (_worst(checks[name]) if name in checks else (math.nan, math.nan))]
    local, terms, *others, moments = (each if each.ndim > 1 else each[:, None] for each in tensors)
    row.append(norm)
    for values in (local, *others):
        row += total(values).tolist()
    return row, np.concatenate([local, terms, *others, moments], axis=1)


def closing_numbers(columns: Sequence[str], kept: Table) -> list[float]:
    largest, tensor = _worst(kept)
    known = {"kept": largest, "kept_tensor": tensor}
    return [known.get(name, math.nan) for name in columns]


def relative(off: Table, scale: Table) -> Table:
    """0 where nothing is off, whatever the scale."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Table = np.where(off == 0.0, 0.0, off / scale)
    return found


def _worst(values: Table) -> tuple[float, float]:
    """Maximum and its index; NaN, which was not observed, exceeds all."""
    if not len(values):
        return math.nan, math.nan
    place = int(np.where(np.isnan(values), np.inf, values).argmax())
    return float(values[place]), float(place)
