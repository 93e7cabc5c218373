"""What a `.wandb` file holds, in wandb's own messages. Frames are LevelDB's log format, for which wandb has no reader
in Python any more."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7
FULL, FIRST, LAST = 1, 2, 4


def frames(data: bytes) -> Iterator[bytes]:
    """The payloads; one that crosses a block is put together. The file begins with seven bytes of identification."""
    assert data[:4] == b":W&B", data[:HEADER]
    place, whole = HEADER, b""
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + HEADER])
        part = data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        whole = part if kind in (FULL, FIRST) else whole + part
        if kind in (FULL, LAST):
            yield whole


def records(path: Path) -> list[Any]:
    """Every record of a file, as `wandb_internal_pb2.Record`."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for frame in frames(path.read_bytes()):
        record = Record()
        record.ParseFromString(frame)
        found.append(record)
    return found


def history(found: list[Any]) -> list[dict[str, Any]]:
    """Logged rows, by metric; wandb's own columns (`_step`, ...) included."""
    rows = [record.history for record in found if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]


def run_of(found: list[Any]) -> Any:
    """The message that opens the run."""
    return next(record.run for record in found if record.WhichOneof("record_type") == "run")


def summary(found: list[Any]) -> dict[str, Any]:
    """What was written into the summary by hand."""
    updates = [record.summary.update for record in found if record.WhichOneof("record_type") == "summary"]
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for update in updates for item in update}


def only_file(run: Path) -> Path:
    """The one `.wandb` file of a run directory."""
    (path,) = (run / "wandb").glob("offline-run-*/*.wandb")
    return path
