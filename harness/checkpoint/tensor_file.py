"""One safetensors file: written, and summed as it lies on the disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from harness.checkpoint.manifest import FileEntry
from harness.store.reading import open_regular

HASHED_BYTES = 1 << 20
"""Bytes read and hashed at a time; they stay in the cache between the two."""


def write(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write named tensors, copied to the CPU, and flush them to the disk.

    Raises `SafetensorError`: the disk is full, say; an unfinished file may stay.
    """
    flat = torch.contiguous_format
    save_file({name: each.detach().to("cpu", copy=True, memory_format=flat) for name, each in tensors.items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return digest_of(path)


def digest_of(path: Path) -> FileEntry:
    """Size and XXH3 (128 bits) of a file on the disk, against damage, not malice.

    Raises `FileNotFoundError`; `StoreError` as `open_regular`.
    """
    file = open_regular(path)
    if file is None:
        raise FileNotFoundError(path)
    with file:
        digest = xxhash.xxh3_128()
        while block := file.read(HASHED_BYTES):
            digest.update(block)
        return FileEntry(os.fstat(file.fileno()).st_size, digest.hexdigest())
