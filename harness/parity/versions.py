"""Verdict on two versions of the code: the sources differ, all else is judged as for any pair.

Both versions composed the same words. A setting known to one version only was not typed, and counts as part of the
code. A setting that both know with different defaults makes two configurations, to be unified first. Bits are owed
where the sources that can change a number are equal; elsewhere only on demand, because a version may add in another
order and be right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from harness.config.doc import as_typed, settings
from harness.config.errors import refuse
from harness.parity.compare import judge
from harness.parity.outcome import Finding, Grade, Stage, Verdict
from harness.parity.record import Record, load, settings_of
from harness.parity.tiers import comparable
from harness.parity.tiers.comparable import Admission, admissible, matters
from harness.store.identity import must_agree

SOURCES = "sources"
ONE_VERSION = "settings of one version"


@dataclass(frozen=True)
class Side:
    run: Path
    label: str


def compare_versions(arm: Side, control: Side, *, bitwise: bool = False, one_request: bool = True) -> Verdict:
    """Verdict on two runs by two versions of the code.

    Args: bitwise: bits are owed wherever one code would owe them. one_request: axes of a study must agree, too.

    Raises `BadRequest`: a record is of an unreadable version. `StoreError`: one is no run.
    """
    left, right = (settings_of(side.run) for side in (arm, control))
    one_sided = sorted(key for key in left.keys() ^ right.keys() if matters(key))
    try:
        tried, held = _load(arm, right), _load(control, left)
        fault = own_fault(held)
        if fault:
            tried, held = tried.unwitnessed(), held.unwitnessed()
        verdict = judge(tried, held, facts=_facts(tried, held, one_request), admission=_admission(tried, held, bitwise))
    except KeyError as error:
        problem = f"left records that this version cannot read (no {error})"
        fix = f"compare from a checkout of {arm.label}, or a version nearer to the present one"
        raise refuse(f"{arm.label} or {control.label}", problem, fix=fix) from error
    if fault:
        verdict = replace(verdict, sentence=f"{verdict.sentence} By itself {control.label} is wrong already: {fault}.")
    if not one_sided:
        return verdict
    named = one_sided[0] if len(one_sided) == 1 else f"{one_sided[0]}, ..."
    note = f"{', '.join(one_sided)}: part of the code"
    known = Finding("T0", ONE_VERSION, Stage.record, Grade.ok, named, "any", count=len(one_sided), note=note)
    return replace(verdict, evidence=(*verdict.evidence, known))


def own_fault(run: Record) -> str:
    """Fault that a run's own witnesses found, in a clause; may be empty.

    A fault of the control must not be taken for a difference.
    """
    if run.problems:
        return ""
    alone = judge(run, run, facts=[], admission=Admission("T2", "one run"))
    if not alone.findings:
        return ""
    first = alone.findings[0]
    where = f" in {first.tensor}" if first.tensor else ""
    return f"{first.check}{f' at step {first.step}' if first.step else ''} ({first.stage.value}{where})"


def _load(side: Side, other: Mapping[str, Any]) -> Record:
    return replace(load(side.run, assumed={**_defaults(), **other}), name=side.label)


def changed_defaults(arm: Path, control: Path) -> dict[str, Any]:
    """Settings known to both versions with different defaults, with the control's value. Raises `StoreError`: one is no
    run."""
    left, right = (settings_of(run) for run in (arm, control))
    shared = sorted(key for key in left.keys() & right.keys() if _is_held(key))
    return {key: right[key] for key in shared if left[key] != right[key]}


def _facts(arm: Record, control: Record, one_request: bool) -> list[Finding]:
    facts = [fact for fact in comparable.check(arm, control) if fact.check != SOURCES]
    if not one_request or any(fact.check == "whole record" for fact in facts):
        return facts
    axes = sorted(key for key in arm.config if _is_held(key) and not must_agree(key))
    values = ((key, as_typed(arm.config[key]), as_typed(control.config[key])) for key in axes)
    same = [comparable.finding(key, Stage.record, left, right) for key, left, right in values]
    return [*(fact for fact in same if fact.grade is not Grade.ok), *facts]


def _is_held(key: str) -> bool:
    return matters(key) or must_agree(key)


def _admission(arm: Record, control: Record, bitwise: bool) -> Admission:
    same = arm.provenance.get("sources_digest") == control.provenance.get("sources_digest")
    if same or bitwise:
        found = admissible(arm.config, control.config, resumed=arm.attempts > 1 or control.attempts > 1)
        why = "no source that can change a number differs" if same else "--bitwise demands what one code owes"
        return replace(found, reason=f"{why}; {found.reason}")
    return Admission("T2", "two versions of the code: one may add in another order (--bitwise demands bits)")


def _defaults() -> Mapping[str, Any]:
    return {path: value.name if isinstance(value := each.default, Enum) else value for path, each in settings().items()}
