"""One safetensors file, written and hashed as a stream.

`harness.store.tensor_header` has the format. The library's `save_file` copies everything it writes; here bytes go to
the disk from where they are.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
HASHED_BYTES = 1 << 20
"""Bytes read and hashed at a time; they stay in the cache between the two."""
BLOCK_BYTES = 16 << 20
"""Bytes hashed and written at a time: few calls of Python, but within the cache."""


@dataclass(frozen=True)
class Written:
    bytes: int
    xxh3: str


def write(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Write named tensors, flushed to the disk; at most one is copied at a time.

    Raises `ValueError`: a dtype without a name in safetensors. `OSError`: the disk is full, say; the partial file
    stays.
    """
    ordered = sorted(
        tensors.items(), key=lambda item: (-item[1].element_size(), item[0])
    )  # aligned for whoever maps it
    header = _header(ordered)
    digest = xxhash.xxh3_128()
    with path.open("wb") as file:
        _put(file, digest, [header])
        for _, tensor in ordered:
            _put(file, digest, _blocks(tensor))
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return Written(size, digest.hexdigest())


def _put(file: BinaryIO, digest: xxhash.xxh3_128, blocks: Iterable[bytes | memoryview]) -> None:
    for block in blocks:
        digest.update(block)
        file.write(block)


def _header(ordered: list[tuple[str, Tensor]]) -> bytes:
    table, begin = {}, 0
    for name, tensor in ordered:
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}, which safetensors files cannot hold")
        end = begin + tensor.numel() * tensor.element_size()
        table[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _blocks(tensor: Tensor) -> Iterable[memoryview]:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if not flat.numel():
        return
    raw = bytes_of(flat)
    for begin in range(0, len(raw), BLOCK_BYTES):
        yield raw[begin : begin + BLOCK_BYTES]


def bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()  # a buffer, which numpy's stubs do not say
    return memoryview(array)


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
