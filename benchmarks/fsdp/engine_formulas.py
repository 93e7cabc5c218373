"""Bytes a rank sends in a step and keeps, for any pair of strategies, read from the engine's table of placements.

The same terms give a number (`sent`) and the formula that docs/engine.md prints (`formula`).
`tests/docs/test_engine_page.py` holds them against what `tests/fsdp/test_communication.py` counts to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from harness.fsdp import Placements
from harness.fsdp.options import OuterStrategy, Strategy
from harness.fsdp.storage.placement import GATHERED, SHARD, Axis, Operation, Step


@dataclass(frozen=True)
class Setup:
    """A pair of strategies, its ranks, and bytes an element.

    inner, outer: strategies. I, O: ranks of the axes. k: microbatches. w, c, g: compute weights, wire, main gradients.
    m: main weights. o: optimizer state.
    """

    inner: str
    outer: str
    I: int  # noqa: E741
    O: int  # noqa: E741
    k: int = 1
    w: int = 2
    c: int = 4
    g: int = 4
    m: int = 4
    o: int = 8

    @property
    def placements(self) -> Placements:
        return Placements.of(Strategy[self.inner], OuterStrategy[self.outer] if self.O > 1 else None)


@dataclass(frozen=True)
class Term:
    """Elements of a bucket that the ranks of one axis move between them, so often a step.

    step: the operation. width: letter of the bytes an element (w, c or g). each: for every microbatch, else once a
    step. spared: the unit that a forward ends with is left out.
    """

    step: Step
    width: str
    each: bool
    spared: bool = False

    def bytes_sent(self, s: Setup, P: float, last: float) -> float:
        """By one rank: a reduce-scatter or an all-gather over N ranks sends (N - 1) / N of what they move."""
        num_ranks = s.I if self.step.axis is Axis.inner else s.O
        elements = (P - last if self.spared else P) * self.step.share(s.I, s.O)
        return float((s.k if self.each else 1) * elements * getattr(s, self.width) * Fraction(num_ranks - 1, num_ranks))


def terms(placed: Placements) -> list[Term]:
    """All traffic of a step: every microbatch's reductions and gathers, the step's reductions, its new weights."""
    every, last = placed.reductions[False], placed.reductions[True]
    found = [Term(step, _width(step), each=True) for step in every]
    found += [Term(step, _width(step), each=False) for step in last[len(every) :]]
    for step in placed.unshard:
        found += [Term(step, "w", each=True), Term(step, "w", each=True, spared=True)]
    return found + [Term(step, "w", each=False) for step in placed.install]


def _width(step: Step) -> str:
    """Terms of a sum travel as the wire has them; sums, in the second leg of an all-reduce, as main gradients."""
    return "c" if step.operation is Operation.reduce_scatter else "g"


def sent(s: Setup, axis: Axis, P: float, last: float = 0.0) -> float:
    """Bytes a rank sends over an axis in a step, of P elements; `last`: of the unit a forward ends with."""
    return sum(term.bytes_sent(s, P, last) for term in terms(s.placements) if term.step.axis is axis)


def formula(placed: Placements, axis: Axis) -> str:
    """`sent` in letters: P elements, L of the unit a forward ends with, k microbatches, f(N) = (N - 1) / N."""
    mine = [term for term in terms(placed) if term.step.axis is axis]
    if not mine:
        return "0"
    parts: dict[str, int] = {}
    for term in mine:
        times = "k " if term.each else ""
        divided = "/O" if axis is Axis.inner and term.step.after.outer is SHARD else ""
        parts[f"{times}{term.width}{divided}"] = parts.get(f"{times}{term.width}{divided}", 0) + 1
    total = " + ".join(f"{count if count > 1 else ''}{' ' if count > 1 else ''}{part}" for part, count in parts.items())
    spared = "".join(f" - k L {term.width}" for term in mine if term.spared)
    whole, ranks = ("P", "I") if axis is Axis.inner else ("P/I", "O")
    return f"({whole} ({total}){spared}) f({ranks})" if spared else f"{whole} ({total}) f({ranks})"


def kept(s: Setup, P: float) -> dict[str, float]:
    """Bytes a rank keeps, by role; padding left out."""
    placed = s.placements
    weights = P * placed.resting_weights.share(s.I, s.O) if placed.resting_weights_are_kept else 0.0
    apart = s.w != s.m or not placed.resting_weights_are_kept
    return {
        "compute_weights": float(weights * s.w),
        "main_weights": float(P * placed.main_weights.share(s.I, s.O) * s.m) if apart else 0.0,
        "main_grads": float(P * placed.accumulated_grads.share(s.I, s.O) * s.g),
        "optimizer": float(P * placed.optimizer_state.share(s.I, s.O) * s.o),
    }


def kept_formula(placed: Placements) -> str:
    """`kept` in letters, w, m, g and o together where they lie alike."""
    widths: dict[str, list[str]] = {}
    for letter, lies, is_kept in (
        ("w", placed.resting_weights, placed.resting_weights_are_kept),
        ("g", placed.accumulated_grads, True),
        ("m", placed.main_weights, True),
        ("o", placed.optimizer_state, True),
    ):
        divisor = " ".join(name for name, each in zip("IO", lies, strict=True) if each is SHARD)
        divided = f" / ({divisor})" if " " in divisor else f" / {divisor}" if divisor else ""
        if is_kept:
            widths.setdefault(divided, []).append(letter)
    return " + ".join(
        f"P {f'({joined})' if len(letters) > 1 else joined}{divided}"
        for divided, letters in widths.items()
        for joined in [" + ".join(letters)]
    )


def transient(s: Setup, U: float) -> float:
    """Most bytes of gathered weights and of gradients to be reduced at once, with units of U elements, one gathered
    ahead: two units of each, and of copies in another dtype for the outer axis."""
    copied = s.c != s.g
    gradients = 2 * U * s.c if copied or not s.placements.accumulates_locally else 0.0
    outside = 2 * U * s.c / s.I if s.O > 1 and copied else 0.0
    return (2 * U * s.w if s.placements.compute_weights.inner is GATHERED else 0.0) + gradients + outside
