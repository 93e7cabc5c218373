"""A golden file: one run's record in less than 1 MB of JSON, to be kept beside the code that it guards.

It holds what a verdict needs of a control but for whole tensors: configuration, origin, numbers of every step, digests
of weights and data, sketches of every tensor at as many steps as fit. Whoever reads it gets a `Record` as of any run
(`record.load`). Numbers keep their bits; the machine's names and paths are left out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from harness.config.errors import refuse
from harness.parity.tensors import Float64
from harness.store.check_stream import MOMENTS, CheckedTensor, Forward, Stream, step_columns, tensor_columns
from harness.store.errors import StoreError
from harness.store.metrics import decode, encode
from harness.store.reading import REPAIR, read_json
from harness.store.screen import counted

VERSION = 1
LIMIT_BYTES = 1_000_000
PARTS = ("columns", "moves", "draws", "attempts", "forward")
"""Fields of a record that are packed."""


def encoded(name: str, facts: Mapping[str, Any], stream: Stream) -> str:
    """Text of the file. Args: facts: of the record but for its stream, as `read` gives them, and `replaces`.

    Raises `BadRequest`: the run has too many steps or tensors for `LIMIT_BYTES`.
    """
    parts = {key: facts[key] for key in PARTS}
    parts["forward"] = None if parts["forward"] is None else asdict(parts["forward"])
    plain = {key: each for key, each in facts.items() if key not in PARTS}
    plain |= {"version": VERSION, "name": name, "record": _packed(encode(parts).encode())}
    room = min(len(stream.kept()[0]), LIMIT_BYTES // max(1, 8 * len(stream.tensors)))  # more is not even packed
    while True:
        text = _signed({**plain, "stream": _stream(stream, room)})
        if len(text) < LIMIT_BYTES:
            return text
        if room <= 1:
            size = f"{counted(len(stream.steps), 'step')} and {counted(len(stream.tensors), 'tensor')}"
            problem = f"takes {len(text):,} bytes for {size}, and {LIMIT_BYTES:,} fit"
            raise refuse(f"baseline {name}", problem, fix="make it of a run with fewer steps")
        room = max(1, int(0.9 * room * LIMIT_BYTES / len(text)))


def _stream(stream: Stream, room: int) -> dict[str, Any]:
    """Args: room: most steps whose tensors are kept: half of them the first ones, the rest evenly up to the last."""
    steps, rows = stream.kept()
    dense = min(len(steps), (room + 1) // 2)
    chosen = np.arange(dense) if room < len(steps) else np.arange(len(steps))
    if room < len(steps):
        chosen = np.unique([*chosen, *np.linspace(len(steps) - 1, dense, room - dense, dtype=np.int64)])
    kept = rows[chosen].copy()
    kept[..., [tensor_columns(stream.sketches).index(name) for name in MOMENTS]] = np.nan  # for a resume alone
    return {
        "sketches": stream.sketches,
        "tensors": [[each.name, list(each.shape)] for each in stream.tensors],
        "kept": steps[chosen].tolist(),
        "steps": _of_numbers(stream.steps),
        "rows": _of_numbers(kept),
    }


def _of_numbers(values: Float64) -> str:
    return _packed(values.reshape(len(values), -1).T.astype("<f8").tobytes())  # by columns: those of NaN take no room


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


def _signed(facts: Mapping[str, Any]) -> str:
    return json.dumps({**facts, "digest": _digest(facts)}, indent=1) + "\n"


def _digest(facts: Mapping[str, Any]) -> str:
    named = {key: value for key, value in facts.items() if key != "digest"}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def read(path: Path) -> dict[str, Any]:
    """Fields of a `Record` by name. Raises `StoreError`: no baseline, a damaged one, or of another version."""
    try:
        facts = read_json(path)
    except StoreError as error:
        raise StoreError(str(error).replace(REPAIR, "make it anew by `harness baseline RUN --out FILE`")) from None
    if not isinstance(facts, dict) or "version" not in facts or "digest" not in facts:
        raise StoreError(f"{path} is no baseline: make one by `harness baseline RUN --out FILE`")
    if facts["version"] != VERSION:
        problem = f"has format {facts['version']!r}, and {VERSION} is read here"
        raise StoreError(f"{path} {problem}: make it anew by `harness baseline RUN --out FILE`")
    if facts["digest"] != _digest(facts):
        raise StoreError(f"{path} is damaged or was edited: its content is not what its digest says")
    try:
        parts = decode(zlib.decompress(base64.b64decode(facts["record"])).decode())
        held = parts.pop("forward")
        if held is not None:
            modules = {name: (tuple(each[0]), each[1]) for name, each in held["modules"].items()}
            held = Forward(held["rows"], (held["batch"][0], held["batch"][1]), modules)
        stream = _read_stream(path, facts["stream"])
    except (KeyError, TypeError, ValueError, IndexError, zlib.error) as error:
        raise StoreError(f"{path} is damaged: {error!r}") from None
    return {
        **{key: facts[key] for key in ("config", "provenance", "summary")},
        **parts,
        "forward": held,
        "stream": stream,
    }


def _read_stream(path: Path, facts: Mapping[str, Any]) -> Stream:
    sketches = int(facts["sketches"])
    found = Stream(path, tuple(CheckedTensor(name, tuple(shape)) for name, shape in facts["tensors"]), sketches, 1)
    kept = np.array(facts["kept"], dtype=np.int64)
    columns = len(tensor_columns(sketches))
    rows = _numbers(facts["rows"], len(found.tensors) * columns).reshape(len(kept), len(found.tensors), columns)
    # What a stream of a run reads of its files when asked, this one has already.
    vars(found).update(steps=_numbers(facts["steps"], len(step_columns(sketches))), _kept=(kept, rows))
    return found


def _numbers(text: str, columns: int) -> Float64:
    """[rows, columns]"""
    held = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f8")
    found: Float64 = np.ascontiguousarray(held.reshape(columns, -1).T)
    return found
