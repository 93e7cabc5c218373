"""Series of numbers that other programs left, as runs of this store: wandb's offline files, TensorBoard's events, CSV,
JSON lines, Megatron's golden values.

A run of this kind has `metrics.jsonl` and its origin, and nothing else that a verdict could read: no weights, no
gradients, no data (`harness.parity.series`).
"""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from harness.config.errors import refuse
from harness.store import commands, status
from harness.store.errors import StoreError
from harness.store.files import write_atomic, write_json
from harness.store.metrics import encode
from harness.store.provenance import SERIES, WATCHED
from harness.store.reading import folder_names, read_text
from harness.store.rundir import CONFIG, RunDir
from harness.store.status import State, Status

Table = dict[str, dict[int, float]]
"""By column and step."""
MEASURES = ("loss", "grad_norm", "lr", "tokens")
STEPS = ("step", "_step", "Step", "global_step", "iteration", "train/step", "trainer/global_step")
"""Columns taken for the step, the first that is there."""


def import_series(source: Path, target: Path, columns: Mapping[str, str]) -> list[int]:
    """Write a run directory; returns the steps of its loss.

    Args: columns: column of the source by measure, one of `MEASURES` or `step`.

    Raises `BadRequest`: the source is missing, of no known kind, damaged, without such a column or any number; a
    package that reads it is missing; or the target is there.
    """
    if target.exists():
        raise refuse(str(target), "is there already", fix="name another --into, or remove it")
    kind, read = _kind(source)
    try:
        table = read(source, columns.get("step"))
    except ImportError:
        raise refuse(str(source), f"needs {kind}, which is not installed", fix=commands.install(kind)) from None
    except (StoreError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise refuse(str(source), f"cannot be read as {kind}: {error}") from error
    found = {name: _column(source, name, column, table) for name, column in columns.items() if name != "step"}
    steps = sorted(set().union(*found.values()))
    lines = [{"step": at, **{name: each[at] for name, each in found.items() if at in each}} for at in steps]
    config = {"model": {"name": "unknown"}, "train": {"steps": steps[-1]}, "study": {"name": target.parent.name}}
    series = {"file": source.name, "kind": kind, "columns": dict(columns)}
    target.mkdir(parents=True)
    write_atomic(target / "metrics.jsonl", "".join(f"{encode(line)}\n" for line in lines))
    write_json(RunDir(target).provenance, {WATCHED: 1, SERIES: series, "sources_digest": WATCHED})
    status.write(target, Status(State.done, f"imported from {source.name}", 0, steps=steps[-1]))
    write_atomic(target / CONFIG, yaml.safe_dump(config, sort_keys=False))
    return sorted(found["loss"])


def _column(source: Path, measure: str, column: str, table: Table) -> dict[int, float]:
    if column not in table:
        some = ", ".join(sorted(table)[:20]) + (", ..." if len(table) > 20 else "")
        problem = f"is no column of {source}" if table else f"finds nothing: {source} is empty"
        raise refuse(f"--columns {measure}={column}", problem, choices=some)
    if not table[column]:
        raise refuse(f"--columns {measure}={column}", f"holds no number in {source}")
    return table[column]


# -- readers -----------------------------------------------------------------------------------------------------------


def _of_rows(rows: Iterable[Mapping[str, Any]], step: str | None) -> Table:
    """Columns of the rows that have a step; the later row of a step replaces the earlier, as after a resume.

    Raises `ValueError`: none has one.
    """
    held = list(rows)
    names = dict.fromkeys(name for row in held for name in row)
    at = step or next((name for name in STEPS if name in names), None)
    table: Table = {}
    if not held:
        return table
    if at is None or at not in names:
        raise ValueError(f"no row has {at or 'a step'}, but {', '.join(map(str, names))}; say --columns step=COLUMN")
    for row in held:
        place = _number(row.get(at))
        if place is None:
            continue
        if not place.is_integer():
            raise ValueError(f"{at}={row[at]!r} is no step")
        for name, value in row.items():
            column = table.setdefault(str(name), {})
            if name != at and (found := _number(value)) is not None:
                column[int(place)] = found
    return table


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def _csv(source: Path, step: str | None) -> Table:
    with source.open(newline="", encoding="utf-8") as file:
        return _of_rows(csv.DictReader(file, delimiter="\t" if source.suffix == ".tsv" else ","), step)


def _jsonl(source: Path, step: str | None) -> Table:
    lines = (read_text(source) or "").splitlines()
    return _of_rows((dict(json.loads(line)) for line in lines if line.strip()), step)


def _megatron(source: Path, step: str | None) -> Table:
    """Golden values: by metric a table of steps, or a list that begins at `start_step` in steps of an interval."""
    table: Table = {}
    for name, each in json.loads(read_text(source) or "").items():
        values = each["values"]
        if isinstance(values, list):
            values = {each["start_step"] + place * each["step_interval"]: value for place, value in enumerate(values)}
        known = {int(at): _number(value) for at, value in values.items()}
        table[name] = {at: value for at, value in known.items() if value is not None}
    return table


def _tensorboard(source: Path, step: str | None) -> Table:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(source), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    table: Table = {name: {each.step: each.value for each in events.Scalars(name)} for name in tags["scalars"]}
    for name in tags["tensors"]:
        held = [(each.step, make_ndarray(each.tensor_proto)) for each in events.Tensors(name)]
        if all(value.size == 1 and value.dtype.kind == "f" for _, value in held):
            table[name] = {at: float(value) for at, value in held}
    return table


def _wandb(source: Path, step: str | None) -> Table:
    from wandb.proto import wandb_internal_pb2 as messages

    paths = sorted(source.glob("*.wandb")) if source.is_dir() else [source]
    if len(paths) != 1:
        raise ValueError(f"it holds {len(paths)} .wandb files; name one")
    rows = []
    for frame in frames(paths[0].read_bytes()):
        record = messages.Record()  # type: ignore[attr-defined] # made by protobuf as it is imported
        record.ParseFromString(frame)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return _of_rows(rows, step)


Reader = Callable[[Path, str | None], Table]
KINDS: Mapping[str, tuple[str, Reader]] = {
    ".wandb": ("wandb", _wandb),
    "tfevents": ("tensorboard", _tensorboard),
    ".csv": ("csv", _csv),
    ".tsv": ("csv", _csv),
    ".jsonl": ("jsonl", _jsonl),
    ".json": ("megatron", _megatron),
}
"""Part of a file's name, or of one in a folder of wandb's or TensorBoard's; its kind and reader."""


def _kind(source: Path) -> tuple[str, Reader]:
    if not source.exists():
        raise refuse(str(source), "does not exist")
    names = folder_names(source) if source.is_dir() else [source.name]
    parts = list(KINDS)[:2] if source.is_dir() else list(KINDS)
    for part in parts:
        if any(part in name for name in names):
            return KINDS[part]
    problem, choices = "is no kind of series that is known", "a folder of wandb's or TensorBoard's, or a file: "
    raise refuse(str(source), problem, choices=choices + ", ".join(KINDS))


BLOCK, HEADER = 32768, 7
FULL, FIRST, LAST = 1, 2, 4


def frames(data: bytes) -> Iterator[bytes]:
    """Payloads of a `.wandb` file, LevelDB's log format, for which wandb has no reader in Python any more.

    A payload that crosses a block is put together; a torn end, as of a killed run, is left out. Raises `ValueError`: it
    is no such file.
    """
    if data[:4] != b":W&B":
        raise ValueError("it does not begin as wandb's files do")
    place, whole = HEADER, b""
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + HEADER])
        part = data[place + HEADER : place + HEADER + length]
        if len(part) < length:
            return
        place += HEADER + length
        whole = part if kind in (FULL, FIRST) else whole + part
        if kind in (FULL, LAST):
            yield whole
