"""The resume oracle: a run interrupted after some step, gone on with, and held against the same run uninterrupted.

Both parts are run anew by `run.py`, in a store of their own below the run's. Under the same layout every logged number
must have the same bits, whatever `numerics` promises elsewhere: the same ranks do the same arithmetic. Under another
layout that is owed only by numerics=exact, and anything else is refused.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.errors import refuse
from harness.config.overrides import quote
from harness.launch.local.ranks import log_tail
from harness.store import provenance, status
from harness.store.fields import compared
from harness.store.metrics import read_metrics
from harness.store.rundir import CONFIG, RunDir
from harness.store.status import State

PREEMPTED = 75


@dataclass(frozen=True)
class Rehearsal:
    """What became of it.

    differences: one sentence each, the earliest step first. numbers: logged numbers that were compared, over `steps`
    lines. interrupted, resumed: the run directories of the two parts (the same one under the same layout).
    """

    preempt_at: int
    interrupted: Path
    resumed: Path
    steps: int
    numbers: int
    differences: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "equal": self.equal,
            "preempt_at": self.preempt_at,
            "steps": self.steps,
            "numbers": self.numbers,
            "differences": list(self.differences),
            "interrupted": str(self.interrupted),
            "resumed": str(self.resumed),
        }


def rehearse(
    run: RunDir, root: Path, preempt_at: int, changes: Sequence[str], tell: Callable[[str], None]
) -> Rehearsal:
    """Interrupt, go on, compare.

    Args:
        run: the uninterrupted one, done. root: of its store. preempt_at: the last step before the interruption.
        changes: overrides for the second part: another layout. tell: is told what is under way.

    Raises:
        BadRequest: the run is not done, has other sources, or has no such step; or another layout owes no bits here.
    """
    config = run.config()
    _check(run, config, preempt_at, changes)
    store = root / ".rehearsals" / f"{run.signature()[:8]}-{preempt_at}"
    shutil.rmtree(store, ignore_errors=True)
    begin = ["--from", str(run.path), "ckpt=last", f"launch.preempt_at={preempt_at}"]
    tell(f"training to step {preempt_at}, and stopping there")
    _call(begin, store / "interrupted", PREEMPTED)
    first = _only_run(store / "interrupted")
    resumed = first
    if changes:
        tell(f"going on as {' '.join(changes)}")
        words = ["--from", str(run.path), "ckpt=last", f"ckpt.load={quote(str(first / 'ckpt'))}", *changes]
        _call(words, store / "resumed", 0)
        resumed = _only_run(store / "resumed")
    else:
        tell("going on")
        _call(begin, store / "interrupted", 0)
    return _compared(run, first, resumed, preempt_at)


def _check(run: RunDir, config: Mapping[str, Any], preempt_at: int, changes: Sequence[str]) -> None:
    state, steps = status.effective(run.path), config["train"]["steps"]
    if state is None or state.state is not State.done:
        told = "has not been started" if state is None else f"is {state.state.value}"
        raise refuse(run.name, f"{told}: there is nothing whole to hold it against", fix="run it to its end first")
    if not 1 <= preempt_at < steps:
        raise refuse(
            f"--preempt-at {preempt_at}", f"is no step before the last of {steps}", choices=f"1 to {steps - 1}"
        )
    recorded, current = provenance.read(run.path).get("sources_digest"), provenance.sources_digest()
    if recorded != current:
        problem = "was made by other sources than these: what differs could be theirs"
        raise refuse(run.name, problem, fix="run it again with launch.rerun=stale")
    if changes and config["numerics"]["mode"] != "exact":
        problem = (
            f"another layout owes the same bits only under numerics=exact, and this is {config['numerics']['mode']}"
        )
        raise refuse(" ".join(changes), problem, fix="rehearse a run with numerics=exact, or leave the layout as it is")


def _call(words: Sequence[str], store: Path, expected: int) -> None:
    store.mkdir(parents=True, exist_ok=True)
    log = store / "rehearsal.log"
    script = provenance.ROOT / "run.py"
    with log.open("ab") as output:
        command = [sys.executable, str(script), *words, f"launch.root={quote(str(store))}"]
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code != expected:
        raise refuse("the rehearsal", f"ended with exit code {code}, not {expected}; {log} ends:\n{log_tail(log)}")


def _only_run(store: Path) -> Path:
    return next(path.parent for path in store.glob(f"*/*/{CONFIG}"))


def _compared(run: RunDir, first: Path, resumed: Path, preempt_at: int) -> Rehearsal:
    right = {line["step"]: line for line in read_metrics(run.metrics)}
    held = {line["step"]: line for line in read_metrics(RunDir(first).metrics) if line["step"] <= preempt_at}
    held |= {line["step"]: line for line in read_metrics(RunDir(resumed).metrics) if line["step"] > preempt_at}
    differences, numbers = [], 0
    for step in sorted(right.keys() | held.keys()):
        if step not in held or step not in right:
            differences.append(f"step {step} is only in {'the uninterrupted run' if step in right else 'the other'}")
            continue
        mine, whole = compared(held[step]), compared(right[step])
        for key in sorted(mine.keys() | whole.keys()):
            numbers += 1
            ours, theirs = mine.get(key), whole.get(key)
            if json.dumps(ours) != json.dumps(theirs):  # bit for bit: a float's repr round-trips, and NaN equals NaN
                differences.append(f"step {step}: {key} is {ours}, uninterrupted {theirs}")
    differences += _ends(run, RunDir(resumed), preempt_at)
    return Rehearsal(preempt_at, first, resumed, len(right), numbers, tuple(differences))


def _ends(run: RunDir, resumed: RunDir, preempt_at: int) -> list[str]:
    ours, theirs = (json.loads(each.summary.read_text(encoding="utf-8")) for each in (resumed, run))
    found = []
    restored = ours.get("restored")
    if restored is None or restored["step"] != preempt_at:
        found.append(f"it went on from {restored and restored['step']}, not from step {preempt_at}")
    elif restored["wrong"]:
        found.append(f"before the first resumed update {len(restored['wrong'])} tensors are not what was saved:"
                     f" {', '.join(restored['wrong'][:3])}")  # fmt: skip
    differing = (key for key in ("initial_weights", "final_weights") if ours[key] != theirs[key])
    return [*found, *(f"{key} differ: {ours[key][:12]}, uninterrupted {theirs[key][:12]}" for key in differing)]
