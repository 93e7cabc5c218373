"""Verdicts as text: the sentence, the evidence as a table, the commands."""

from __future__ import annotations

from collections.abc import Sequence

from harness.parity.outcome import Finding, Grade, StudyVerdict, Verdict, percent
from harness.parity.telling.wording import shown

MARKS = {Grade.ok: "ok", Grade.doubt: "?", Grade.bad: "BAD"}
BITS = {Grade.ok: "ok", Grade.doubt: "?", Grade.bad: "differ"}
LISTED = 6
"""Failed checks listed below the table; `--json` has all."""


def text(verdict: Verdict) -> str:
    """A verdict for the terminal, without a trailing newline."""
    lines = [verdict.sentence, "", f"arm      {shown(verdict.arm)}", f"control  {shown(verdict.control)}"]
    if verdict.tier != "T0":
        lines.append(f"admits   {verdict.admissible}")
    lines += ["", *table(HEAD, [_row(verdict, finding) for finding in verdict.evidence])]
    failed = [finding for finding in verdict.findings if finding not in verdict.evidence]
    if failed and verdict.tier != "T0":
        lines += ["", f"first of {len(verdict.findings)} checks that did not pass:"]
        lines += table(HEAD, [_row(verdict, finding) for finding in verdict.findings[:LISTED]])
    alone = [verdict.script] if verdict.script else []
    return "\n".join([*lines, "", *_next([*verdict.commands, *alone])])


def study_text(study: StudyVerdict) -> str:
    """A study's verdicts for the terminal: a row an arm, then the sentence of each that did not pass."""
    if not study.arms:
        return f"{study.outcome.value}: study {study.study} has no arm to hold against its control."
    lines = [f"{study.outcome.value}: study {study.study}, {len(study.arms)} comparisons"]
    if study.question:
        lines.append(study.question)
    rows = [(shown(arm.arm), shown(arm.control), arm.outcome.value, arm.tier, _farthest(arm)) for arm in study.arms]
    lines += ["", *table(("arm", "control", "verdict", "tier", "farthest out"), rows)]
    lines += [line for each in study.seeds for line in ("", each.sentence)]
    failed = [arm for arm in study.arms if arm.exit_code != 0]
    lines += [line for arm in failed for line in ("", arm.sentence, *_next([arm.script] if arm.script else []))]
    return "\n".join([*lines, "", *_next(_study_commands(study, failed))])


def _study_commands(study: StudyVerdict, failed: Sequence[Verdict]) -> list[str]:
    """The first commands of the arms that did not pass; for stale or unfinished ones the study itself again."""
    if any(finding.check == "whole record" for arm in failed for finding in arm.findings):
        return [f"python run.py -m study={study.study} launch.rerun=stale"]
    return list(dict.fromkeys(command for arm in failed or study.arms for command in arm.commands[:1]))[:2]


HEAD = ("tier", "check", "step", "tensor", "observed", "allowed", "of", "")


def _row(verdict: Verdict, finding: Finding) -> tuple[str, ...]:
    owed = verdict.admissible.startswith("T1")
    marks = BITS if finding.tier == "T1" and not owed else MARKS
    return (
        finding.tier,
        finding.check,
        "" if finding.step is None else str(finding.step),
        finding.tensor or "",
        _value(finding.observed),
        _value(finding.allowed),
        str(finding.count),
        marks[finding.grade],
    )


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.2e}"


def _farthest(verdict: Verdict) -> str:
    rows = [finding for finding in verdict.evidence if not isinstance(finding.observed, str)]
    if not rows:
        return verdict.findings[0].check if verdict.findings else "equal bits"
    row = max(rows, key=lambda finding: finding.ratio)
    if row.ratio == 0.0:
        return "nothing"
    return f"{row.check}: {percent(row.ratio)} of what rounding explains"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns padded to their widest entry, two spaces apart; a rule below the head."""
    everything = [tuple(head), *rows]
    widths = [max(len(row[column]) for row in everything) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in everything
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _next(commands: Sequence[str]) -> list[str]:
    return [f"next: {command}" for command in commands]
