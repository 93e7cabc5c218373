"""Changes to runs as they lie on disk."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml


def edit_json(path: Path, **changes: Any) -> None:
    """Change entries of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_lines(run: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Change the lines of `metrics.jsonl` in place."""
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def edit_config(run: Path, group: str, **changes: Any) -> None:
    """Change settings of a frozen configuration."""
    path = run / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config[group].update(changes)
    path.write_text(yaml.safe_dump(config))


def next_float(value: float) -> float:
    """The neighbouring float64: one bit more."""
    return float(struct.unpack("<d", struct.pack("<q", struct.unpack("<q", struct.pack("<d", value))[0] + 1))[0])
