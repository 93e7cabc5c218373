"""Captured steps of a run: safetensors files, read through the page cache, tensor by tensor.

Of the present format ([Note: A captured step], harness/probe/capture.py) or the former. Former runs have a file and a
description a kind: `step-`, `witness-`, `update-`, `weights-` and `moments-000001`, with `.safetensors` and `.json`,
and `captured.json` beside them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.config.captured import Captured
from harness.store import tensor_header
from harness.store.errors import StoreError
from harness.store.reading import checked, read_json
from harness.store.shapes import CAPTURED, CAPTURED_STEP, METADATA, WITNESS
from harness.store.tensor_header import Held

Float64 = NDArray[np.float64]


NUMPY_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""Numpy's dtypes by safetensors' names; bf16 as its bits."""


SMALL = 2**16
"""Bytes of a stored tensor up to which its values are kept for a while: 64 MiB of them at most."""


def read_header(path: Path) -> tuple[dict[str, Held], dict[str, str]]:
    """Tensors of a file and its metadata. Raises `StoreError`: it is missing, truncated, or not in the format."""
    tensors, metadata = tensor_header.read(path)
    for name, tensor in tensors.items():
        if tensor.dtype not in NUMPY_DTYPES:
            raise StoreError(f"{path}: {name} has dtype {tensor.dtype}; gradients are {', '.join(NUMPY_DTYPES)}")
    return tensors, metadata


class Capture:
    def __init__(self, path: Path, tensors: Mapping[str, Held] | None = None) -> None:
        """Args: tensors: those of the file to take, by other names; None takes all.

        Raises `StoreError`: the file is missing, truncated, or not in the format.
        """
        self.path = path
        self.tensors = read_header(path)[0] if tensors is None else tensors

    @cached_property
    def _bytes(self) -> NDArray[np.uint8]:
        return np.memmap(self.path, dtype=np.uint8, mode="r").view(np.ndarray)  # a subclass costs at every slice

    def raw(self, name: str) -> NDArray[np.generic]:
        """Stored tensor, flat, without a copy; bf16 as uint16."""
        tensor = self.tensors[name]
        piece = self._bytes[tensor.start : tensor.start + tensor.size]
        dtype = np.dtype(NUMPY_DTYPES[tensor.dtype])
        return piece.view(dtype) if tensor.start % dtype.itemsize == 0 else np.frombuffer(piece.tobytes(), dtype)

    def values(self, name: str) -> Float64:
        """Tensor in float64 and in its shape, read-only; every stored dtype fits exactly."""
        return _small(self, name) if self.tensors[name].size <= SMALL else self._values_of(name)

    def _values_of(self, name: str) -> Float64:
        raw = self.raw(name)
        if self.tensors[name].dtype == "BF16":
            raw = (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return raw.astype(np.float64).reshape(self.tensors[name].shape)


@lru_cache(maxsize=512)
def _small(capture: Capture, name: str) -> Float64:
    """Values of a small tensor, which several checks ask for."""
    found = capture._values_of(name)
    found.flags.writeable = False
    return found


class Computed(Capture):
    """Tensors worked out in fp64 from those of captures."""

    def __init__(self, of: Capture, values: Callable[[str], Float64]) -> None:
        wide = {name: Held("F64", each.shape, 0, 8 * math.prod(each.shape)) for name, each in of.tensors.items()}
        super().__init__(of.path, wide)
        self._values = values

    def values(self, name: str) -> Float64:
        return self._values(name)

    def raw(self, name: str) -> NDArray[np.generic]:
        return self.values(name).ravel()


FORMER = ("step-", "witness-", "update-", "weights-", "moments-")


@dataclass(frozen=True)
class Recomputed:
    capture: Capture
    """Sum of all local gradients, averaged, by parameter; fp64."""
    terms: Mapping[str, float]
    """Root of the sum of the squared norms of the terms, averaged alike."""
    wrong_weights: tuple[Mapping[str, Any], ...]
    """Weights of a rank's forward that differ from rank 0's main weights: rank, tensor, what."""


@dataclass
class Steps:
    plan: Captured = field(default_factory=Captured)
    gradients: dict[int, Capture] = field(default_factory=dict)
    updates: dict[int, Capture] = field(default_factory=dict)
    weights: dict[int, Capture] = field(default_factory=dict)
    moments: dict[int, Capture] = field(default_factory=dict)
    witnesses: dict[int, Recomputed] = field(default_factory=dict)
    ends: dict[int, Capture] = field(default_factory=dict)
    """Weights after captured updates."""
    problems: list[str] = field(default_factory=list)


def read(folder: Path, steps: Sequence[int] | None, updates: Sequence[int] | None) -> Steps:
    """Args: steps, updates: as in the configuration, which steps were to be captured; None: those that the run chose.

    What is damaged is one of `problems`.
    """
    files, found = sorted(folder.glob("*.safetensors")), Steps()
    is_former = any(each.name.startswith(FORMER) for each in folder.glob("*.json"))
    headers: dict[int, _Header | None] = {}
    if not is_former:
        headers = {step: _header(path, found.problems) for path in files if (step := _step_of(path))}
    plans = [header.facts["plan"] for header in headers.values() if header and "plan" in header.facts]
    if steps is not None:
        found.plan = Captured(tuple(steps), tuple(updates or ()))
    elif plans or is_former:
        plan = plans[0] if plans else _read_plan(folder, found.problems) or {"gradients": (), "updates": ()}
        found.plan = Captured(tuple(plan["gradients"]), tuple(plan["updates"]))
    elif files and all(headers.values()):
        found.problems.append(f"no step of {folder} has a plan: which steps were to be captured is not known")
    if is_former:
        _take_former(found, folder)
        return found
    for step in sorted({*found.plan.gradients, *found.plan.updates}) if files else ():
        if step not in headers:
            found.problems.append(f"{folder / f'step-{step:06d}.safetensors'} is missing")
        elif (header := headers[step]) is not None:
            _take(found, step, header)
    return found


@dataclass(frozen=True)
class _Header:
    path: Path
    tensors: Mapping[str, Held]
    facts: Mapping[str, Any]

    def part(self, prefix: str) -> Capture | None:
        mine = {name.removeprefix(prefix): each for name, each in self.tensors.items() if name.startswith(prefix)}
        return Capture(self.path, mine) if mine else None


def _step_of(path: Path) -> int:
    kind, _, number = path.stem.partition("-")
    return int(number) if kind == "step" and number.isdecimal() else 0


def _header(path: Path, problems: list[str]) -> _Header | None:
    try:
        tensors, metadata = read_header(path)
        where = f"{path}: its description"
        facts = checked(json.loads(metadata.get(METADATA, "null")), CAPTURED_STEP, where)
        if "terms" in facts:
            checked(facts, WITNESS, where)
    except (StoreError, TypeError, AttributeError) as error:
        problems.append(str(error))
    except (ValueError, RecursionError) as error:
        problems.append(f"{path} has a damaged description: {error}")
    else:
        return _Header(path, tensors, facts)
    return None


def _read_plan(folder: Path, problems: list[str]) -> Mapping[str, Any] | None:
    path = folder / "captured.json"
    try:
        facts = read_json(path, CAPTURED)
    except StoreError as error:
        problems.append(str(error))
        return None
    if facts is None:
        problems.append(f"{path} is missing: which steps were to be captured is not known")
    return facts


def _take(found: Steps, step: int, header: _Header) -> None:
    """Add the parts of a captured step; earlier ones are there."""
    gradients, after = header.part("gradient/"), header.part("after/")
    before = header.part("before/")
    if gradients is not None:
        found.gradients[step] = gradients
        try:
            if (local := header.part("local/")) is not None:
                found.witnesses[step] = _recomputed(header, gradients, local)
        except (KeyError, ValueError) as error:
            found.problems.append(f"{header.path} has a damaged description: {error!r}")
    if before is not None:
        found.weights[step] = before
    if (moments := header.part("moment/")) is not None:
        found.moments[step] = moments
    start = before if before is not None else found.ends.get(step - 1)
    if after is not None and start is not None:
        found.updates[step] = _difference(after, start)
        found.ends[step] = after


def _difference(after: Capture, before: Capture) -> Capture:
    common = {name: each for name, each in after.tensors.items() if name in before.tensors}
    return Computed(Capture(after.path, common), lambda name: after.values(name) - before.values(name))


def _recomputed(header: _Header, gradients: Capture, local: Capture) -> Recomputed:
    whole = set(header.facts.get("whole", ()))

    def values(name: str) -> Any:
        return local.values(name) if name in whole else gradients.values(name) + local.values(name)

    terms = {name: float(header.facts["terms"][name]) for name in local.tensors}
    return Recomputed(Computed(local, values), terms, tuple(header.facts["wrong_weights"]))


def _take_former(found: Steps, folder: Path) -> None:
    """Add all steps of the former format."""

    def opened(path: Path) -> Capture | None:
        try:
            if read_json(path.with_suffix(".json"), dict) is None:
                raise StoreError(f"{path} is not complete: the description beside it is missing")
            return Capture(path)
        except StoreError as error:
            found.problems.append(str(error))
            return None

    def of(kind: str, wanted: Iterable[int], *, all_or_none: bool = True) -> dict[int, Capture]:
        paths = {int(step): folder / f"{kind}-{int(step):06d}.safetensors" for step in wanted}
        there = [step for step, path in paths.items() if path.exists()]
        read = {step: opened(paths[step]) for step in (paths if there and all_or_none else there)}
        return {step: capture for step, capture in read.items() if capture is not None}

    found.updates = of("update", found.plan.updates)
    found.gradients = of("step", found.plan.gradients)
    found.weights = of("weights", found.updates, all_or_none=False)
    found.moments = of("moments", found.updates, all_or_none=False)
    for step, capture in of("witness", found.plan.gradients).items():
        path = capture.path.with_suffix(".json")
        try:
            facts = read_json(path, WITNESS) or {}
            terms = {name: float(facts["terms"][name]) for name in capture.tensors}
            found.witnesses[step] = Recomputed(capture, terms, tuple(facts["wrong_weights"]))
        except StoreError as error:
            found.problems.append(str(error))
        except (KeyError, ValueError) as error:
            found.problems.append(f"{path} is damaged: {error!r}")
