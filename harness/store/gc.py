"""What a store no longer needs: leftovers of crashes, ended submissions and, if asked, checkpoints. Never a record."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.store import status
from harness.store.rundir import CONFIG, RunDir, Store
from harness.store.status import JobProbe, State

SETTLED_S = 3600.0
"""Age at which a leftover is nobody's any more."""

MOVING = frozenset({State.queued, State.running, State.preempted})


@dataclass(frozen=True)
class Item:
    """Something that can go."""

    path: Path
    why: str
    size: int
    """Bytes."""


def garbage(store: Store, jobs: JobProbe | None = None, *, checkpoints: bool = False) -> list[Item]:
    """What can be removed; nothing is touched.

    Args:
        store: where.
        jobs: asks the scheduler which submitted runs still live.
        checkpoints: also those of runs that are done: they cannot be resumed any more.
    """
    found = [*_temporary(store.root), *_half_made(store.root)]
    found += _submissions(store, jobs)
    if checkpoints:
        found += _checkpoints(store, jobs)
    return found


def remove(items: list[Item]) -> int:
    """Remove them; returns the bytes set free."""
    for item in items:
        if item.path.is_dir():
            shutil.rmtree(item.path, ignore_errors=True)
        else:
            item.path.unlink(missing_ok=True)
    return sum(item.size for item in items)


def gc(store: Store, jobs: JobProbe | None = None, *, checkpoints: bool = False, apply: bool = False) -> str:
    """Say what can go, or (`apply`) remove it; one line an item and the sum."""
    items = garbage(store, jobs, checkpoints=checkpoints)
    total = remove(items) if apply else sum(item.size for item in items)
    lines = [f"{item.size / 2**20:9.1f} MiB  {item.path}  ({item.why})" for item in items]
    verb = "removed" if apply else "could go; run again with --yes to remove"
    return "\n".join([*lines, f"{len(items)} items, {total / 2**20:.1f} MiB {verb}"])


def _old(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > SETTLED_S


def _item(path: Path, why: str) -> Item:
    files = path.rglob("*") if path.is_dir() else iter([path])
    return Item(path, why, sum(file.stat().st_size for file in files if file.is_file()))


def _temporary(root: Path) -> Iterator[Item]:
    for pattern in ("*/*/.*.tmp", "*/*/attempts/*/.*.tmp", "*/*/ckpt/*.tmp"):
        for path in sorted(root.glob(pattern)):
            if _old(path):
                yield _item(path, "left by a crash")


def _half_made(root: Path) -> Iterator[Item]:
    for path in sorted(root.glob("*/*/")):
        hidden = path.name.startswith(".") or path.parent.name.startswith(".")
        if not hidden and not (path / CONFIG).exists() and _old(path):
            yield _item(path, f"a run without {CONFIG}, left by a crash")


def _submissions(store: Store, jobs: JobProbe | None) -> Iterator[Item]:
    living = {
        found.submission
        for run in store.runs()
        if (found := status.effective(run.path, jobs)) is not None and found.state in MOVING
    }
    for path in sorted(store.root.glob("*/.submit/*")):
        if path.name not in living and _old(path):
            yield _item(path, "its submission has ended")


def _checkpoints(store: Store, jobs: JobProbe | None) -> Iterator[Item]:
    for run in store.runs():
        if run.ckpt.exists() and _is_done(run, jobs):
            yield _item(run.ckpt, "checkpoints of a run that is done")


def _is_done(run: RunDir, jobs: JobProbe | None) -> bool:
    found = status.effective(run.path, jobs)
    return found is not None and found.state is State.done
