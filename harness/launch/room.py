"""Disk space for all cells of a request together: each alone may fit (`config.rules.environment`), a study may not."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.config.compose import Cell
from harness.config.disk import Kept, free_bytes, kept
from harness.config.errors import BadRequest, Violation
from harness.launch.opening import Sources, look
from harness.launch.plan import Action
from harness.launch.slurm.scheduler import probe
from harness.store.rundir import Store
from harness.store.screen import counted, size

FIX = "launch.root=A_FOLDER_WITH_ROOM, ckpt=none, a smaller measure.capture_limit_mib, or fewer cells"


class NoRoom(BadRequest):
    """Requested runs exceed the free disk space."""


def check_room(cells: Sequence[Cell], *, further: int = 0, subject: str = "", fix: str = FIX) -> None:
    """Raises `NoRoom`: checkpoints and captures of these cells exceed the free disk space; nothing was started.

    Done and running cells, and files of earlier attempts, are deducted, but read only if the total would not fit.

    Args: further: number of later cells like the first. subject: setting of the store. fix: remedy.
    """
    store = Store(cells[0].config["launch"]["root"])
    more = [cells[0]] * further
    if kept_by([*cells, *more]).total <= free_bytes(store.root):
        return
    sources, jobs = Sources.gather(), probe()
    looked = [(cell, look(store, cell, sources, jobs)) for cell in cells]
    starting = [cell for cell, decision in looked if decision.starts]
    there = sum(held(store.path_of(cell)) for cell, decision in looked if decision.action is Action.start)
    follow = f", and about {further} more" if further and starting else ""
    require(
        store.root,
        kept_by([*starting, *(more if starting else ())]),
        f"what would start ({len(starting)} of {len(cells)} cells{follow})",
        there=there,
        subject=subject or f"launch.root={store.root}",
        fix=fix,
    )


def require(root: Path, need: Kept, what: str, *, subject: str, fix: str, there: int = 0) -> None:
    """Raises `NoRoom`: `need` bytes exceed the free space.

    Args: root: need not exist. what: name for messages. there: bytes already present.
    """
    free = free_bytes(root)
    if need.total - there > free:
        left = f", of which {size(there)} are there" if there else ""
        problem = f"has {size(free)} free, and {what} keeps at least {size(need.total)}{left}: {_listed(need)}"
        raise NoRoom([Violation(subject, problem, fix=fix)])


def say_room(store: Store, starting: Sequence[Cell]) -> str:
    need = kept_by(starting)
    keep = f"{counted(len(starting), 'run')} keep{'s' * (len(starting) == 1)}"
    return f"{keep} at least {size(need.total)}: {_listed(need)}; {store.root} has {size(free_bytes(store.root))} free"


def kept_by(cells: Iterable[Cell]) -> Kept:
    each = [kept(cell.typed) for cell in cells]
    return Kept(sum(one.checkpoints for one in each), sum(one.captures for one in each))


def held(folder: Path) -> int:
    found = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                file = os.lstat(os.path.join(where, name))
            except OSError:
                continue
            found += file.st_size if stat.S_ISREG(file.st_mode) else 0
    return found


def _listed(need: Kept) -> str:
    return f"checkpoints {size(need.checkpoints)}, captures {size(need.captures)}"
