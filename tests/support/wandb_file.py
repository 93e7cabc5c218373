"""What a `.wandb` file holds, in wandb's own messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.wandb_sync.series import frames


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
