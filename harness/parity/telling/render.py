"""Verdicts as text: the sentence, the evidence as a table, the commands; for pull requests as Markdown and JUnit.

Some bounds are wide and some are tight: a sampled update is at half of its bound in every clean pair, a gradient's
distance in fp32 at a hundredth. `usual.json` has each check's largest share of its bound in clean pairs; an arm is far
out where its share is a large multiple of that. `benchmarks/pages/usual_ratios.py` makes the table."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

from harness.config.errors import refuse
from harness.config.words import ask_again
from harness.parity.outcome import REFUTED, Finding, Grade, Outcome, StudyVerdict, Verdict, grade, percent
from harness.parity.record import load
from harness.parity.telling.wording import ALWAYS, OUTCOMES, capturing
from harness.parity.tiers.arithmetic import of_piece
from harness.parity.tiers.envelope import Envelope
from harness.parity.tiers.gradients import compare_tensor
from harness.store import checksums, commands, screen
from harness.store.commands import shown
from harness.store.labels import named
from harness.store.screen import fold

MARKS = {Grade.ok: "ok", Grade.doubt: "?", Grade.bad: "BAD"}
BITS = {Grade.ok: "ok", Grade.doubt: "?", Grade.bad: "differ"}
LISTED = 6


def text(verdict: Verdict) -> str:
    room = screen.width()
    lines = [*fold(verdict.sentence, room), *fold(OUTCOMES[verdict.outcome], room)]
    lines += ["", f"arm      {shown(verdict.arm)}", f"control  {shown(verdict.control)}"]
    if verdict.tier != "T0":
        lines += fold(f"admits   {verdict.admissible}", room, " " * 9)
    lines += ["", *_findings(verdict, verdict.evidence, room)]
    failed = [finding for finding in verdict.findings if finding not in verdict.evidence]
    if failed and verdict.tier != "T0":
        first = f"first of {len(verdict.findings)} checks that" if len(verdict.findings) > 1 else "the one check that"
        lines += ["", f"{first} did not pass:"]
        lines += _findings(verdict, verdict.findings[:LISTED], room)
    alone = [verdict.script] if verdict.script else []
    return "\n".join([*lines, "", *_next([*verdict.commands, *alone])])


def study_text(study: StudyVerdict) -> str:
    if not study.arms:
        return f"{study.outcome.value}: study {study.study} has no arm to hold against its control."
    room = screen.width()
    what = f"study {study.study}" if study.study else "runs held against one control"
    lines = [f"{study.outcome.value}: {what}, {screen.counted(len(study.arms), 'comparison')}"]
    if study.question:
        lines += fold(study.question, room)
    lines += fold(OUTCOMES[study.outcome], room)
    lines += ["", *_arms(study, room)]
    lines += [line for each in study.seeds for line in ("", *fold(each.sentence, room))]
    failed = [arm for arm in study.arms if arm.exit_code != 0]
    lines += [
        line for arm in failed for line in ("", *fold(arm.sentence, room), *_next([arm.script] if arm.script else []))
    ]
    return "\n".join([*lines, "", *_next(_study_commands(study, failed))])


BESIDES = 50
"""Room of a table of arms beside their names: four columns, of which the last is folded."""


def _arms(study: StudyVerdict, room: int) -> list[str]:
    left = room - BESIDES
    names = named({Path(path).name for arm in study.arms for path in (arm.arm, arm.control)})
    breaks = () if max(map(len, names.values())) <= left else (1,)
    lines = [f"runs in {shown(Path(study.arms[0].arm).parent)}"]
    head = ("arm", "verdict", "tier", "of the bound", "farthest out")
    for control in dict.fromkeys(arm.control for arm in study.arms):
        rows = [
            (names[Path(arm.arm).name], arm.outcome.value, arm.tier, *_farthest(arm))
            for arm in study.arms
            if arm.control == control
        ]
        lines += ["", *fold(f"control {names[Path(control).name]}", room, " " * 8)]
        lines += screen.table(head, rows, room, flexible=(0, 4), folded=(4,), firm=(0,), breaks=breaks, rule=not breaks)
    return lines


def _study_commands(study: StudyVerdict, failed: Sequence[Verdict]) -> list[str]:
    if study.study and any(finding.check == "whole record" for arm in failed for finding in arm.findings):
        if anew := [command for arm in failed for command in arm.commands if ALWAYS in command]:
            return list(dict.fromkeys(anew))[:2]
        root = Path(study.arms[0].arm).parents[1]
        return [ask_again(root, study.study, "launch.rerun=stale")]
    return list(dict.fromkeys(command for arm in failed or study.arms for command in arm.commands[:1]))[:2]


HEAD = ("tier", "check", "step", "tensor", "observed", "allowed", "of", "")


def row(verdict: Verdict, finding: Finding) -> tuple[str, ...]:
    owed = verdict.admissible.startswith("T1")
    marks = BITS if finding.tier == "T1" and not owed else MARKS
    return (
        finding.tier,
        finding.check,
        "" if finding.step is None else str(finding.step),
        finding.tensor or "",
        *(each if isinstance(each, str) else f"{each:.2e}" for each in (finding.observed, finding.allowed)),
        str(finding.count),
        marks[finding.grade],
    )


def _farthest(verdict: Verdict) -> tuple[str, str]:
    ratio, said = used(verdict)
    return ("", "nothing") if ratio == 0.0 else ("" if ratio is None else percent(ratio), said)


def used(verdict: Verdict) -> tuple[float | None, str]:
    """Share of its bound that the farthest check used up, and the check; no share without measurements."""
    said = verdict.findings[0].check if verdict.findings else "equal bits"
    return farthest(verdict.evidence) or (None, said)


def _findings(verdict: Verdict, findings: Sequence[Finding], room: int) -> list[str]:
    return screen.table(HEAD, [row(verdict, each) for each in findings], room, flexible=(1, 3, 4, 5), folded=(1,))


def _next(commands: Sequence[str]) -> list[str]:
    return [f"next: {command}" for command in commands]


TABLE = Path(__file__).with_name("usual.json")

LEAST = 1e-3
"""Least usual share: where clean pairs agree in every bit, less than this is not far."""


@cache
def shares() -> Mapping[str, float]:
    """Largest share of its bound in clean pairs, by check."""
    found: Mapping[str, float] = json.loads(TABLE.read_text(encoding="utf-8"))["shares"]
    return found


def farthest(evidence: Sequence[Finding]) -> tuple[float, str] | None:
    """The measured check that is farthest out for this pair; None without measurements. A failed one comes first.

    Returns its share of its bound (1 is the bound), and its name with the multiple of the largest share in clean pairs.
    """
    measured = [row for row in evidence if not isinstance(row.observed, str) and not isinstance(row.allowed, str)]
    if not measured:
        return None
    known = shares()
    grades = [Grade.ok, Grade.doubt, Grade.bad]

    def beyond(row: Finding) -> tuple[int, float]:
        return grades.index(row.grade), row.ratio / max(known.get(row.check, 1.0), LEAST)

    row = max(measured, key=beyond)
    times = f", {percent(beyond(row)[1])} of the most in clean pairs" if row.check in known else ""
    return row.ratio, row.check + times


MOST = 20
"""Listed checks that did not pass, beside the worst of each kind."""


def markdown(verdict: Verdict, title: str) -> str:
    """A heading, and the verdict's text in a block, which shows names verbatim, whatever is in them."""
    told = screen.visible(f"{title}\n\n{text(verdict)}")
    fence = "`" * (1 + max([2, *(len(run) for run in re.findall(r"`+", told))]))
    return f"## {verdict.outcome.value}\n\n{fence}\n{told}\n{fence}\n"


def junit(verdict: Verdict, title: str) -> str:
    """A test for the verdict, and one for each check that was made.

    A doubt is a failure, as it is by the exit code; what could not be compared is an error.
    """
    wrong = "error" if verdict.outcome is Outcome.NOT_COMPARABLE else "failure"
    cases = [(title, verdict.sentence if verdict.exit_code else "")]
    for each in _listed(verdict):
        tier, check, step, tensor, observed, allowed, *_ = row(verdict, each)
        failed = each.grade is not Grade.ok and verdict.exit_code
        problem = f"{observed} where {allowed} is allowed; {each.note}".rstrip("; ") if failed else ""
        cases.append((f"{tier} {check}{f' (step {step})' * bool(step)} {tensor}".rstrip(), problem))
    failures = str(sum(bool(problem) for _, problem in cases))
    suite = ElementTree.Element("testsuite", {"name": title, "tests": str(len(cases)), f"{wrong}s": failures})
    for name, problem in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=title, name=name)
        if problem:
            ElementTree.SubElement(case, wrong, message=problem)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _listed(verdict: Verdict) -> list[Finding]:
    """Checks that did not pass, and the worst of each kind; not of bits that nobody owes."""
    owed = verdict.admissible.startswith("T1") or verdict.tier == "T0"
    failed = [each for each in verdict.findings if each not in verdict.evidence]
    return [*failed[:MOST], *(each for each in verdict.evidence if owed or each.tier != "T1" or each.grade is Grade.ok)]


VALUES = 3


def zoom(arm: Path, control: Path, tensor: str, *, step: int = 1) -> str:
    """Text about one tensor of two runs, with its worst piece and that one's first values.

    Args: step: captured by both. A piece of a step after the first, whose bounds grow, is in doubt at most.

    Raises `BadRequest`: the capture or tensor is missing. `StoreError`: no run, or damaged.
    """
    for path in (arm, control):
        checksums.demand(Path(path))
    left, right = load(Path(arm)), load(Path(control))
    for run in (left, right):
        if step not in run.captures:
            held = ", ".join(map(str, sorted(run.captures))) or "none"
            fix = commands.request(f"--from {commands.shown(run.path)} {capturing(run, [step])}")
            raise refuse(f"--step {step}", f"{run.name} did not capture it", choices=held, fix=fix)
        if tensor not in run.captures[step].tensors:
            choices = ", ".join(sorted(run.captures[step].tensors))
            raise refuse(f"--tensor {tensor}", f"{run.name} has no such tensor at step {step}", choices=choices)
    pair = compare_tensor(tensor, left.captures[step], right.captures[step])
    envelope = Envelope.of(left, right)
    whole = envelope.tensor(tensor, pair.numel)
    allowed, of_block = envelope.scale(pair.standard_error, pair.residual), of_piece(whole, pair.block.size)
    refuted = math.inf if step > 1 or envelope.flips else REFUTED * of_block
    lines = [
        f"{tensor} at step {step}, {pair.numel} elements, norm {pair.norm:.6g} in the control",
        f"distance  {percent(pair.distance)} of the norm; rounding explains {percent(whole)} at step 1",
        f"factor    {1 + pair.b:.6g}, give or take {allowed:.1e}; what no factor explains: {percent(pair.residual)}",
        f"worst     {pair.where}, off by {percent(pair.block.distance)}: "
        f"{MARKS[grade(pair.block.distance, of_block, refuted)]}",
    ]
    begins = slice(pair.block.start, pair.block.start + VALUES)
    for what, run in (("arm", left), ("control", right)):
        values = run.captures[step].values(tensor).ravel()[begins]
        lines.append(f"{what:9} {' '.join(f'{value:+.5e}' for value in values)} ...")
    return "\n".join(lines)
