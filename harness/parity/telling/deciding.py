"""Next commands after a verdict: show the fault, or decide an open question.

Printed commands are valid: steps exist, settings are known to the run, paths are quoted.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from harness.parity.outcome import Finding, Grade, Outcome
from harness.parity.record import IS_STALE, NOT_DONE, NOT_STARTED, Record
from harness.parity.reference import BOUNDS
from harness.parity.tiers.divergence import JUMPS
from harness.store.commands import request, shown, verb
from harness.store.rundir import CONFIG

ALWAYS = "launch.rerun=always"

STEP_CHECKS = "measure.step_checks"


def after_refusal(arm: Record, control: Record, differing: Sequence[Finding]) -> tuple[str, ...]:
    """Commands that make two runs comparable; else the one that shows their differences."""
    if differing[0].check == BOUNDS:
        return (_again(control, "experiment=oracle", "mesh=one"),)
    if arm.is_watched or control.is_watched:
        unfit = [verb(f"show {shown(run.path)}") for run in (arm, control) if run.problems]
        return tuple(unfit) or (verb(f"diff {shown(arm.path)} {shown(control.path)}"),)
    commands = [_renewed(run) for run in (arm, control) if run.problems]
    return tuple(commands) or (verb(f"diff {shown(arm.path)} {shown(control.path)}"),)


def _renewed(run: Record) -> str:
    damaged = any(each.startswith((f"{CONFIG} was", f"{CONFIG} is")) for each in run.problems)
    return verb(f"show {shown(run.path)}") if damaged else _again(run, *_anew(run.problems))


def _anew(problems: Sequence[str]) -> tuple[str, ...]:
    if any(IS_STALE in each for each in problems):
        return ("launch.rerun=stale",)
    return () if any(NOT_DONE in each or NOT_STARTED in each for each in problems) else (ALWAYS,)


def commands(outcome: Outcome, arm: Record, control: Record, findings: Sequence[Finding]) -> tuple[str, ...]:
    judge = verb(f"compare {shown(arm.path)} {shown(control.path)}")
    tensor = next((f for f in findings if f.tensor and f.step in arm.captures and f.step in control.captures), None)
    if tensor is not None and tensor.tensor in arm.captures[tensor.step or 1].tensors:
        step = f" --step {tensor.step}" if tensor.step != 1 else ""
        return (
            f"{judge} --tensor {shlex.quote(str(tensor.tensor))}{step}",
            *_deciding(outcome, arm, control, findings)[:1],
            verb(f"diff {shown(arm.path)} {shown(control.path)}"),
        )
    return _deciding(outcome, arm, control, findings) or (f"{judge} --json",)


def _deciding(outcome: Outcome, arm: Record, control: Record, findings: Sequence[Finding]) -> tuple[str, ...]:
    grave = Grade.bad if outcome is Outcome.DIFFERENT else Grade.doubt
    first = next((finding for finding in findings if finding.grade is grave), None)
    if arm.is_watched or control.is_watched:  # another program: no request of ours makes it again
        return ()
    if outcome not in (Outcome.DIFFERENT, Outcome.UNDECIDED) or first is None:
        return ()
    if first.check == "resolution":
        return tuple(_same_dtype(arm, control))
    wanted = _steps(onset(first, findings) or first, arm)
    if missing := [run for run in (arm, control) if not wanted <= run.captures.keys()]:
        return tuple(_again(run, _capturing(run, wanted)) for run in missing)
    if silent := [run for run in (arm, control) if run.stream is None and run.config.get(STEP_CHECKS) is False]:
        return tuple(_again(run, f"{STEP_CHECKS}=true") for run in silent)
    if outcome is Outcome.UNDECIDED:
        seed = int(arm.config["train.seed"]) + 1
        return tuple(_again(run, f"train.seed={seed}") for run in (arm, control))
    return ()


def onset(first: Finding, findings: Iterable[Finding]) -> Finding | None:
    """Earliest jump before `first` in a stage that may be its own; forwards are worked out again in few steps."""
    jumps = (f for f in findings if f.check in JUMPS and f.grade is not Grade.ok and set(f.stages) & set(first.stages))
    return min((f for f in jumps if (f.step or 0) < (first.step or 0)), key=lambda f: f.step or 0, default=None)


def _steps(finding: Finding, run: Record) -> set[int]:
    step = min(finding.step or 1, run.length)
    return {1, max(1, step - 1), step}


def _capturing(run: Record, steps: Iterable[int]) -> str:
    wanted = ",".join(map(str, sorted({*steps, *run.config["measure.capture_steps"]})))
    return f'"measure.capture_steps=[{wanted}]"'


def _same_dtype(arm: Record, control: Record) -> Iterable[str]:
    keys = [key for key in arm.config if key.startswith("dtype.") and arm.config[key] != control.config.get(key)]
    words = [f"{key}={_word(arm.config[key])}" for key in keys if key != "dtype.name"]
    if words:
        yield _again(control, *words)


def _word(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _again(run: Record, *words: str) -> str:
    return request(f"--from {shown(run.path)} {' '.join(words)}")
