"""`metrics.jsonl`: one JSON object a line, one line a step.

Floats read back to the same bits; non-finite ones are the strings "nan", "inf" and "-inf". A line is written with one
call, so a killed run leaves at most a torn last line.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from harness.store.errors import StoreError
from harness.store.files import write_atomic, write_json
from harness.store.reading import open_regular
from harness.store.shapes import STEP, Shape, fault

TAIL_BYTES, NEWEST = 65536, 50
"""Bytes read from a file's end, some fifty steps, and most steps of them."""
MAX_LINE = 1 << 24
"""Longest accepted line: three times a step of a hundred thousand numbers."""
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(record: Mapping[str, Any]) -> str:
    """Line without newline. Raises `TypeError`: a value is no number, string, bool, None, list or mapping."""
    return json.dumps(plain(record), separators=(", ", ": "), allow_nan=False)


def decode(line: str) -> dict[str, Any]:
    """Record of a line, with non-finite floats restored. Raises `ValueError`: the line is no JSON object."""
    value = _DECODER.decode(line)
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {line[:60]!r}")
    return value


def plain(value: Any) -> Any:
    """Values for JSON: enums by their values, non-finite numbers as strings."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _restored(table: dict[str, Any]) -> dict[str, Any]:
    for key, value in table.items():
        if type(value) is str or type(value) is list:
            table[key] = _restore(value)
    return table


def _restore(value: Any) -> Any:
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    return [_restore(item) for item in value] if isinstance(value, list) else value


_DECODER = json.JSONDecoder(object_hook=_restored)


class MetricsWriter:
    """Appends records to `metrics.jsonl`. One process writes; any number may read meanwhile."""

    def __init__(self, path: Path) -> None:
        with suppress(FileNotFoundError), path.open("rb+") as file:
            if size := file.seek(0, os.SEEK_END):
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:  # the record of a long run is large
                    whole = data.rfind(b"\n") + 1
                if whole != size:  # torn
                    file.truncate(whole)
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line. Raises `OSError`: the disk is full; the partial line is cut off again."""
        data = (encode(record) + "\n").encode()
        start = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, data)
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError as error:
            os.ftruncate(self._descriptor, start)
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def iter_metrics(path: Path, shape: Mapping[str, Shape] = STEP) -> Iterator[dict[str, Any]]:
    """Records of a run in order, without a torn last line; empty without a file. Raises `StoreError`: a line is no
    record of this shape."""
    file = open_regular(path)
    if file is None:
        return
    with file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE), b""), start=1):
            if line.endswith(b"\n"):
                yield _record(line, f"{path}, line {number}", shape)
            elif len(line) == MAX_LINE:  # as behind a hole
                raise StoreError(f"{path}, line {number} is longer than {MAX_LINE} bytes, as no record of a step is")


def _record(line: bytes, where: str, shape: Mapping[str, Shape] = STEP) -> dict[str, Any]:
    """Raises `StoreError`: the line is no record of a step."""
    try:
        record = decode(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{where} is not a record: {error}") from error
    wrong = fault(record, shape)
    if wrong:
        raise StoreError(f"{where} is not a record of a step: {wrong}")
    return record


def read_columns(path: Path, keys: Sequence[str]) -> dict[str, list[Any]]:
    """Fields of all records, a list a field; None where a record lacks one.

    Raises `StoreError`: a line is no record, or one of these fields has another kind than in `STEP`.
    """
    columns: dict[str, list[Any]] = {key: [] for key in keys}
    shape = {name: of for name, of in STEP.items() if name.removesuffix("?") in columns}
    for record in iter_metrics(path, shape):
        for key, values in columns.items():
            values.append(record.get(key))
    return columns


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return list(iter_metrics(path))


def tail(path: Path) -> list[dict[str, Any]]:
    """Newest records, at most `NEWEST`, read from the end of the file; empty without one.

    In all but the last one non-finite numbers stay texts, which tables of a thousand runs pass over. Raises
    `StoreError`: a line is no record, or the last one none of a step.
    """
    file = open_regular(path)
    if file is None:
        return []
    with file:
        begin = file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
    lines = (lines[1:] if begin and len(lines) > 1 else lines)[-NEWEST:]
    try:
        records = [json.loads(line) for line in lines[:-1]]
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}, among its last lines: one is not a record: {error}") from error
    return records + [_record(line, f"{path}, its last line") for line in lines[-1:]]


def numbers(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Finite numbers of records at a path of `harness.store.fields`."""
    found, keys = [], name.split("/")
    for record in records:
        value: Any = record
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if type(value) in (float, int) and math.isfinite(value):
            found.append(value)
    return found


def write_summary(
    path: Path,
    status: str,
    steps: int,
    records: Sequence[Mapping[str, Any]],
    first_steps: Collection[int],
    facts: Mapping[str, Any],
) -> None:
    """Write `summary.json` from a run's entire record and further facts; quartiles exclude `first_steps` (warm-up)."""
    last: Mapping[str, Any] = records[-1] if records else {}
    times = [record["step_time_s"] for record in records if record["step"] not in first_steps]
    quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    summary = {
        "status": status,
        "step": last.get("step", 0),
        "steps": steps,
        "tokens": sum(record["tokens"] for record in records),
        "loss": last.get("loss"),
        "grad_norm": last.get("grad_norm"),
        **facts,
        "step_time_s": dict(zip(("p25", "median", "p75"), quartiles, strict=False)),
    }
    write_json(path, plain(summary))


def cut_back(path: Path, step: int, begins_after: int = 0) -> int:
    """Truncate the records to `step`, that of a checkpoint; returns their number.

    begins_after: step of another run's checkpoint from which this record began. Raises `StoreError`: the record lacks
    steps up to `step`.
    """
    kept = [record for record in iter_metrics(path) if record["step"] <= step]
    steps = [record["step"] for record in kept]
    if steps != list(range(begins_after + 1, step + 1)):
        raise StoreError(
            f"{path} holds {len(steps)} of the {step - begins_after} steps the checkpoint stands on; "
            "remove ckpt/ to start this run from step 0"
        )
    if kept or path.exists():
        write_atomic(path, "".join(encode(record) + "\n" for record in kept))
    return len(kept)
