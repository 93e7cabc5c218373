"""Garbage of a store: unfinished checkpoints and, on request, checkpoints. Never a record."""

from __future__ import annotations

import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.store import status
from harness.store.errors import StoreError
from harness.store.files import is_held
from harness.store.reading import folder_names
from harness.store.rundir import MARK, Store
from harness.store.screen import counted, size
from harness.store.study import done

SETTLED_S = 3600.0


@dataclass(frozen=True)
class Item:
    path: Path
    why: str
    size: int
    """Bytes."""


def garbage(store: Store, *, checkpoints: bool = False) -> list[Item]:
    """Removable items; nothing is touched.

    Args: checkpoints: also those of done runs, which cannot be resumed.

    Raises `StoreError`: the root lacks the mark of a store.
    """
    if not store.is_marked():
        raise StoreError(
            f"{store.root} is no store of runs: it has no file {MARK}; give the folder of launch.root as --root (a "
            "store of an older version gets its mark when a run is started in it)"
        )
    return [*_unfinished(store), *(_checkpoints(store) if checkpoints else ())]


def gc(store: Store, *, checkpoints: bool = False, apply: bool = False, say: Callable[[str], None] = print) -> None:
    """Print each item, remove it with `apply`, and print the sum. Raises `OSError`: one cannot be removed."""
    items = garbage(store, checkpoints=checkpoints)
    for item in items:
        say(f"{size(item.size):>9}  {item.path}  ({item.why})")
    for path in (item.path for item in items if apply):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    verb = "removed" if apply else "could go; run again with --yes to remove"
    say(f"{counted(len(items), 'item')}, {size(sum(item.size for item in items))} {verb}")


def _item(path: Path, why: str) -> Item:
    files = (each.lstat() for each in [path, *path.rglob("*")])
    return Item(path, why, sum(each.st_size for each in files if stat.S_ISREG(each.st_mode)))


def _unfinished(store: Store) -> Iterator[Item]:
    for run in store.runs():
        for path in run.checkpoints():
            old = path.suffix == ".tmp" and time.time() - path.lstat().st_mtime > SETTLED_S
            if old and not is_held(run.path / status.OWNER_LOCK):  # to write one may take long
                yield _item(path, "left by a crash")


def _checkpoints(store: Store) -> Iterator[Item]:
    for run in done(store.runs()):
        ours = [path for path in run.checkpoints() if path.is_dir() and not path.is_symlink()]
        if not ours or run.ckpt.is_symlink():
            continue
        alone = len(ours) == len(folder_names(run.ckpt))
        for path in [run.ckpt] if alone else ours:
            yield _item(path, "checkpoints of a run that is done")
