"""Header of a safetensors file: eight bytes with the length of a JSON table, the table, then raw little-endian data.

Read without the library, because numpy knows no bf16, and a truncated file must be named, not crash its reader.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.store.errors import StoreError
from harness.store.reading import open_regular
from harness.store.shapes import Each, Shape, fault

BYTES = {
    **dict.fromkeys(("F64", "I64"), 8),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
"""Bytes of an element, by the format's names of dtypes."""
_TABLE: Shape = Each(dict, {"dtype": str, "shape": Each(list, int), "data_offsets": Each(list, int, count=2)})


@dataclass(frozen=True)
class Held:
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""
    size: int


def read(path: Path) -> tuple[dict[str, Held], dict[str, str]]:
    """Tensors of a file, by name, and its metadata.

    Raises `StoreError`: it is missing, no regular file, or truncated; or its tensors do not cover the data exactly.
    """
    file = open_regular(path)
    if file is None:
        raise StoreError(f"{path} is missing")
    with file:
        length, size = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
        if length > size - 8:
            raise StoreError(f"{path} is truncated or no safetensors file: a header of {length} bytes in {size}")
        text = file.read(length)
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} has a damaged header: {error}") from error
    metadata = table.pop("__metadata__", {}) if type(table) is dict else {}
    if wrong := fault(metadata, Each(dict, str)) or fault(table, _TABLE) or _misplaced(table, size - 8 - length):
        raise StoreError(f"{path} has a damaged header, or is truncated: {wrong}")
    found = {}
    for name, entry in table.items():
        begin, end = entry["data_offsets"]
        found[name] = Held(entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)
    return found, metadata


def _misplaced(entries: Mapping[str, Any], size: int) -> str:
    ends = 0
    for name, entry in sorted(entries.items(), key=lambda each: each[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        width = BYTES.get(entry["dtype"])
        if width is None or begin != ends or end - begin != math.prod(entry["shape"]) * width:
            place = f"bytes {begin} to {end}, after {ends}, for shape {entry['shape']} of dtype {entry['dtype']}"
            return f"{name} has {place}"
        ends = end
    return "" if ends == size else f"it asks for {ends} bytes of tensors, and there are {size}"
