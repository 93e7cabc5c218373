"""Verdicts as text: the sentence, the evidence as a table, the commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.config.words import ask_again
from harness.parity.outcome import Finding, Grade, StudyVerdict, Verdict, percent
from harness.parity.telling import explain
from harness.parity.telling.deciding import ALWAYS
from harness.parity.telling.usual import farthest
from harness.store import screen
from harness.store.commands import shown
from harness.store.labels import named
from harness.store.screen import fold

MARKS = {Grade.ok: "ok", Grade.doubt: "?", Grade.bad: "BAD"}
BITS = {Grade.ok: "ok", Grade.doubt: "?", Grade.bad: "differ"}
LISTED = 6


def text(verdict: Verdict, *, explained: bool = False) -> str:
    room = screen.width()
    lines = [*fold(verdict.sentence, room), *fold(explain.OUTCOMES[verdict.outcome], room)]
    lines += ["", f"arm      {shown(verdict.arm)}", f"control  {shown(verdict.control)}"]
    if verdict.tier != "T0":
        lines += fold(f"admits   {verdict.admissible}", room, " " * 9)
    lines += ["", *_findings(verdict, verdict.evidence, room)]
    failed = [finding for finding in verdict.findings if finding not in verdict.evidence]
    if failed and verdict.tier != "T0":
        first = f"first of {len(verdict.findings)} checks that" if len(verdict.findings) > 1 else "the one check that"
        lines += ["", f"{first} did not pass:"]
        lines += _findings(verdict, verdict.findings[:LISTED], room)
    if explained:
        lines += ["", *(line for each in explain.lines(verdict.evidence) for line in fold(each, room, "    "))]
    alone = [verdict.script] if verdict.script else []
    return "\n".join([*lines, "", *_next([*verdict.commands, *alone])])


def study_text(study: StudyVerdict, *, explained: bool = False) -> str:
    if not study.arms:
        return f"{study.outcome.value}: study {study.study} has no arm to hold against its control."
    room = screen.width()
    what = f"study {study.study}" if study.study else "runs held against one control"
    lines = [f"{study.outcome.value}: {what}, {screen.counted(len(study.arms), 'comparison')}"]
    if study.question:
        lines += fold(study.question, room)
    lines += fold(explain.OUTCOMES[study.outcome], room)
    lines += ["", *_arms(study, room)]
    lines += [line for each in study.seeds for line in ("", *fold(each.sentence, room))]
    failed = [arm for arm in study.arms if arm.exit_code != 0]
    lines += [
        line for arm in failed for line in ("", *fold(arm.sentence, room), *_next([arm.script] if arm.script else []))
    ]
    if explained:
        rows = [finding for arm in study.arms for finding in arm.evidence]
        lines += ["", *(line for each in explain.lines(rows) for line in fold(each, room, "    "))]
    return "\n".join([*lines, "", *_next(_study_commands(study, failed))])


def _arms(study: StudyVerdict, room: int) -> list[str]:
    texts = [("verdict", "tier", "of the bound"), *((a.outcome.value, a.tier, _farthest(a)[0]) for a in study.arms)]
    besides = sum(max(map(len, column)) + len(screen.GAP) for column in zip(*texts, strict=True))
    runs = {Path(path).name for arm in study.arms for path in (arm.arm, arm.control)}
    left = room - besides - len(screen.GAP) - screen.LEAST
    names = named(runs, left)
    breaks = () if max(len(names[Path(arm.arm).name]) for arm in study.arms) <= left else (1,)
    rows = {
        control: [
            (names[Path(arm.arm).name], arm.outcome.value, arm.tier, *_farthest(arm))
            for arm in study.arms
            if arm.control == control
        ]
        for control in dict.fromkeys(arm.control for arm in study.arms)
    }
    tables = [
        [
            *fold(f"control {names[Path(control).name]}", room, " " * 8),
            *screen.table(
                ("arm", "verdict", "tier", "of the bound", "farthest out"),
                each,
                room,
                flexible=(0, 4),
                folded=(4,),
                firm=(0,),
                breaks=breaks,
                rule=not breaks,
            ),
        ]
        for control, each in rows.items()
    ]
    lines = [line for each in tables for line in ("", *each)][1:]
    return [f"runs in {shown(Path(study.arms[0].arm).parent)}", *lines]


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
        _value(finding.observed),
        _value(finding.allowed),
        str(finding.count),
        marks[finding.grade],
    )


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.2e}"


def _farthest(verdict: Verdict) -> tuple[str, str]:
    found = farthest(verdict.evidence)
    if found is None:
        return "", verdict.findings[0].check if verdict.findings else "equal bits"
    return ("", "nothing") if found.ratio == 0.0 else (percent(found.ratio), found.text)


def _findings(verdict: Verdict, findings: Sequence[Finding], room: int) -> list[str]:
    rows = [row(verdict, each) for each in findings]
    ending = _ending([each[TENSOR] for each in rows])
    rows = [(*each[:TENSOR], each[TENSOR].removesuffix(ending), *each[TENSOR + 1 :]) for each in rows]
    return screen.table(HEAD, rows, room, flexible=(1, 3, 4, 5), folded=(1,))


TENSOR = HEAD.index("tensor")


def _ending(names: Sequence[str]) -> str:
    found = {f".{name.rpartition('.')[2]}" for name in names if "." in name}
    return found.pop() if len(found) == 1 and len({name for name in names if name}) > 1 else ""


def _next(commands: Sequence[str]) -> list[str]:
    return [f"next: {command}" for command in commands]
