"""`checksums.json`: size and checksum of every file that a run recorded, at the end of its last attempt.

[Note: Evidence that is whole] A disk, a truncated copy or an editor changes a file, and a verdict would blame the run.
So rank 0 lists the recorded files when an attempt ends (done, preempted or cancelled), and writes the list's checksum
into `status.json` together with that end. A crash leaves both or neither; a new attempt's first status names no list.
Files that change after the end (`status.json`, `attempts/`, `verdict/`, `wandb/`) are not listed, nor is `ckpt/`, whose
manifests have checksums, nor `diff.patch`, which may be secret and be removed from a copy.

Format: version, files: by path within the run, bytes and xxh3 (XXH3-128). It finds accidents, not forgery.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from harness.store import status
from harness.store.errors import StoreError
from harness.store.files import write_json
from harness.store.reading import folder_names, open_regular, read_format
from harness.store.rundir import CHECKSUMS
from harness.store.screen import counted
from harness.store.shapes import LISTED
from harness.store.status import State

VERSION = 1
TOLD = ("config.yaml", "provenance.json", "metrics.jsonl", "summary.json")
FILES = (*TOLD, "overrides.txt")
FOLDERS = ("capture", "step_checks", "vouch")
ASIDE = "diff.patch"
"""Listed by an older version."""
SUFFIXES = (".json", ".safetensors", ".f64")
RESTORE = "restore it from a copy, or run it again (launch.rerun=always)"
BLOCK = 2**18


def write(run: Path) -> str:
    """List a run's files; returns the list's own checksum, for its status.

    Raises `StoreError` or `OSError`: a file cannot be read, or the list be written.
    """
    write_json(run / CHECKSUMS, {"version": VERSION, "files": {name: of_file(run / name) for name in _recorded(run)}})
    return str(of_file(run / CHECKSUMS)["xxh3"])


def renew(run: Path) -> None:
    if (ended := status.read(run)) is not None and ended.checksums:
        status.note(run, checksums=write(run))


def damage(run: Path, *names: str) -> dict[str, str] | None:
    """Recorded files that are gone or have other bytes, with a sentence; all files by default.

    None without a list: a running or old run. Raises `StoreError`: `status.json` cannot be read.
    """
    ended, there = status.read(run), (run / CHECKSUMS).exists()
    if ended is None:
        return {status.FILE: f"{status.FILE} is missing"} if there else None
    if not ended.checksums and not (there and ended.state is State.done):
        return None
    try:
        if of_file(run / CHECKSUMS)["xxh3"] != ended.checksums:
            return {CHECKSUMS: f"{CHECKSUMS} is not the list that {status.FILE} names"}
        files = _listed(run)
    except (OSError, StoreError) as error:
        return {CHECKSUMS: str(error)}
    asked = [name for name in names or files if name in files and name != ASIDE]
    return {name: f"{name} is not what the run recorded" for name in asked if not _is(run / name, files[name])}


def demand(run: Path, *names: str) -> None:
    """Raises `StoreError`: a file of `names`, by default any, is damaged; no-op without a list."""
    if wrong := damage(run, *names):
        raise StoreError(f"{run}: {'; '.join(wrong.values())}; {RESTORE}")


def condition(run: Path) -> str:
    found = damage(run)
    if found:
        return f"damaged: {'; '.join(found.values())}; {RESTORE}"
    return "" if found is None else f"whole, {counted(len(_listed(run)), 'file')}"


def _recorded(run: Path) -> list[str]:
    found = [name for name in FILES if os.path.isfile(run / name)]
    for folder in FOLDERS:
        names = (name for name in sorted(folder_names(run / folder)) if not name.startswith("."))
        found += [f"{folder}/{name}" for name in names if name.endswith(SUFFIXES)]
    return found


def _listed(run: Path) -> Mapping[str, Mapping[str, Any]]:
    listed: dict[str, Mapping[str, Mapping[str, Any]]] = read_format(run / CHECKSUMS, VERSION, LISTED) or {"files": {}}
    return listed["files"]


def _is(path: Path, entry: Mapping[str, Any]) -> bool:
    try:
        return path.stat().st_size == entry["bytes"] and of_file(path) == entry
    except (OSError, StoreError):
        return False


def of_file(path: Path) -> dict[str, Any]:
    """Bytes of a file and their XXH3-128 in hex. Raises `FileNotFoundError`; `StoreError`, `OSError`: unreadable."""
    file = open_regular(path)
    if file is None:
        raise FileNotFoundError(f"{path.name} is missing")
    digest, size = xxhash.xxh3_128(), 0
    with file:
        for block in iter(partial(file.read, BLOCK), b""):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "xxh3": digest.hexdigest()}
