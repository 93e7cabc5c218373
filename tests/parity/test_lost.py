"""Delayed scaling may lose gradients of the first step in one run and not in the other: no fault, and none is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.parity.outcome import Finding, Grade
from harness.parity.tiers import numeric
from harness.parity.tiers.arithmetic import Arithmetic
from harness.parity.tiers.envelope import Envelope
from harness.parity.tiers.gradients import TensorPair, compare_values
from harness.store.rundir import flatten
from tests.parity.arms import Arm
from tests.support.mutants import each, slips


def counted(engine: str, fp8: str = "delayed", **changes: Any) -> Arithmetic:
    config = flatten(Arm(engine=engine, compute="bf16", **changes).config())
    return Arithmetic.of({**config, "dtype.fp8": fp8})


def pairs(factor: float) -> list[TensorPair]:
    """Gradients of two tensors, the first one's times a factor."""
    drawn = np.random.default_rng(0).standard_normal((2, 40, 40))
    return [compare_values("lost", factor * drawn[0], drawn[0]), compare_values("kept", drawn[1], drawn[1], equal=True)]


def failed(arm: Arithmetic, control: Arithmetic, factor: float) -> list[Finding]:
    both = Envelope(arm, control)
    kinds = numeric.first_step(pairs(factor), [], both, numeric.suspects(both))
    return [finding for kind in kinds for finding in kind if finding.grade is not Grade.ok]


DDP, NATIVE, LESS = counted("ddp"), counted("native"), counted("native", k=4)
OTHER = {
    "an engine that divides losses by k": (DDP, NATIVE),
    "and the other way": (NATIVE, DDP),
    "smaller microbatches": (LESS, NATIVE),
    "no delayed scaling": (NATIVE, counted("native", fp8="")),
    "one engine": (NATIVE, counted("native")),
}
CURRENT = counted("native", fp8="current"), counted("ddp", fp8="current")


def wrong_claims() -> Iterator[str]:
    for name, runs in OTHER.items():
        for factor in (0.0, 0.4, 300.0):
            found = failed(*runs, factor)
            if any(finding.grade is Grade.bad or "reduced" in finding.note for finding in found):
                yield f"{name}, {factor}: {found}"
            if factor == 0.0 and not any(finding.note == numeric.LOST for finding in found):
                yield f"{name}: nothing is said of what is lost"
    if Grade.bad not in {finding.grade for finding in failed(*CURRENT, 0.0)}:
        yield "another recipe: a gradient that is gone is not refuted"


def test_what_may_be_lost_refutes_nothing() -> None:
    assert list(wrong_claims()) == []
    assert not failed(NATIVE, replace(NATIVE), 1.0)


SLIPS = slips(
    """
    the control alone: What the arm alone loses is a fault
        parity.tiers.envelope.Envelope.loses_gradients: (self.arm.fp8, self.control.fp8) => (self.control.fp8,)
    any recipe: Nothing is refuted of 8 bits
        parity.tiers.envelope.Envelope.loses_gradients: "delayed" in (self.arm.fp8, self.control.fp8)
            => bool(self.arm.fp8)
    refuted all the same: What is lost is refuted
        parity.tiers.numeric._lost: grade=Grade.doubt => grade=finding.grade
    with its former cause: What is lost was never reduced
        parity.tiers.numeric._lost: , note=LOST =>
    """
)


@pytest.mark.parametrize("name", each("Gradients lost by delayed scaling", SLIPS))
def test_a_mutant_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    SLIPS[name].put(monkeypatch)
    assert any(wrong_claims()), f"{name} survives"
