"""A verdict in words: one sentence, the commands that come next, and what outcomes mean.

Printed commands are valid: steps exist, settings are known to the run, paths are quoted.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from harness.config.words import as_word
from harness.parity.alone.every_step import LOOKS, RECOMPUTED
from harness.parity.outcome import Finding, Grade, Outcome, Verdict, percent
from harness.parity.record import BOUNDS, IS_STALE, NOT_DONE, NOT_STARTED, Record
from harness.parity.tiers.comparable import is_one
from harness.parity.tiers.divergence import JUMPS
from harness.store.commands import request, shown, verb
from harness.store.rundir import CONFIG
from harness.store.screen import counted
from harness.store.status import FILE as STATUS


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
        commands=after_refusal(arm, control, differing),
    )


def _fact(fact: Finding) -> str:
    where = f" at step {fact.step}" if fact.step is not None else ""
    return f"{fact.check}{where} is {fact.observed} in the one and {fact.allowed} in the other"


def right_of(
    outcome: Outcome,
    arm: Record,
    control: Record,
    evidence: Sequence[Finding],
    resolution: float | None,
    looked_at: Mapping[str, Sequence[int]],
    followed: tuple[int, int],
) -> str:
    if outcome is Outcome.EQUAL:
        counts: Counter[str] = Counter()  # a check has a row for each step
        for row in evidence:
            counts[row.check.removesuffix(" bits")] += row.count if row.tier == "T1" and row.count > 1 else 0
        recorded = ", ".join(f"{count} {check}" for check, count in counts.items() if count)
        return f"agrees in every recorded bit ({recorded}, and the final weights)"
    reach = "" if resolution is None else f"; a wrong scale of {percent(resolution)} or more {RESOLVED}"
    steps = counted(arm.length, "step")
    seen = _looked_at(looked_at, arm.length, again=not is_one(arm, control)) + _followed(*followed)
    return f"differs by no more than rounding explains over {steps}{seen}{reach}"


RESOLVED = "in the gradients captured at step 1 would have shown"


def wrong_of(
    outcome: Outcome,
    findings: Sequence[Finding],
    besides: Callable[[Finding], Finding | None],
    right: Callable[[Finding], Sequence[int] | None],
    *,
    of_tensors: bool,
    again: Sequence[int],
    length: int,
) -> str:
    """Clause of a DIFFERENT or UNDECIDED verdict.

    Args: besides: another failure, which the first does not cause. right: steps in which the same was asked of the run
    that a finding accuses, which was right. again: steps worked out again, of all `length`.
    """
    grave = Grade.bad if outcome is Outcome.DIFFERENT else Grade.doubt
    first = next(finding for finding in findings if finding.grade is grave)
    clause = _clause(first, findings, of_tensors=of_tensors) + _since(first, findings, right(first))
    more = besides(first)
    if more is None:
        return clause + _nothing_else(findings, again, length)
    doubt = ", in doubt" if more.grade is Grade.doubt else ""
    told = _clause(more, findings, of_tensors=of_tensors) + _since(more, findings, right(more))
    return f"{clause}; and besides{doubt}, {told}"


def _nothing_else(findings: Sequence[Finding], again: Sequence[int], length: int) -> str:
    """Steps in which a known fault may hide another, said of one that is in all of them; else empty."""
    if not any(finding.explains_itself for finding in findings):
        return ""
    return f"; nothing else was found; {LOOKED_AT[RECOMPUTED]}: {_of_steps(again, length, named=NAMED_STEPS)}"


def _clause(first: Finding, findings: Sequence[Finding], *, of_tensors: bool) -> str:
    """Args: of_tensors: begin with a jump of a tensor in the same step, if a finding is about all of them."""
    alike = (f for f in findings if (f.step, f.stage, f.grade) == (first.step, first.stage, first.grade) and f.tensor)
    scales = (f.note for f in findings if f.step == first.step and f.check in SCALES and f.note)
    clause = describe(first, first if first.tensor else next(alike, first), first.note or next(scales, ""))
    begins = onset(first, findings) or (_tensor_of(first, findings) if of_tensors else None)
    return clause if begins is None else f"{describe(begins, begins, '')}; certain {clause}"


def _since(first: Finding, findings: Sequence[Finding], right: Sequence[int] | None) -> str:
    """Where a finding may have begun whose check looks at some steps only, if nothing else tells.

    Args: right: steps in which the same was asked of the same run, which was right; None if that is not known.
    """
    if right is None or not first.step or onset(first, findings) is not None:
        return ""
    before = max((step for step in right if step < first.step), default=0)
    if before == first.step - 1:
        return ""
    done = "worked out again" if first.check == LOOKS[RECOMPUTED].check else "looked at"
    if not before:
        return f"; begun at any step so far: none before it was {done}, and right"
    return f"; begun after step {before}, the last one {done}, and right, before it"


def _tensor_of(first: Finding, findings: Sequence[Finding]) -> Finding | None:
    """Jump of a tensor that tells where a finding about all of them began, in the same step."""
    same = (f for f in findings if f.check in JUMPS and f.step == first.step and set(f.stages) & set(first.stages))
    return None if first.tensor else next((f for f in same if f.tensor), None)


def _looked_at(steps: Mapping[str, Sequence[int]], length: int, *, again: bool = True) -> str:
    """Args: again: say of steps that were worked out again, also if there are none."""
    every = [word for name, word in LOOKED_AT.items() if len(steps.get(name, ())) == length]
    clauses = [f"looked at in both at every step, and right: {', '.join(every)}"] if every else []
    for name, word in LOOKED_AT.items():
        found = steps.get(name, ())
        if word not in every and (found or (name == RECOMPUTED and again)):
            clauses.append(f"{word}: {_of_steps(found, length, named=NAMED_STEPS if name == RECOMPUTED else 1)}")
    return "".join(f"; {each}" for each in clauses)


def _followed(count: int, known: int) -> str:
    return f"; of tensors, {count} of {known} in every step" if 0 < count < known else ""


NAMED_STEPS = 8


def _of_steps(steps: Sequence[int], length: int, named: int) -> str:
    if len(steps) < 2:
        return f"at step {steps[0]} alone" if steps else "at no step"
    if len(steps) <= named:
        return f"at steps {', '.join(map(str, steps[:-1]))} and {steps[-1]} of {length}"
    return f"at {len(steps)} of {length} steps"


LOOKED_AT = {"fed": "what it was fed", **{name: look.words for name, look in LOOKS.items() if look.words}}


SCALES = ("scale of all gradients", "gradient scale")


def describe(first: Finding, named: Finding, hint: str) -> str:
    tensor = named.tensor
    where = f"at step {first.step}, " if first.step is not None else ""
    subject = f"{first.check} ({first.place}{f', first in {tensor}' if tensor else ''})"
    if isinstance(first.observed, str) or isinstance(first.allowed, str):
        measured = f"is {first.observed} against {first.allowed}"
    else:
        measured = f"is off by {percent(first.observed)} where rounding explains {percent(first.allowed)}"
    return f"{where}{subject} {measured}{f'; {hint}' if hint else ''}"


ALWAYS = "launch.rerun=always"

STEP_CHECKS = "measure.step_checks"


def after_refusal(arm: Record, control: Record, differing: Sequence[Finding]) -> tuple[str, ...]:
    """Commands that make two runs comparable; else the one that shows their differences."""
    if differing[0].check == BOUNDS:
        return (_again(control, "experiment=oracle", "mesh=one"),)
    ours = not (arm.is_watched or control.is_watched)
    unfit = [_renewed(run) if ours else verb(f"show {shown(run.path)}") for run in (arm, control) if run.problems]
    return tuple(unfit) or _shown_apart(arm, control)


def _shown_apart(arm: Record, control: Record) -> tuple[str, ...]:
    """The command that shows how two runs differ; of a baseline's file there is none."""
    if arm.is_baseline or control.is_baseline:
        return tuple(verb(f"show {shown(run.path)}") for run in (arm, control) if not run.is_baseline)
    return (verb(f"diff {shown(arm.path)} {shown(control.path)}"),)


def _renewed(run: Record) -> str:
    if any(each.startswith(f"{CONFIG} is") or f"/{STATUS} is" in each for each in run.problems):
        return verb(f"show {shown(run.path)}")
    said = " ".join(run.problems)
    if IS_STALE in said:
        return _again(run, "launch.rerun=stale")
    return _again(run, *([] if NOT_DONE in said or NOT_STARTED in said else [ALWAYS]))


def commands(outcome: Outcome, arm: Record, control: Record, findings: Sequence[Finding]) -> tuple[str, ...]:
    judge = verb(f"compare {shown(arm.path)} {shown(control.path)}")
    tensor = next((f for f in findings if f.tensor and f.step in arm.captures and f.step in control.captures), None)
    if tensor is not None and tensor.tensor in arm.captures[tensor.step or 1].tensors:
        step = f" --step {tensor.step}" if tensor.step != 1 else ""
        return (
            f"{judge} --tensor {shlex.quote(str(tensor.tensor))}{step}",
            *_deciding(outcome, arm, control, findings)[:1],
            *_shown_apart(arm, control),
        )
    return _deciding(outcome, arm, control, findings) or (f"{judge} --json",)


def _deciding(outcome: Outcome, arm: Record, control: Record, findings: Sequence[Finding]) -> tuple[str, ...]:
    """Requests of the first kind that may decide: of what was not captured, of step checks, of another seed."""
    runs, grave = (arm, control), Grade.bad if outcome is Outcome.DIFFERENT else Grade.doubt
    first = next((finding for finding in findings if finding.grade is grave), None)
    ours = not any(run.is_watched or run.is_baseline for run in runs)  # no request of ours makes another again
    if first is None or not ours or outcome not in (Outcome.DIFFERENT, Outcome.UNDECIDED):
        return ()
    if first.check == "resolution":
        keys = [key for key in arm.config if key.startswith("dtype.") and key != "dtype.name"]
        words = [f"{key}={as_word(arm.config[key])}" for key in keys if arm.config[key] != control.config.get(key)]
        return (_again(control, *words),) if words else ()
    step = min((onset(first, findings) or first).step or 1, arm.length)
    wanted, seed = {1, max(1, step - 1), step}, f"train.seed={int(arm.config['train.seed']) + 1}"
    ways = (
        [(run, capturing(run, wanted)) for run in runs if not wanted <= run.captures.keys()],
        [(run, f"{STEP_CHECKS}=true") for run in runs if run.stream is None and run.config.get(STEP_CHECKS) is False],
        [(run, seed) for run in runs if outcome is Outcome.UNDECIDED],
    )
    return tuple(_again(*each) for each in next(filter(None, ways), ()))


def onset(first: Finding, findings: Iterable[Finding]) -> Finding | None:
    """Earliest jump before `first` in a stage that may be its own; forwards are worked out again in few steps."""
    jumps = (f for f in findings if f.check in JUMPS and f.grade is not Grade.ok and set(f.stages) & set(first.stages))
    return min((f for f in jumps if (f.step or 0) < (first.step or 0)), key=lambda f: f.step or 0, default=None)


def capturing(run: Record, steps: Iterable[int]) -> str:
    wanted = ",".join(map(str, sorted({*steps, *run.config["measure.capture_steps"]})))
    return f'"measure.capture_steps=[{wanted}]"'


def _again(run: Record, *words: str) -> str:
    return request(f"--from {shown(run.path)} {' '.join(words)}")


OUTCOMES = {
    Outcome.EQUAL: "Every recorded bit agrees: by this, it is the same training.",
    Outcome.EQUIVALENT: "Bits differ, and rounding explains all that was recorded: by this, it is the same training.",
    Outcome.DIFFERENT: "Rounding cannot explain what is named here: another training, or one of the two runs is wrong.",
    Outcome.UNDECIDED: "It could be rounding or a fault, or too little was recorded; the next command may decide.",
    Outcome.NOT_COMPARABLE: "The two were not asked to train the same, or one is not whole; nothing was compared.",
}
