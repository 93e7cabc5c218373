"""Small files, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.store.errors import Busy, StoreError
from harness.store.redaction import redacted

PRIVATE = 0o600


def write_atomic(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replace `path` by `text` (UTF-8), so that a reader, or a crash at any moment, sees the old or the new file whole.

    Secrets are replaced (`redaction`). Of `mode` the umask takes away what it does of any file.

    Raises:
        OSError: the folder is missing or not writable, or the disk is full; `path` is then as it was.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(redacted(text))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


class SameFiles:
    """Files of several folders that mostly hold the same text: written and flushed once, then linked.

    To be read only: who writes one in place writes all. Replacing one (`write_atomic`) leaves the others alone.
    """

    def __init__(self) -> None:
        self._first: dict[str, tuple[Path, int]] = {}

    def write(self, path: Path, text: str, *, mode: int = 0o666) -> None:
        """`write_atomic`, or a second name of the file that was written before; what cannot be linked is written."""
        if text not in self._first or not _linked(*self._first[text], path):
            write_atomic(path, text, mode=mode)
            self._first[text] = path, path.stat().st_ino


def _linked(first: Path, inode: int, path: Path) -> bool:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        os.link(first, temporary)
        if os.stat(temporary).st_ino == inode:
            os.replace(temporary, path)
            return True
    except OSError:
        pass
    with contextlib.suppress(OSError):
        os.unlink(temporary)
    return False


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. Raises `ValueError` on a non-finite float: JSON has none."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def private_folder(path: Path) -> bool:
    """Make a folder that only its owner may look into, whatever the umask; returns whether it was not there.

    Folders above it are made as usual. One that is there keeps its mode, so that an owner may open it for others.
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


def own_folder() -> Path:
    """A folder of this user on this machine, for locks: nobody else can have made it, or put anything in it.

    Raises:
        StoreError: somebody else holds its name, or may write into it.
    """
    folder = Path(tempfile.gettempdir()) / f"sharding-harness-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise StoreError(f"{folder} is not a folder of yours alone; remove it, or set TMPDIR to a folder of your own")
    return folder


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
            StoreError: the file system knows no locks, or the file is another user's, who could keep it for ever.
            OSError: the lock file cannot be made.
        """
        if os.path.lexists(path) and os.geteuid() and (owner := path.lstat().st_uid) not in (os.geteuid(), 0):
            mine = "choose a study or a store of your own (study.name, launch.root), or remove it"
            raise StoreError(f"the lock {path} belongs to user {owner}, who could keep it for ever; {mine}")
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


_LOCK_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""A lock is a file of its folder: no link leads away from it, and a FIFO in its place blocks nobody."""


def _open(path: Path) -> int:
    """A lock's descriptor. Who can open a file can lock it, so that only its owner may open it.

    Raises:
        StoreError: something else stands in its place.
        PermissionError: it is another user's, and closed.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _LOCK_FLAGS, PRIVATE)
    except (IsADirectoryError, NotADirectoryError) as error:
        raise StoreError(f"the lock {path} cannot be taken: {error.strerror}; remove what is in its place") from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise StoreError(f"the lock {path} is a link or a FIFO, as no lock of ours is; remove it") from error
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
    else:
        found = os.fstat(descriptor)
        if found.st_uid == os.geteuid() and found.st_mode & 0o7777 != PRIVATE:
            os.fchmod(descriptor, PRIVATE)  # a umask, or an older version, left it otherwise
        return descriptor
    return os.open(path, os.O_RDONLY | _LOCK_FLAGS)  # an archive: it can be looked at


def is_held(path: Path) -> bool:
    """True while some process holds the lock on `path`. Looking is shared: two who look do not see each other.

    Another user's lock cannot be looked at: it is taken for held, so that a run's state is believed.
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
    """Hold the lock on `path` for a short piece of bookkeeping.

    Raises:
        Busy: it was not free within `timeout_s` seconds.
    """
    lock = Lock.acquire(path, timeout_s=timeout_s)
    if lock is None:
        raise Busy(f"{path} has been locked by another process for {timeout_s:g} s; wait for it, or end it")
    with lock:
        yield
