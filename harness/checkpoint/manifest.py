"""manifest.json: what a checkpoint holds, and the sum of itself. See [Note: A checkpoint's folder]."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.store.files import write_json

FORMAT = 2
NAME = "manifest.json"


class Damaged(Exception):
    """A checkpoint is not what was written: torn, truncated, changed, or of a version nobody here knows."""


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor: where it begins, its size, and under which name of which file it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    name: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: torch's name of its dtype ("float32"), its whole shape, and its chunks."""

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

    values: plain JSON: step, layout, and what else whoever saved it wants back.
    """

    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    values: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        """Bytes of all tensor files together."""
        return sum(entry.bytes for entry in self.files.values())

    def write(self, folder: Path) -> None:
        """Write `manifest.json`, flushed to the disk."""
        body = asdict(self)
        write_json(folder / NAME, {"sha256": _sum(body), **body})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and check it.

        Raises:
            Damaged: it is missing, torn, changed, or of another format; the message says which.
        """
        path = folder / NAME
        try:
            body = dict(json.loads(path.read_text(encoding="utf-8")))
            fits = _sum(body) == body.pop("sha256", None)
        except FileNotFoundError:
            raise Damaged(f"{path} is missing") from None
        except (OSError, ValueError, TypeError) as error:
            raise Damaged(f"{path} cannot be read: {error}") from error
        if not fits:
            raise Damaged(f"{path} was changed: its SHA-256 does not fit")
        return cls.parse(body, path)

    @classmethod
    def parse(cls, body: Mapping[str, Any], path: Path) -> Manifest:
        """From plain JSON.

        Raises:
            Damaged: of another format.
        """
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
    """SHA-256 of a manifest without its sum, however the file is indented."""
    rest = {key: value for key, value in body.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, separators=(",", ":"), sort_keys=True).encode()).hexdigest()
