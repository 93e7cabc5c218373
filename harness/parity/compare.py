"""Verdict on two runs, and on two versions of the code.

whole and comparable? (T0)  no -> NOT_COMPARABLE
a number that is none?      in one run -> DIFFERENT; in both -> UNDECIDED, unless they differ before it
every recorded bit equal?   yes -> EQUAL, whatever the tier
bits owed? (T1)             yes -> DIFFERENT
within what rounding does?  (T2) refuted -> DIFFERENT; in doubt, or too blind to tell -> UNDECIDED; else EQUIVALENT

Two versions of the code composed the same words. A setting known to one version only was not typed, and counts as part
of the code. A setting that both know with different defaults makes two configurations, to be unified first.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from pathlib import Path

from harness.config.doc import as_typed, settings
from harness.config.errors import refuse
from harness.parity.judgement import Judgement
from harness.parity.outcome import Finding, Grade, Stage, Verdict
from harness.parity.record import Record, load, settings_of, unbounded, with_reach
from harness.parity.telling import wording
from harness.parity.tiers import comparable
from harness.parity.tiers.comparable import as_stepped, matters
from harness.store.identity import must_agree
from harness.store.provenance import sources_digest

CHECKOUT = "checkout"
ONE_VERSION = "settings of one version"


def compare(arm: Path, control: Path, *, sources: str | None = CHECKOUT) -> Verdict:
    """Verdict on `arm` against `control`: run directories, or a baseline's file.

    Args: sources: digest that both must have; `CHECKOUT` for the present sources; None for any equal ones.

    Raises `BadRequest`: both are one directory, or one is a series of numbers alone. `StoreError`: one is no run.
    """
    if Path(arm).resolve() == Path(control).resolve():
        fix = "name two runs; a repetition for an A/A pair is made by train.replicate=1"
        raise refuse(f"compare {arm}", "is one run named twice", fix=fix)
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


def compare_versions(
    arm: Path, control: Path, names: tuple[str, str], *, bitwise: bool = False, one_request: bool = True
) -> Verdict:
    """Verdict on two runs by two versions of the code.

    Args: names: what sentences call the two. bitwise: bits are owed wherever one code would owe them. one_request: axes
    of a study must agree, too.

    Raises `BadRequest`: a record is of an unreadable version. `StoreError`: one is no run.
    """
    left, right = (settings_of(run) for run in (arm, control))
    one_sided = sorted(key for key in left.keys() ^ right.keys() if matters(key))
    typed = {path: each.default for path, each in settings().items()}
    defaults = {path: value.name if isinstance(value, Enum) else value for path, value in typed.items()}
    try:
        tried, held = (
            replace(load(run, assumed={**defaults, **other}), name=name)
            for run, other, name in zip((arm, control), (right, left), names, strict=True)
        )
        verdict = judge(tried, held, versions=True, bitwise=bitwise, one_request=one_request)
    except KeyError as error:
        problem = f"left records that this version cannot read (no {error})"
        fix = f"compare from a checkout of {names[0]}, or a version nearer to the present one"
        raise refuse(f"{names[0]} or {names[1]}", problem, fix=fix) from error
    if not one_sided:
        return verdict
    named = one_sided[0] if len(one_sided) == 1 else f"{one_sided[0]}, ..."
    note = f"{', '.join(one_sided)}: part of the code"
    known = Finding("T0", ONE_VERSION, Stage.record, Grade.ok, named, "any", count=len(one_sided), note=note)
    return replace(verdict, evidence=(*verdict.evidence, known))


def judge(
    arm: Record, control: Record, *, versions: bool = False, bitwise: bool = False, one_request: bool = False
) -> Verdict:
    facts = comparable.check(arm, control)
    if versions:
        facts = [fact for fact in facts if fact.check != comparable.SOURCES]
    if one_request and not (arm.problems or control.problems):
        axes = sorted(key for key in arm.config if matters(key) and not must_agree(key))
        values = ((key, as_typed(arm.config[key]), as_typed(control.config[key])) for key in axes)
        same = [comparable.finding(key, Stage.record, left, right) for key, left, right in values]
        facts = [*(fact for fact in same if fact.grade is not Grade.ok), *facts]
    differing = [fact for fact in facts if fact.grade is not Grade.ok]
    if differing:
        return wording.not_comparable(arm, control, differing)
    if arm.is_watched != control.is_watched:
        arm, control = as_stepped(arm), as_stepped(control)
    judgement = Judgement(arm, with_reach(arm, control), facts, versions, bitwise)
    if not judgement.envelope.is_bounded and any(bit.grade is not Grade.ok for bit in judgement.bits):
        return wording.not_comparable(arm, control, [unbounded(arm)])
    return judgement.verdict()
