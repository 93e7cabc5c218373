"""Bytes a rank sends in a step and keeps, for all eight pairs of strategies: the formulas of docs/engine.md.

`tests/docs/test_engine_page.py` holds them against what `tests/fsdp/test_communication.py` counts to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass

STAGES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


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
    def stage(self) -> int:
        """0 to 3."""
        return STAGES.index(self.inner)

    @property
    def splits_outside(self) -> bool:
        """Whether the outer axis splits the optimizer's state."""
        return self.outer == "optim" and self.O > 1


def sent_inside(s: Setup, P: float, last: float = 0.0) -> float:
    """Bytes a rank sends over the inner axis in a step, of P elements; `last`: of the unit a forward ends with."""
    f = (s.I - 1) / s.I
    if s.stage == 0:
        if s.splits_outside:
            return P * (s.c + s.g / s.O + s.w) * f
        return P * (s.c + s.g) * f
    if s.stage == 3:
        return s.k * (P * (2 * s.w + s.c) - last * s.w) * f
    return P * ((s.k if s.stage == 2 else 1) * s.c + s.w) * f


def sent_outside(s: Setup, P: float) -> float:
    """Bytes a rank sends over the outer axis in a step."""
    f = (s.O - 1) / s.O
    return P / s.I * (s.c + (s.w if s.splits_outside else s.g)) * f


def kept(s: Setup, P: float) -> dict[str, float]:
    """Bytes a rank keeps, by role; padding left out."""
    own = P / (s.I if s.stage else 1) / (s.O if s.splits_outside else 1)
    shard = P / s.I
    keeps_shard = s.stage == 3 and s.splits_outside
    weights = P if s.stage < 3 else shard if keeps_shard else 0.0
    apart = s.w != s.m or (s.stage == 3 and not keeps_shard)
    return {
        "compute_weights": weights * s.w,
        "main_weights": own * s.m if apart else 0.0,
        "main_grads": (P if s.stage <= 1 else shard) * s.g,
        "optimizer": own * s.o,
    }


def transient(s: Setup, U: float) -> float:
    """Most bytes of gathered weights and of gradients to be reduced at once, with units of U elements, one gathered
    ahead: two units of each, and of copies in another dtype for the outer axis."""
    copied = s.c != s.g
    gradients = 2 * U * s.c if s.stage >= 2 or copied else 0.0
    outside = 2 * U * s.c / s.I if s.O > 1 and copied else 0.0
    return (2 * U * s.w if s.stage == 3 else 0.0) + gradients + outside
