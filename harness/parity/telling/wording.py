"""A verdict in words: one sentence, and the commands that come next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from harness.parity.outcome import Finding, Grade, Outcome, Verdict, percent
from harness.parity.record import Record
from harness.parity.reference import BOUNDS
from harness.parity.telling import deciding
from harness.parity.tiers.admissible import Admission
from harness.store.screen import counted


def not_comparable(arm: Record, control: Record, differing: Sequence[Finding]) -> Verdict:
    first = differing[0]
    if first.check == "whole record":
        what = "; ".join(f"{fact.note}: {fact.observed}" for fact in differing[:3])
    elif first.check == BOUNDS:
        what = first.note
    else:
        what = "; ".join(_fact(fact) for fact in differing[:3])
    more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
    return Verdict(
        outcome=Outcome.NOT_COMPARABLE,
        sentence=f"NOT_COMPARABLE: {arm.name} and {control.name} cannot be compared: {what}{more}.",
        arm=str(arm.path),
        control=str(control.path),
        tier="T0",
        admissible="none",
        evidence=tuple(differing),
        findings=tuple(differing),
        commands=deciding.after_refusal(arm, control, differing),
    )


def _fact(fact: Finding) -> str:
    where = f" at step {fact.step}" if fact.step is not None else ""
    return f"{fact.check}{where} is {fact.observed} in the one and {fact.allowed} in the other"


def verdict(
    *,
    outcome: Outcome,
    arm: Record,
    control: Record,
    admission: Admission,
    evidence: Sequence[Finding],
    findings: Sequence[Finding],
    resolution: float | None,
    looked_at: Mapping[str, Sequence[int]],
) -> Verdict:
    decided = findings[0].tier if findings else ("T1" if outcome is Outcome.EQUAL else "T2")
    return Verdict(
        outcome=outcome,
        sentence=f"{outcome.value}: {_sentence(outcome, arm, control, evidence, findings, resolution, looked_at)}.",
        arm=str(arm.path),
        control=str(control.path),
        tier=decided,
        admissible=str(admission),
        evidence=tuple(evidence),
        findings=tuple(findings),
        resolution=resolution,
        commands=deciding.commands(outcome, arm, control, findings),
    )


def _sentence(
    outcome: Outcome,
    arm: Record,
    control: Record,
    evidence: Sequence[Finding],
    findings: Sequence[Finding],
    resolution: float | None,
    looked_at: Mapping[str, Sequence[int]],
) -> str:
    pair = f"{arm.name} against {control.name}"
    if outcome is Outcome.EQUAL:
        counts: Counter[str] = Counter()  # a check has a row for each step
        for row in evidence:
            counts[row.check.removesuffix(" bits")] += row.count if row.tier == "T1" and row.count > 1 else 0
        recorded = ", ".join(f"{count} {check}" for check, count in counts.items() if count)
        return f"{pair} agrees in every recorded bit ({recorded}, and the final weights)"
    if outcome is Outcome.EQUIVALENT:
        reach = f"; a wrong scale of {percent(resolution)} or more would have shown" if resolution is not None else ""
        seen = _looked_at(looked_at, arm.length)
        return f"{pair} differs by no more than rounding explains over {counted(arm.length, 'step')}{seen}{reach}"
    grave = Grade.bad if outcome is Outcome.DIFFERENT else Grade.doubt
    first = next(finding for finding in findings if finding.grade is grave)
    named = first if first.tensor else _named(first, findings, grave)
    told = describe(first, named, _hint(first, findings))
    begins = deciding.onset(first, findings)
    return f"{pair}: {told}" if begins is None else f"{pair}: {describe(begins, begins, '')}; certain {told}"


def _looked_at(steps: Mapping[str, Sequence[int]], length: int) -> str:
    every = [word for name, word in LOOKED_AT.items() if len(steps.get(name, ())) == length]
    told = [f"looked at in both at every step, and right: {', '.join(every)}"] if every else []
    for name, word in LOOKED_AT.items():
        found = steps.get(name, ())
        if word not in every and (found or name == AGAIN):
            told.append(f"{word}: {_of_steps(found, length, named=NAMED_STEPS if name == AGAIN else 1)}")
    return "".join(f"; {each}" for each in told)


NAMED_STEPS = 8


def _of_steps(steps: Sequence[int], length: int, named: int) -> str:
    if len(steps) < 2:
        return f"at step {steps[0]} alone" if steps else "at no step"
    if len(steps) <= named:
        return f"at steps {', '.join(map(str, steps[:-1]))} and {steps[-1]} of {length}"
    return f"at {len(steps)} of {length} steps"


AGAIN = "again"

LOOKED_AT = {
    "fed": "what it was fed",
    "kept": "weights between steps",
    "gather": "weights of forwards",
    "sum": "sums of gradients",
    "norm": "the norm",
    "rule": "samples of the update",
    AGAIN: "forwards and backwards, worked out again",
}


def _hint(first: Finding, findings: Sequence[Finding]) -> str:
    scales = (f.note for f in findings if f.step == first.step and f.check in SCALES and f.note)
    return first.note or next(scales, "")


SCALES = ("scale of all gradients", "gradient scale")


def _named(first: Finding, findings: Sequence[Finding], grave: Grade) -> Finding:
    same = (f for f in findings if f.step == first.step and f.stage is first.stage and f.tensor and f.grade is grave)
    return next(same, first)


def describe(first: Finding, named: Finding, hint: str) -> str:
    tensor = named.tensor
    where = f"at step {first.step}, " if first.step is not None else ""
    subject = f"{first.check} ({first.place}{f', first in {tensor}' if tensor else ''})"
    if isinstance(first.observed, str) or isinstance(first.allowed, str):
        measured = f"is {first.observed} against {first.allowed}"
    else:
        measured = f"is off by {percent(first.observed)} where rounding explains {percent(first.allowed)}"
    return f"{where}{subject} {measured}{f'; {hint}' if hint else ''}"


def standing_for(finding: Finding, count: int) -> Finding:
    return replace(finding, count=count)
