"""Changes to runs as they lie on disk."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open

from harness.store.shapes import METADATA
from tests.parity.lab import write_step


def edit_json(path: Path, **changes: Any) -> None:
    """Change entries of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_capture(run: Path, step: int, change: Callable[[dict[str, Any]], object], **facts: Any) -> None:
    """Change the tensors of a captured step in place, by part and name, and entries of its description."""
    path = run / f"capture/step-{step:06d}.safetensors"
    with safe_open(path, "np") as file:
        held, tensors = json.loads(file.metadata()[METADATA]), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    change(tensors)
    write_step(run, step, tensors, {**held, **facts})


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
