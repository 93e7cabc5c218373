"""One safetensors file: written, and summed as it lies on the disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from harness.checkpoint.manifest import FileEntry
from harness.store import checksums


def write(path: Path, tensors: Mapping[str, Tensor]) -> FileEntry:
    """Write named tensors, copied to the CPU, and flush them to the disk.

    Raises `SafetensorError`: the disk is full, say; an unfinished file may stay.
    """
    flat = torch.contiguous_format
    save_file({name: each.detach().to("cpu", copy=True, memory_format=flat) for name, each in tensors.items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileEntry(**checksums.of_file(path))
