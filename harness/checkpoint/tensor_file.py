"""One safetensors file: written, and summed as it lies on the disk."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

HASHED_BYTES = 1 << 20
"""Bytes read and hashed at a time; they stay in the cache between the two."""


@dataclass(frozen=True)
class Written:
    bytes: int
    xxh3: str


def write(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Write named tensors, copied to the CPU, and flush them to the disk.

    Raises `SafetensorError`: the disk is full, say; an unfinished file may stay.
    """
    flat = torch.contiguous_format
    save_file({name: each.detach().to("cpu", copy=True, memory_format=flat) for name, each in tensors.items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return digest_of(path)


def _regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "no regular file", path)


def digest_of(path: Path) -> Written:
    """Size and XXH3 (128 bits) of a file on the disk, against damage, not malice.

    Raises `OSError`: it is missing, unreadable, or no regular file of its folder (a link, or a device, which may never
    end).
    """
    with FileIO(path, opener=_regular) as file:
        digest, block = xxhash.xxh3_128(), bytearray(HASHED_BYTES)
        while count := file.readinto(block):
            digest.update(memoryview(block)[:count])
        return Written(os.fstat(file.fileno()).st_size, digest.hexdigest())
