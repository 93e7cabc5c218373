"""Captured gradients: a safetensors file read through the page cache, tensor by tensor.

The format is eight bytes of header length, a JSON header and raw little-endian data. It is read here without the
safetensors package, because numpy knows no bf16 and because a truncated file must be named, not crash a verdict: the
header says how long the file must be.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.store.errors import StoreError
from harness.store.reading import checked, open_regular
from harness.store.shapes import Each

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]

NUMPY_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""Numpy's dtypes by safetensors' names; bf16 as its bits."""

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class Unreadable(ValueError):
    """A capture cannot be read; the message names file and reason."""


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""
    size: int


class Capture:
    def __init__(self, path: Path) -> None:
        """Raises `Unreadable`: the file is missing, truncated, or not in the format."""
        self.path = path
        self.tensors: Mapping[str, Tensor] = _header(path)

    @cached_property
    def _bytes(self) -> NDArray[np.uint8]:
        import numpy as np

        return np.memmap(self.path, dtype=np.uint8, mode="r").view(np.ndarray)  # a subclass costs at every slice

    def raw(self, name: str) -> NDArray[np.generic]:
        """Stored tensor, flat, without a copy; bf16 as uint16."""
        import numpy as np

        tensor = self.tensors[name]
        piece = self._bytes[tensor.start : tensor.start + tensor.size]
        dtype = np.dtype(NUMPY_DTYPES[tensor.dtype])
        return piece.view(dtype) if tensor.start % dtype.itemsize == 0 else np.frombuffer(piece.tobytes(), dtype)

    def values(self, name: str) -> Float64:
        """Tensor in float64 and in its shape; every stored dtype fits exactly."""
        import numpy as np

        raw = self.raw(name)
        if self.tensors[name].dtype == "BF16":
            raw = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return raw.astype(np.float64).reshape(self.tensors[name].shape)


def _header(path: Path) -> dict[str, Tensor]:
    size, length, text = _raw_header(path)
    try:
        entries = checked(json.loads(text), Each(dict, dict), f"{path}: its header")
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path} cannot be read: {error}") from error
    entries.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in entries.items()}
    end = max((tensor.start + tensor.size for tensor in tensors.values()), default=8 + length)
    if end != size:
        raise Unreadable(f"{path} is truncated: {size} bytes where its header asks for {end}")
    return tensors


def _raw_header(path: Path) -> tuple[int, int, bytes]:
    try:
        file = open_regular(path)
    except StoreError as error:
        raise Unreadable(str(error)) from error
    if file is None:
        raise Unreadable(f"{path} is missing")
    with file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if length > size - 8:
            raise Unreadable(f"{path} is truncated or no safetensors file: a header of {length} bytes in {size}")
        return size, length, file.read(length)


def _tensor(path: Path, name: str, entry: Mapping[str, Any], base: int) -> Tensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(extent) for extent in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"{path}: the header's entry for {name} is damaged ({error})") from error
    count = 1
    for extent in shape:
        count *= extent
    if dtype not in BYTES:
        raise Unreadable(f"{path}: {name} has dtype {dtype}; gradients are one of {', '.join(BYTES)}")
    if begin < 0 or min(shape, default=0) < 0 or end - begin != count * BYTES[dtype]:
        raise Unreadable(f"{path}: {name} has {end - begin} bytes for shape {list(shape)} of {dtype}")
    return Tensor(dtype, shape, base + begin, end - begin)
