"""Verdict on two runs, and on every arm of a study.

whole and comparable? (T0)  no -> NOT_COMPARABLE
a number that is none?      in one run -> DIFFERENT; in both -> UNDECIDED, unless they differ before it
every recorded bit equal?   yes -> EQUAL, whatever the tier
bits owed? (T1)             yes -> DIFFERENT
within what rounding does?  (T2) refuted -> DIFFERENT; in doubt, or too blind to tell -> UNDECIDED; else EQUIVALENT
"""

from __future__ import annotations

from pathlib import Path

from harness.config.errors import refuse
from harness.parity.judgement import Judgement
from harness.parity.outcome import Finding, Grade, Verdict
from harness.parity.record import Record, load, unbounded, with_reach
from harness.parity.series import compare_series, is_series
from harness.parity.telling import wording
from harness.parity.tiers import comparable
from harness.parity.tiers.comparable import Admission, as_stepped
from harness.store.provenance import sources_digest

CHECKOUT = "checkout"


def compare(arm: Path, control: Path, *, sources: str | None = CHECKOUT) -> Verdict:
    """Verdict on `arm` against `control`: run directories, or a baseline's file.

    Args: sources: digest that both must have; `CHECKOUT` for the present sources; None for any equal ones.

    Raises `BadRequest`: both are one directory. `StoreError`: one is no run.
    """
    if Path(arm).resolve() == Path(control).resolve():
        fix = "name two runs; a repetition for an A/A pair is made by train.replicate=1"
        raise refuse(f"compare {arm}", "is one run named twice", fix=fix)
    if is_series(Path(arm)) or is_series(Path(control)):
        return compare_series(Path(arm), Path(control))
    digest = sources_digest() if sources == CHECKOUT else sources
    return judge(load(arm, digest), load(control, digest))


def loss_bounds(arm: Path, control: Path) -> list[Finding]:
    """Losses of every step with their bounds, for a picture; empty where not comparable. Raises `StoreError`: one is no
    run."""
    left, right = load(Path(arm)), load(Path(control))
    facts = comparable.check(left, right)
    if any(fact.grade is not Grade.ok for fact in facts):
        return []
    return Judgement(left, right, facts).losses()


def judge(
    arm: Record, control: Record, *, facts: list[Finding] | None = None, admission: Admission | None = None
) -> Verdict:
    facts = comparable.check(arm, control) if facts is None else facts
    differing = [fact for fact in facts if fact.grade is not Grade.ok]
    if differing:
        return wording.not_comparable(arm, control, differing)
    if arm.is_watched != control.is_watched:
        arm, control = as_stepped(arm), as_stepped(control)
    judgement = Judgement(arm, with_reach(arm, control), facts, admission)
    if not judgement.envelope.is_bounded and any(bit.grade is not Grade.ok for bit in judgement.bits):
        return wording.not_comparable(arm, control, [unbounded(arm)])
    return judgement.verdict()
