"""Another process's memory, copied by one call of the kernel (`process_vm_readv`). Linux alone has it."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def is_there() -> bool:
    return _READV is not None


def copy_from(pid: int, address: int, into: int, num_bytes: int) -> None:
    """Copy bytes at an address of a process to an address of this one.

    Raises:
        OSError: the kernel refuses, or the process has ended (`ProcessLookupError`).
    """
    done = 0
    while done < num_bytes:  # the kernel may stop early, at a signal or after 2 GiB
        local = _Span(into + done, num_bytes - done)
        remote = _Span(address + done, num_bytes - done)
        got = _READV(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) if _READV is not None else -1
        if got <= 0:
            code = ctypes.get_errno() or errno.ENOSYS
            raise OSError(code, os.strerror(code))
        done += got


def words_from(pid: int, address: int, count: int) -> tuple[int, ...]:
    """Copies of `count` int64 that lie at an address of a process.

    Raises:
        OSError: the kernel refuses, or the process has ended.
    """
    words = (ctypes.c_int64 * count)()
    copy_from(pid, address, ctypes.addressof(words), ctypes.sizeof(words))
    return tuple(words)


def _readv() -> Any:
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError, TypeError):  # not Linux
        return None
    call.restype = ctypes.c_ssize_t
    span, number = ctypes.POINTER(_Span), ctypes.c_ulong
    call.argtypes = [ctypes.c_int, span, number, span, number, number]
    return call


_READV = _readv()
