"""Folders of a run's checkpoints: list, check, publish, keep the newest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from harness.checkpoint.manifest import Damaged, FileEntry, Manifest
from harness.store import checksums
from harness.store.errors import StoreError
from harness.store.files import private_folder

PREFIX, UNFINISHED, REPLACED = "step-", ".tmp", ".old"


def path_of(folder: Path, step: int) -> Path:
    return folder / f"{PREFIX}{step:06d}"


def steps(folder: Path) -> list[int]:
    names = (path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*"))
    found = {name: int(name) for name in names if name.isascii() and name.isdigit()}
    return sorted(step for name, step in found.items() if f"{PREFIX}{name}" == path_of(folder, step).name)


def begin(folder: Path, step: int) -> None:
    unfinished = path_of(folder, step).with_suffix(UNFINISHED)
    for left in folder.glob(f"{PREFIX}*{UNFINISHED}"):
        shutil.rmtree(left, ignore_errors=True)
    private_folder(folder)
    unfinished.mkdir()


def publish(unfinished: Path) -> None:
    final = unfinished.with_suffix("")
    flush(unfinished)
    replaced = final.with_suffix(REPLACED)
    if final.exists():
        os.rename(final, replaced)
    os.rename(unfinished, final)
    flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def keep_newest(folder: Path, count: int, saved: int, best: Iterable[int] = ()) -> None:
    """Delete all but the newest `count` checkpoints up to `saved` and those of the steps `best`, and leftovers of torn
    saves.

    Later ones go too: a run that saves `saved` resumed from before them because they are damaged.
    """
    kept = [step for step in steps(folder) if step <= saved][-count:]
    for step in set(steps(folder)) - {*kept, *best}:
        shutil.rmtree(path_of(folder, step), ignore_errors=True)
    for suffix in (UNFINISHED, REPLACED):
        for left in folder.glob(f"{PREFIX}*{suffix}"):
            shutil.rmtree(left, ignore_errors=True)


def flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damage(path: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Damage of these files, one sentence each; reads every byte."""
    found = []
    for name in names:
        right = manifest.files[name]
        try:
            held = FileEntry(**checksums.of_file(path / name))
        except FileNotFoundError:
            found.append(f"{name} is missing")
            continue
        except (OSError, StoreError) as error:
            found.append(f"{name} cannot be read: {str(error).partition('; ')[0]}")
            continue
        if held.bytes != right.bytes:
            found.append(f"{name} has {held.bytes} bytes, {right.bytes} were written")
        elif held.xxh3 != right.xxh3:
            found.append(f"{name} was changed: its checksum does not fit")
    return found


def read_verified(path: Path) -> Manifest:
    """Manifest of a checkpoint, all bytes of which were checked, in one process. Raises `Damaged`."""
    manifest = Manifest.read(path)
    if wrong := damage(path, manifest, manifest.files):
        raise Damaged(f"{path}: {'; '.join(wrong)}")
    return manifest


def newest_intact(folder: Path) -> Path | None:
    """Newest checkpoint all bytes of which are right, in one process."""
    for path in (path_of(folder, step) for step in reversed(steps(folder))):
        with suppress(Damaged):
            read_verified(path)
            return path
    return None
