"""Garbage of a store: unfinished checkpoints and, on request, checkpoints. Never a record."""

from __future__ import annotations

import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.store import status
from harness.store.errors import StoreError
from harness.store.files import is_held
from harness.store.rundir import MARK, Store
from harness.store.screen import counted, size
from harness.store.study import done

SETTLED_S = 3600.0


def garbage(store: Store, *, checkpoints: bool = False) -> Iterator[tuple[Path, str]]:
    """Removable folders, each with a reason; nothing is touched.

    Args: checkpoints: also those of done runs, which cannot be resumed.

    Raises `StoreError`: the root lacks the mark of a store.
    """
    if not store.is_marked():
        raise StoreError(
            f"{store.root} is no store of runs: it has no file {MARK}; give the folder of launch.root as --root (a "
            "store of an older version gets its mark when a run is started in it)"
        )
    for run in store.runs():
        for path in run.checkpoints():
            old = path.suffix == ".tmp" and time.time() - path.lstat().st_mtime > SETTLED_S
            if old and not is_held(run.path / status.OWNER_LOCK):  # to write one may take long
                yield path, "left by a crash"
    for run in done(store.runs()) if checkpoints else ():
        for path in [] if run.ckpt.is_symlink() else run.checkpoints():
            if path.is_dir() and not path.is_symlink():
                yield path, "checkpoint of a run that is done"


def gc(store: Store, *, checkpoints: bool = False, apply: bool = False, say: Callable[[str], None] = print) -> None:
    """Print each item, remove it with `apply`, and print the sum. Raises `OSError`: one cannot be removed."""
    items = dict(garbage(store, checkpoints=checkpoints))
    total = 0
    for path, why in items.items():
        files = (each.lstat() for each in [path, *path.rglob("*")])
        total += (num_bytes := sum(each.st_size for each in files if stat.S_ISREG(each.st_mode)))
        say(f"{size(num_bytes):>9}  {path}  ({why})")
    for path in items if apply else ():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    verb = "removed" if apply else "could go; run again with --yes to remove"
    say(f"{counted(len(items), 'item')}, {size(total)} {verb}")
