"""Outputs of a run's first step by module: `forward` in `step_checks/stream.json`, or a former run's `forward.json`.

    version, sketches (m), rows (positions of the global batch that were looked at), batch (sequences and tokens of one
    call: runs that call their modules with other shapes may use other kernels), modules (name, sketches [m], squares)

The sketches are those of `harness.probe.step_checks.local`, in the order in which modules are first called.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.store.check_stream import FOLDER, STREAM, folder_of
from harness.store.errors import StoreError
from harness.store.files import private_folder, write_json
from harness.store.reading import of_format, read_format, read_json
from harness.store.shapes import FORWARD

NAME = "forward.json"
VERSION = 2


@dataclass(frozen=True)
class Forward:
    rows: int
    batch: tuple[int, int]
    modules: Mapping[str, tuple[tuple[float, ...], float]]
    """By name, in the order of first calls: sketches, and the sum of squares of all elements."""


def write(run_dir: Path, rows: int, batch: tuple[int, int], modules: Mapping[str, Sequence[float]]) -> None:
    """Called once, by the first rank. Raises `OSError`: the folder cannot be written."""
    private_folder(run_dir / FOLDER)
    described = [
        {"name": name, "sketches": list(each[:-1]), "squares": each[-1]}
        for name, each in modules.items()
        if all(math.isfinite(value) for value in each)  # JSON has no others, and the loss tells of them
    ]
    facts = {"version": VERSION, "rows": rows, "batch": list(batch), "modules": described}
    stream = read_json(run_dir / FOLDER / STREAM, dict)
    if stream is None:
        write_json(run_dir / FOLDER / NAME, facts)
    else:
        write_json(run_dir / FOLDER / STREAM, {**stream, "forward": facts})


def read(run_dir: Path) -> Forward | None:
    """None if not observed. Raises `StoreError`: the file is unreadable."""
    path = folder_of(run_dir) / STREAM
    if "forward" in (stream := read_json(path, dict) or {}):
        facts = of_format(stream["forward"], path, VERSION, FORWARD)
    else:
        path = path.with_name(NAME)
        facts = read_format(path, VERSION, FORWARD)
    if facts is None:
        return None
    try:
        numbers = {each["name"]: _numbers([*each["sketches"], each["squares"]]) for each in facts["modules"]}
    except (OverflowError, ValueError) as error:
        raise StoreError(f"{path} is damaged: {error}") from None
    modules = {name: (each[:-1], each[-1]) for name, each in numbers.items()}
    return Forward(facts["rows"], (facts["batch"][0], facts["batch"][1]), modules)


def _numbers(values: Sequence[float]) -> tuple[float, ...]:
    """Raises `OverflowError`, `ValueError`: a value is no finite number."""
    found = tuple(float(value) for value in values)
    if not all(map(math.isfinite, found)):
        raise ValueError(f"{found} are not all finite")
    return found
