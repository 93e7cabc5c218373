"""Copy of the code at submission, so that later edits do not affect waiting jobs.

`<root>/.snapshots/<digest>/` holds the shipped files by content: cells of the same sources share a copy, and a requeued
job uses it again. The user's own classes are copied likewise. `harness gc` removes unused copies.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from harness.store.provenance import PACKAGE, files_digest
from harness.store.rundir import CODE

SHIPPED = ("harness", "hydra_plugins/harness_hydra", "conf", "sweeps", "run.py")


def code_copy(root: Path, origin: Path = PACKAGE.parent, *, take: bool) -> Path:
    """Folder of a copy of the code as it is. Args: take: make it, unless present.

    Raises `OSError`: the root is not writable, or the disk is full.
    """
    names = sorted(name for shipped in SHIPPED for name in _files(origin, shipped))
    target = root / CODE / files_digest(origin, names)[:16]
    return copied(origin, names, target) if take else target


def own_copy(root: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Record of a user's own class for `provenance.json`, with the folder of its copy as `copy`."""
    target = root / CODE / f"own-{facts['digest'][:16]}"
    return {**facts, "copy": str(copied(Path(facts["root"]), facts["files"], target))}


def copied(origin: Path, names: Sequence[str], target: Path) -> Path:
    """Atomically copy files to a folder named by their digest, unless it is there."""
    if target.is_dir():
        os.utime(target)  # in use: `gc` takes only what nobody has asked for lately
        return target
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        for name in names:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(origin / name, temporary / name)
        os.replace(temporary, target)
    except OSError:
        if not target.is_dir():  # somebody else has made it meanwhile
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _files(origin: Path, name: str) -> Iterable[str]:
    if (origin / name).is_file():
        yield name
    for folder, folders, files in os.walk(origin / name):
        folders[:] = [each for each in folders if each != "__pycache__" and not each.startswith(".")]
        for file in files:
            path = Path(folder, file)
            if not file.startswith(".") and path.is_file():
                yield path.relative_to(origin).as_posix()
