"""Reading of a run's files, for every reader.

[Note: Files that others left] Files of a run directory may be missing, truncated, another user's, no text, no regular
file (a FIFO blocks, `/dev/zero` never ends), nested deeper than the reader's stack, or of another shape. This module
turns all of that into a StoreError with the file's name and fault, so that a command reports one bad file and goes on
with the rest.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from harness.store.errors import StoreError
from harness.store.shapes import Shape, fault

MAX_BYTES = 256 * 2**20
"""Largest file read in full; records of steps are read line by line and may be larger."""
REPAIR = "repair it or remove the run directory"


def open_regular(path: Path, *, own: bool = False) -> BinaryIO | None:
    """Regular file opened without blocking; None if missing.

    Raises `StoreError`: it is no regular file, is unreadable, or (`own`) another user's.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        _refuse(path, error)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise StoreError(f"{path} is no regular file; remove it")
    if own and found.st_uid != os.getuid():
        os.close(descriptor)
        raise StoreError(
            f"{path} was written by user {found.st_uid}, and only you should write there; remove it, or choose another"
            " launch.root"
        )
    return os.fdopen(descriptor, "rb")


def _refuse(path: Path, error: OSError | ValueError) -> NoReturn:
    why = error.strerror if isinstance(error, OSError) else str(error)
    raise StoreError(f"{path} cannot be read: {why}") from error


def folder_names(folder: Path) -> list[str]:
    """Names in a folder; empty for a missing or closed one."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def read_text(path: Path, limit: int = MAX_BYTES, *, own: bool = False) -> str | None:
    """Text of a UTF-8 file; None if missing.

    Raises `StoreError`: not regular, not UTF-8, above `limit` bytes, unreadable, or (`own`) another user's.
    """
    file = open_regular(path, own=own)
    if file is None:
        return None
    with file:
        fits = os.fstat(file.fileno()).st_size <= limit
        try:
            data = file.read() if fits else b""  # `read(n)` takes n bytes of memory, however short the file
        except OSError as error:
            _refuse(path, error)
    if not fits:
        raise StoreError(f"{path} has more than {limit} bytes, as no file of a run has; remove it")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StoreError(f"{path} is not UTF-8 text (byte {error.start}); repair it or remove it") from error


def read_json(path: Path, shape: Shape | None = None, *, own: bool = False) -> Any | None:
    """Value of a JSON file; None if missing. Raises `StoreError`, as `read_text`; or it is no JSON, or not `shape`."""
    text = read_text(path, own=own)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is not valid JSON ({error}); {REPAIR}") from error
    return value if shape is None else checked(value, shape, str(path))


def read_format(path: Path, version: int, shape: Shape | None = None) -> Any | None:
    """`read_json` of a file with a format number in `version`. Raises `StoreError` also for another format, before its
    shape."""
    return of_format(read_json(path), path, version, shape)


def of_format(facts: Any, path: Path, version: int, shape: Shape | None = None) -> Any | None:
    """`read_format` of what was read of a file."""
    if isinstance(facts, dict) and isinstance(facts.get("version"), int) and facts["version"] != version:
        made = "older" if facts["version"] < version else "newer"
        raise StoreError(
            f"{path} has format {facts['version']}, and {version} is read here: {made} code made the run; judge it "
            "with that code, or run it again with this one (launch.rerun=stale)"
        )
    return facts if facts is None or shape is None else checked(facts, shape, str(path))


def checked(value: Any, shape: Shape, where: str) -> Any:
    """Raises `StoreError` naming `where`: `value` does not have the shape."""
    wrong = fault(value, shape)
    if wrong:
        raise StoreError(f"{where} is damaged: {wrong}")
    return value
