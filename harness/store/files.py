"""Small files, written whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.store.errors import StoreError


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` by `text` (UTF-8), so that a reader, or a crash at any moment, sees the old or the new file whole.

    Raises:
        OSError: the folder is missing or not writable, or the disk is full; `path` is then as it was.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. Raises `ValueError` on a non-finite float: JSON has none."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any | None:
    """The value in a JSON file; None where there is no such file.

    Raises:
        StoreError: the file is there but is not JSON (it was edited by hand; our own writes are atomic).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise StoreError(f"{path} is not valid JSON ({error}); repair it or remove the run directory") from error


class Lock:
    """An exclusive advisory lock on a file, held while the file is open.

    The kernel drops it when the last process that has the descriptor is gone, so it is never stale and knows nothing of
    process ids. A child that inherits `fileno()` keeps it held.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, path: Path, *, timeout_s: float = 0.0) -> Lock | None:
        """Take the lock, waiting at most `timeout_s` seconds; None when another holder keeps it.

        Raises:
            StoreError: the file system knows no locks.
            OSError: the lock file cannot be made.
        """
        descriptor = _open(path)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return cls(path, descriptor)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(descriptor)
                    return None
                time.sleep(0.02)
            except OSError as error:
                os.close(descriptor)
                raise StoreError(
                    f"cannot lock {path}: {error.strerror}; put launch.root on a file system with flock "
                    "(local disk, NFS 4, Lustre mounted with -o flock)"
                ) from error

    def fileno(self) -> int:
        """The descriptor to hand to a child that shall keep the lock held."""
        return self._descriptor

    def release(self) -> None:
        """Close this process's descriptor. The lock lives on in children that inherited it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:  # another person's run: its lock can be looked at all the same
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def is_held(path: Path) -> bool:
    """Whether some process holds the lock on `path` now. Looking is shared: two who look do not see each other."""
    if not path.exists():
        return False
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def held(path: Path, *, timeout_s: float = 30.0) -> Iterator[None]:
    """Hold the lock on `path` for a short piece of bookkeeping.

    Raises:
        StoreError: it was not free within `timeout_s` seconds.
    """
    lock = Lock.acquire(path, timeout_s=timeout_s)
    if lock is None:
        raise StoreError(f"{path} has been locked by another process for {timeout_s:g} s; wait for it, or end it")
    with lock:
        yield
