"""States of a study's runs as a table, with failures grouped by reason."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.launch.slurm.scheduler import probe
from harness.launch.terminal import Terminal
from harness.store import provenance, screen, status
from harness.store.errors import StoreError
from harness.store.labels import named
from harness.store.results import results
from harness.store.rundir import RunDir, Store
from harness.store.status import MOVING, JobProbe, State

LEGIBLE = 24
OPTIONAL = frozenset({"held out", "tokens/s", "TFLOP/s", "MFU"})
"""Columns that are left out where no run has them."""


@dataclass(frozen=True)
class Row:
    name: str
    study: str
    state: str
    reason: str
    shown: Mapping[str, str]
    """Texts between name and reason, by the heads of their columns."""

    @property
    def bad(self) -> bool:
        return self.state in (State.failed, State.lost)


def columns(state: str, stale: bool, steps: int, so_far: Mapping[str, Any]) -> dict[str, str]:
    """Args: steps: of the whole run. so_far: its results; empty of a damaged one."""
    step, seconds = so_far.get("steps_done", 0), so_far.get("step_time_s")
    left_s = None if state != State.running or seconds is None else (steps - step) * seconds
    numbers: dict[str, tuple[float | None, Callable[[float], str]]] = {
        "loss": (so_far.get("final_loss"), "{:.4f}".format),
        "held out": (so_far.get("held_out_loss"), "{:.4f}".format),
        "ms/step": (seconds and 1e3 * seconds, "{:.0f}".format),
        "tokens/s": (so_far.get("tokens_per_s"), screen.quantity),
        "TFLOP/s": (so_far.get("tflops_per_rank"), "{:.3g}".format),
        "MFU": (so_far.get("mfu"), "{:.1%}".format),
        "left": (left_s, screen.duration),
    }
    texts = {head: "" if value is None else said(value) for head, (value, said) in numbers.items()}
    return {"state": state + ", stale" * stale, "step": f"{step}/{steps}", **texts}


def row(run: RunDir, jobs: JobProbe | None, digest: str) -> Row:
    try:
        found = status.effective(run.path, jobs)
        steps = (found.steps if found else 0) or run.setting("train.steps")
        so_far = results(run)
        stale = provenance.is_stale(run.path, digest)
    except (StoreError, OSError) as error:
        shown = columns("damaged", False, 0, {})
        return Row(run.path.name, run.path.parent.name, "damaged", str(error), shown)
    state, reason = ("new", "never started") if found is None else (found.state.value, found.reason)
    return Row(run.path.name, run.path.parent.name, state, reason, columns(state, stale, steps, so_far))


def rows(store: Store, study: str | None, jobs: JobProbe | None) -> list[Row]:
    """Rows of a study, or of all. Raises `StoreError`: there is no such study."""
    runs = store.runs(study)
    if not runs:
        known = ", ".join(store.studies()) or "none yet"
        raise StoreError(f"no runs{f' of study {study!r}' if study else ''} under {store.root}; studies: {known}")
    digest = provenance.sources_digest()
    return [row(run, jobs, digest) for run in runs]


def render(found: Sequence[Row], width: int) -> str:
    lines = _table(found, width)
    lines += [line for each in _groups(found) for line in screen.fold(each, width, " " * 6)]
    lines += screen.fold(_counts(one.state for one in found), width)
    return "\n".join(lines)


def _counts(states: Iterable[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(Counter(states).items()))


def _table(found: Sequence[Row], width: int) -> list[str]:
    kept = [head for head in found[0].shown if head not in OPTIONAL or any(one.shown[head] for one in found)]
    texts = [("run", *kept, "reason")]
    texts += [(one.name, *(one.shown[head] for head in kept), _reason(one)) for one in found]
    last = len(kept) + 1
    widths = [max(len(text[place]) for text in texts) for place in range(last + 1)]
    explained = any(text[last] for text in texts[1:])
    fixed = sum(len(screen.GAP) + each for each in widths[1:last])
    reason = explained * (len(screen.GAP) + min(LEGIBLE, widths[last]))
    labels, several = named({one.name for one in found}), len({one.study for one in found}) > 1
    names = [f"{one.study}/" * several + labels[one.name] for one in found]
    longest = max(map(len, names))
    breaks = (1,) if longest > width - fixed else (last,) if longest > width - fixed - reason else ()
    shown = slice(None) if explained else slice(last)
    head, *body = ((name, *text[1:])[shown] for name, text in zip(["run", *names], texts, strict=True))
    return screen.table(head, body, width, flexible=(last, 0), firm=(0,), breaks=breaks, rule=False)


def _reason(one: Row) -> str:
    """In one line; nothing of a run that is done: its steps stand beside it."""
    return "" if re.fullmatch(r"\d+ steps?", one.reason) else " ".join(one.reason.split())


def _groups(found: Iterable[Row]) -> list[str]:
    bad = [one for one in found if one.bad]
    groups: dict[str, list[str]] = {}
    for one in bad:
        key = re.sub(r"^rank \d+: ", "", one.reason.splitlines()[0] if one.reason else "no reason")
        groups.setdefault(re.sub(r"0x[0-9a-f]+|\d+", "N", key), []).append(one.reason)
    ordered = sorted(groups.values(), key=len, reverse=True)
    return ["", "failures:", *(f"  {len(reasons)} x {reasons[0]}" for reasons in ordered), ""] if bad else [""]


REDRAW_S = 2.0
CLEAR = "\x1b[H\x1b[J"


def watch(store: Store, study: str | None = None, *, follow: bool = False) -> list[Row]:
    """Print the table; with `follow` anew on a cleared screen until no run moves. Returns its last rows."""
    while True:
        found = rows(store, study, probe())
        print(render(found, screen.width()), flush=True)
        if not (follow and any(one.state in MOVING for one in found)):
            return found
        time.sleep(REDRAW_S)
        screen.plain(sys.stdout).write(CLEAR)


WAIT_S = 5.0
CODES: Mapping[str, int] = {State.done: 0, State.cancelled: 130}


def wait_for(runs: Sequence[RunDir], terminal: Terminal) -> list[int]:
    """Wait until every run has ended (launch.wait=true), with messages on changes; returns their exit codes.

    Ctrl-C ends the waiting, not the jobs.
    """
    shown = ""
    while True:
        jobs = probe()
        states = [row(run, jobs, "").state for run in runs]
        text = _counts(states)
        if text != shown:
            terminal.line(text)
            shown = text
        if not any(state in MOVING for state in states):
            return [CODES.get(state, 1) for state in states]
        time.sleep(WAIT_S)
