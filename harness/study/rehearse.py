"""Check of resuming: a run interrupted after some step and resumed, against the same run uninterrupted.

Both parts are run anew by `run.py`, in a store below the run's. Under the same layout every logged number must have the
same bits, for any `numerics`: the same ranks do the same arithmetic. Under another layout only numerics=exact promises
that, and anything else is refused.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.config.errors import refuse
from harness.config.schema import Backend
from harness.config.words import quote
from harness.launch.local.ranks import log_tail
from harness.launch.room import kept_by, require
from harness.store import checksums, provenance, status
from harness.store.errors import Busy
from harness.store.fields import compared
from harness.store.files import Lock
from harness.store.metrics import read_metrics
from harness.store.reading import checked
from harness.store.rundir import CONFIG, RunDir, Store, read_summary
from harness.store.screen import counted
from harness.store.status import State
from harness.study.replay import replay

PREEMPTED = 75
WEIGHTS = {"initial_weights": str, "final_weights": str}


@dataclass(frozen=True)
class Rehearsal:
    """Result of a rehearsal.

    differences: one sentence each, the earliest step first. numbers: compared numbers over `steps` lines. interrupted,
    resumed: run directories of the two parts (the same under the same layout).
    """

    preempt_at: int
    interrupted: Path
    resumed: Path
    steps: int
    numbers: int
    differences: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return not self.differences

    def as_json(self) -> dict[str, Any]:
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
    """Interrupt, resume, compare.

    Args: run: the uninterrupted one, done. root: store above both parts. preempt_at: last step before the interruption.
    changes: overrides of another layout. tell: progress.

    Raises `BadRequest`: the run is not done, is stale, lacks such a step, cannot be composed, owes no bits, or does not
    fit the disk. `Busy`: another process rehearses the same.
    """
    _check(run, preempt_at, changes)
    folder = Store(root).root / ".rehearsals"
    store = folder / f"{run.signature()[:8]}-{preempt_at}"
    folder.mkdir(parents=True, exist_ok=True)
    lock = Lock.acquire(folder / f"{store.name}.lock")
    if lock is None:
        raise Busy(f"another process rehearses in {store}; wait for it")
    with lock:
        shutil.rmtree(store, ignore_errors=True)
        again = ("--from", str(run.path))
        begin = (*ALONE, f"launch.preempt_at={preempt_at}")
        parts: list[tuple[Sequence[str], Path]] = [(begin, store / "interrupted")]
        if changes:
            parts.append(((*ALONE, "launch.preempt_at=0", *changes), store / "resumed"))
        _check_room(run, parts, root)
        tell(f"training to step {preempt_at} and stopping")
        _call([*again, *begin], store / "interrupted", PREEMPTED)
        first = _only_run(store / "interrupted")
        tell(f"resuming with {' '.join(changes)}" if changes else "resuming")
        words, where = parts[-1]
        _call([*again, *words, *([f"ckpt.load={quote(str(first / 'ckpt'))}"] if changes else [])], where, 0)
        return _compared(run, first, _only_run(where), preempt_at)


ALONE = ("ckpt.policy=last", "wandb.mode=disabled", "launch.inline=false", "launch.rerun=never")
"""Overrides of both parts: they save, and have no copy, because the run's own has the same id."""


def _check(run: RunDir, preempt_at: int, changes: Sequence[str]) -> None:
    state, steps = status.effective(run.path), run.setting("train.steps")
    if state is None or state.state is not State.done:
        progress = "has not been started" if state is None else f"is {state.state.value}"
        raise refuse(run.name, f"{progress}: there is nothing whole to hold it against", fix="run it to its end first")
    if not 1 <= preempt_at < steps:
        raise refuse(
            f"--preempt-at {preempt_at}", f"is no step before the last of {steps}", choices=f"1 to {steps - 1}"
        )
    if run.setting("cluster.backend") != Backend.local.name:
        problem = "was made by a scheduler's job, and a rehearsal trains here and waits"
        fix = "run the same with cluster=local in a store of its own (launch.root=DIR), and rehearse that"
        raise refuse(run.name, problem, fix=fix)
    checksums.demand(run.path)
    origin, current = provenance.read(run.path), provenance.sources_digest()
    if origin.get("sources_digest") != current:
        problem = "was made by other sources than these: what differs could be theirs"
        raise refuse(run.name, problem, fix="run it again with launch.rerun=stale")
    if (made_on := origin.get("cpu_model", provenance.cpu_model())) != provenance.cpu_model():
        problem = f"was made on another processor, {made_on}: what differs could be this one's"
        raise refuse(run.name, problem, fix="run it again here with launch.rerun=always")
    if changes and (mode := run.setting("numerics.mode")) != "exact":
        problem = f"another layout owes the same bits only under numerics=exact, and this is {mode}"
        raise refuse(" ".join(changes), problem, fix="rehearse a run with numerics=exact, or leave the layout as it is")


def _check_room(run: RunDir, parts: Sequence[tuple[Sequence[str], Path]], root: Path) -> None:
    """Compose both parts before the first is trained, and check their disk space.

    Raises `BadRequest`: one of them cannot be composed, or they do not fit.
    """
    cells = [
        replay(run.config(), run.overrides(), [*words, "launch.dry_run=true", f"launch.root={quote(str(store))}"])
        for words, store in parts
    ]
    require(
        root,
        kept_by(cells),
        "what would be trained",
        subject=f"--root {root}",
        fix=f"--root A_FOLDER_WITH_ROOM, with {run.path} as the run",
    )


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
    ours, theirs = (checked(read_summary(each) or {}, WEIGHTS, str(each.summary)) for each in (resumed, run))
    found = []
    restored = ours.get("restored")
    if restored is None or restored["step"] != preempt_at:
        found.append(f"it went on from {restored and restored['step']}, not from step {preempt_at}")
    elif restored["wrong"]:
        are = "is" if len(restored["wrong"]) == 1 else "are"
        wrong = (
            f"{counted(len(restored['wrong']), 'tensor')} {are} not what was saved: {', '.join(restored['wrong'][:3])}"
        )
        found.append(f"before the first resumed update {wrong}")
    differing = (key for key in ("initial_weights", "final_weights") if ours[key] != theirs[key])
    return [*found, *(f"{key} differ: {ours[key][:12]}, uninterrupted {theirs[key][:12]}" for key in differing)]
