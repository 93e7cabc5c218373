"""A golden file: one run's record in less than 1 MB (numpy's `.npz`), to be kept beside the code that it guards.

It holds what a verdict needs of a control but for whole tensors: configuration, origin, numbers of every step, digests
of weights and data, sketches of every tensor at as many steps as fit. Whoever reads it gets a `Record` as of any run
(`record.load`). Numbers keep their bits; the machine's names and paths are left out.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness.config.errors import refuse
from harness.store.check_stream import MOMENTS, CheckedTensor, Forward, Stream, step_columns, tensor_columns
from harness.store.errors import StoreError
from harness.store.redaction import redacted
from harness.store.screen import counted

VERSION = 2
LIMIT_BYTES = 1_000_000
ANEW = "make it anew by `harness baseline RUN --out FILE`"


def encoded(name: str, facts: Mapping[str, Any], stream: Stream) -> bytes:
    """The file. Args: facts: of the record but for its stream, as `read` gives them.

    Raises `BadRequest`: the run has too many steps or tensors for `LIMIT_BYTES`.
    """
    room = min(len(stream.kept[0]), LIMIT_BYTES // max(1, 8 * len(stream.tensors)))  # more is not even packed
    while True:
        data = _packed({**facts, "version": VERSION, "name": name}, stream, room)
        if len(data) < LIMIT_BYTES:
            return data
        if room <= 1:
            size = f"{counted(len(stream.steps), 'step')} and {counted(len(stream.tensors), 'tensor')}"
            problem = f"takes {len(data):,} bytes for {size}, and {LIMIT_BYTES:,} fit"
            raise refuse(f"baseline {name}", problem, fix="make it of a run with fewer steps")
        room = max(1, int(0.9 * room * LIMIT_BYTES / len(data)))


def _packed(facts: Mapping[str, Any], stream: Stream, room: int) -> bytes:
    """Args: room: most steps whose tensors are kept: half of them the first ones, the rest evenly up to the last."""
    steps, rows = stream.kept
    dense = min(len(steps), (room + 1) // 2)
    chosen = np.arange(dense) if room < len(steps) else np.arange(len(steps))
    if room < len(steps):
        chosen = np.unique([*chosen, *np.linspace(len(steps) - 1, dense, room - dense, dtype=np.int64)])
    kept = rows[chosen].copy()
    kept[..., [tensor_columns(stream.sketches).index(name) for name in MOMENTS]] = np.nan  # for a resume alone
    tensors = [[each.name, list(each.shape)] for each in stream.tensors]
    text = redacted(json.dumps({**facts, "sketches": stream.sketches, "tensors": tensors}))
    numbers, rows = np.asfortranarray(stream.steps), np.asfortranarray(kept)  # by columns: NaN take no room
    file = io.BytesIO()
    np.savez_compressed(
        file, facts=np.frombuffer(text.encode(), np.uint8), steps=numbers, rows=rows, kept=steps[chosen]
    )
    return file.getvalue()


def read(path: Path) -> dict[str, Any]:
    """Fields of a `Record` by name. Raises `StoreError`: no baseline, a damaged one, or of another version."""
    if not zipfile.is_zipfile(path):
        raise StoreError(f"{path} is no baseline, was cut, or is of an older version: {ANEW}")
    try:
        with np.load(path) as held:
            facts, steps, rows, kept = held["facts"], held["steps"], held["rows"], held["kept"]
        found = json.loads(facts.tobytes())
        if found.pop("version") != VERSION:
            raise StoreError(f"{path} is of another version of the format than {VERSION}, which is read here: {ANEW}")
        tensors = tuple(CheckedTensor(name, tuple(shape)) for name, shape in found.pop("tensors"))
        stream = Stream(path, tensors, found.pop("sketches"), 1)
        columns = len(tensor_columns(stream.sketches))
        whole = steps.reshape(-1, len(step_columns(stream.sketches))), rows.reshape(len(kept), len(tensors), columns)
        if (forward := found["forward"]) is not None:
            modules = {name: (tuple(each[0]), each[1]) for name, each in forward["modules"].items()}
            found["forward"] = Forward(forward["rows"], (forward["batch"][0], forward["batch"][1]), modules)
        del found["name"]
    except (KeyError, TypeError, ValueError, IndexError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise StoreError(f"{path} is damaged ({error!r}): {ANEW}") from None
    # What a stream of a run reads of its files when asked, this one has already.
    vars(stream).update(steps=np.ascontiguousarray(whole[0]), kept=(kept, np.ascontiguousarray(whole[1])))
    return {**found, "stream": stream}
