"""Captured gradients: a safetensors file read through the page cache, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from harness.store import tensor_header
from harness.store.errors import StoreError
from harness.store.tensor_header import Held

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]

NUMPY_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""Numpy's dtypes by safetensors' names; bf16 as its bits."""


class Unreadable(ValueError):
    """A capture cannot be read; the message names file and reason."""


def read_header(path: Path) -> tuple[dict[str, Held], dict[str, str]]:
    """Tensors of a file and its metadata. Raises `Unreadable`: it is missing, truncated, or not in the format."""
    try:
        tensors, metadata = tensor_header.read_described(path)
    except StoreError as error:
        raise Unreadable(str(error)) from error
    for name, tensor in tensors.items():
        if tensor.dtype not in NUMPY_DTYPES:
            raise Unreadable(f"{path}: {name} has dtype {tensor.dtype}; gradients are {', '.join(NUMPY_DTYPES)}")
    return tensors, metadata


class Capture:
    def __init__(self, path: Path, tensors: Mapping[str, Held] | None = None) -> None:
        """Args: tensors: those of the file to take, by other names; None takes all.

        Raises `Unreadable`: the file is missing, truncated, or not in the format.
        """
        self.path = path
        self.tensors = read_header(path)[0] if tensors is None else tensors

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


class Computed(Capture):
    """Tensors worked out in fp64 from those of captures."""

    def __init__(self, of: Capture, values: Callable[[str], Float64]) -> None:
        wide = {name: Held("F64", each.shape, 0, 8 * math.prod(each.shape)) for name, each in of.tensors.items()}
        super().__init__(of.path, wide)
        self._values = values

    def values(self, name: str) -> Float64:
        return self._values(name)

    def raw(self, name: str) -> NDArray[np.generic]:
        return self.values(name).ravel()
