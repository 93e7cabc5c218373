"""Small files, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.store.errors import Busy, StoreError
from harness.store.redaction import redacted

PRIVATE = 0o600


def write_atomic(path: Path, text: str | bytes, *, mode: int = 0o666) -> None:
    """Atomically replace `path` by `text` (UTF-8, or bytes as they are), with secrets removed (`redaction`) and `mode`
    under the umask.

    Raises `OSError`: the folder is missing or not writable, or the disk is full; `path` is then unchanged.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(descriptor, "wb") as file:
            file.write(text if isinstance(text, bytes) else redacted(text).encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_json(path: Path, value: Any) -> None:
    """Indented JSON, atomically. Raises `ValueError` on a non-finite float."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def private_folder(path: Path) -> bool:
    """Make a folder for its owner alone, whatever the umask; True if it is new.

    Parents have the usual mode. An existing folder keeps its mode, so that an owner may open it for others.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if path.is_dir():
            return False
        raise
    path.chmod(0o700)  # a umask may have taken from its owner, too
    return True


class Lock:
    """An exclusive advisory lock on a file, held while the file is open.

    The kernel drops it when the last process with the descriptor ends, so it is never stale. A child that inherits
    `fileno()` keeps it held.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, path: Path, *, timeout_s: float = 0.0) -> Lock | None:
        """Take the lock within `timeout_s` seconds; None if another holds it.

        Raises `StoreError`: the file system has no locks. `OSError`: the lock file cannot be made or opened.
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
        """Descriptor for a child that keeps the lock held."""
        return self._descriptor

    def release(self) -> None:
        """Close this process's descriptor; children that inherited the lock keep it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _open(path: Path) -> int:
    """Descriptor of a lock, readable by its owner alone, because whoever can open it can lock it.

    Raises `OSError`: it is a link or no regular file, or (`PermissionError`) another user's.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # no links, and no blocking on a FIFO
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, PRIVATE)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return os.open(path, os.O_RDONLY | flags)  # an archive: it can be looked at
    found = os.fstat(descriptor)
    if found.st_uid == os.geteuid() and found.st_mode & 0o7777 != PRIVATE:
        os.fchmod(descriptor, PRIVATE)  # a umask, or an older version, left it otherwise
    return descriptor


def is_held(path: Path) -> bool:
    """True while some process holds the lock on `path`; probes do not disturb each other.

    Another user's lock counts as held, so that a run's state is believed.
    """
    if not os.path.lexists(path):
        return False
    try:
        descriptor = _open(path)
    except PermissionError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def held(path: Path, *, timeout_s: float = 30.0) -> Iterator[None]:
    """Hold the lock on `path` for short bookkeeping. Raises `Busy`: not free within `timeout_s` seconds."""
    lock = Lock.acquire(path, timeout_s=timeout_s)
    if lock is None:
        raise Busy(f"{path} has been locked by another process for {timeout_s:g} s; wait for it, or end it")
    with lock:
        yield
