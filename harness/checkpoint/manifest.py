"""manifest.json: contents of a checkpoint, and its own checksum. See [Note: A checkpoint's folder]."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.store.errors import StoreError
from harness.store.files import write_json
from harness.store.reading import read_json

FORMAT = 2
NAME = "manifest.json"


class Damaged(Exception):
    """A checkpoint is torn, truncated, changed, or of an unknown version."""


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor: offsets, sizes, file, and name in the file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    name: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: torch's name of its dtype ("float32"), its unsharded shape, and its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class FileEntry:
    """A file's size and its XXH3 of 128 bits, 32 hex digits."""

    bytes: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """Everything but the tensors' elements.

    values: plain JSON: step, layout, and further values of the writer.
    """

    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    values: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        body = asdict(self)
        write_json(folder / NAME, {"sha256": _sum(body), **body})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises `Damaged`: the file is missing, torn, changed, or of another format."""
        path = folder / NAME
        try:
            body = read_json(path, dict)
        except StoreError as error:
            raise Damaged(str(error).partition("; ")[0]) from error  # without advice, which is about a run's own files
        if body is None:
            raise Damaged(f"{path} is missing")
        if _sum(body) != body.pop("sha256", None):
            raise Damaged(f"{path} was changed: its SHA-256 does not fit")
        if body.get("format") != FORMAT:
            raise Damaged(f"{path} has format {body.get('format')}; this version reads format {FORMAT}")
        tensors = {
            key: TensorEntry(
                entry["dtype"],
                tuple(entry["shape"]),
                tuple(Chunk(tuple(c["offsets"]), tuple(c["sizes"]), c["file"], c["name"]) for c in entry["chunks"]),
            )
            for key, entry in body["tensors"].items()
        }
        files = {name: FileEntry(entry["bytes"], entry["xxh3"]) for name, entry in body["files"].items()}
        return cls(tensors, files, body["values"])


def _sum(body: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in body.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, separators=(",", ":"), sort_keys=True).encode()).hexdigest()
