"""`checksums.json`: size and checksum of every file that a run recorded, at the end of its last attempt.

[Note: Evidence that is whole] A disk, a truncated copy or an editor changes a file, and a verdict would blame the run.
So rank 0 lists the recorded files when an attempt ends (done, preempted or cancelled), and writes the list's checksum
into `status.json` together with that end. A crash leaves both or neither; a new attempt's first status names no list.
Files that change after the end (`status.json`, `attempts/`, `verdict/`, `wandb/`) are not listed, nor is `ckpt/`, whose
manifests have checksums.

Format: version, attempts (their number), files: by path within the run, bytes and xxh3 (XXH3-128). It finds accidents,
not forgery.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from harness.store import status
from harness.store.errors import StoreError
from harness.store.files import write_json
from harness.store.reading import folder_names, open_regular, read_format
from harness.store.rundir import CHECKSUMS, RunDir
from harness.store.screen import counted
from harness.store.shapes import LISTED
from harness.store.status import State

VERSION = 1
FILES = ("config.yaml", "overrides.txt", "provenance.json", "diff.patch", "metrics.jsonl", "summary.json")
FOLDERS = ("capture", "step_checks", "vouch")
ASIDE = ("overrides.txt", "diff.patch")
"""Files without influence on results. A diff may be secret, or removed from a copy."""
TOLD = ("config.yaml", "provenance.json", "metrics.jsonl", "summary.json")
SUFFIXES = (".json", ".safetensors", ".f64")
RESTORE = "restore it from a copy, or run it again (launch.rerun=always)"
BLOCK = 2**18


def write(run: Path) -> str:
    """List a run's files; returns the list's own checksum, for its status.

    Raises `StoreError`: a file cannot be read. `OSError`: the list cannot be written.
    """
    files = {name: dict(zip(("bytes", "xxh3"), _sum(run / name), strict=True)) for name in _recorded(run)}
    write_json(run / CHECKSUMS, {"version": VERSION, "attempts": len(RunDir(run).attempts()), "files": files})
    return _sum(run / CHECKSUMS)[1]


def renew(run: Path) -> None:
    if (ended := status.read(run)) is not None and ended.checksums:
        status.note(run, checksums=write(run))


def damage(run: Path, *names: str) -> dict[str, str] | None:
    """Faults of recorded files by path: missing, truncated, changed or added; all files by default.

    None without a list: a running or old run. Raises `StoreError`: `status.json` cannot be read.
    """
    ended, there = status.read(run), (run / CHECKSUMS).exists()
    if ended is None:
        return {status.FILE: f"{status.FILE} is missing"} if there else None
    if not ended.checksums and not (there and ended.state is State.done):
        return None
    try:
        listed = _read(run, ended.checksums)
    except StoreError as error:
        return {CHECKSUMS: str(error)}
    files: Mapping[str, Mapping[str, Any]] = listed["files"]
    found = {} if names else {**_gone(run, files), **_added(run, files), **_attempts(run, listed["attempts"])}
    for name in names or files:
        if name in files and f"{name.partition('/')[0]}/" not in found and (wrong := _fault(run / name, files[name])):
            found[name] = f"{name} {wrong}"
    return found


def demand(run: Path, *names: str) -> None:
    """Raises `StoreError`: a file of `names`, by default all for results, is damaged; no-op without a list."""
    if wrong := unfit(run, *names):
        raise StoreError(f"{run}: {'; '.join(wrong)}; {RESTORE}")


def unfit(run: Path, *names: str) -> list[str]:
    return [each for name, each in (damage(run, *names) or {}).items() if name in names or name not in ASIDE]


def condition(run: Path) -> str:
    found = damage(run)
    if found is None:
        return ""
    if found:
        return f"damaged: {'; '.join(found.values())}; {RESTORE}"
    return f"complete, {counted(len(_read(run)['files']), 'file')}"


def _recorded(run: Path) -> list[str]:
    found = [name for name in FILES if os.path.isfile(run / name)]
    for folder in FOLDERS:
        names = (name for name in sorted(folder_names(run / folder)) if not name.startswith("."))
        found += [f"{folder}/{name}" for name in names if name.endswith(SUFFIXES)]
    return found


def _read(run: Path, checksum: str | None = None) -> dict[str, Any]:
    """Raises `StoreError`: the list is missing, or has another checksum."""
    path = run / CHECKSUMS
    if not path.exists():
        raise StoreError(f"{CHECKSUMS} is missing, so nothing says what the run recorded")
    if checksum is not None and _sum(path)[1] != checksum:
        raise StoreError(f"{CHECKSUMS} was changed: it is not the list that status.json names")
    listed: dict[str, Any] = read_format(path, VERSION, LISTED) or {}
    return listed


def _gone(run: Path, files: Iterable[str]) -> dict[str, str]:
    found = {}
    for folder in FOLDERS:
        count = sum(name.startswith(f"{folder}/") for name in files)
        if count and not os.path.lexists(run / folder):
            found[f"{folder}/"] = f"{folder}/ is missing ({counted(count, 'file')})"
    return found


def _added(run: Path, files: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{name} was added after the run ended" for name in _recorded(run) if name not in files}


def _attempts(run: Path, count: int) -> dict[str, str]:
    there = len(RunDir(run).attempts())
    return {"attempts/": f"attempts/ is truncated: {there} of {count} are there"} if there < count else {}


def _fault(path: Path, entry: Mapping[str, Any]) -> str:
    try:
        size = path.stat().st_size
        if size < entry["bytes"]:
            return f"is truncated: {size} of {entry['bytes']} bytes"
        if size > entry["bytes"]:
            return f"was changed: it has {size} bytes and had {entry['bytes']}"
        if not os.access(path, os.R_OK):  # another person's: whoever needs it is told that it is closed
            return ""
        return "" if _sum(path)[1] == entry["xxh3"] else "was changed: its checksum is another"
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except StoreError as error:
        return f"was changed: {error}"


def _sum(path: Path) -> tuple[int, str]:
    """Bytes of a file and their XXH3-128 in hex. Raises `StoreError` or `OSError`: it cannot be read."""
    file = open_regular(path)
    if file is None:
        raise StoreError(f"{path} is missing")
    digest, size = xxhash.xxh3_128(), 0
    with file:
        for block in iter(partial(file.read, BLOCK), b""):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()
