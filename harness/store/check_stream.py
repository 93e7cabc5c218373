"""Stream of a run's observations: one row of numbers a step, and one for every tensor at kept steps.

[Note: Stream of step checks] `metrics.jsonl` says what a step came to; these files that it was right: what was found
beside the engine at every step (`STEP_COLUMNS`), and sketches of every tensor (`TENSOR_COLUMNS`) by which any two runs
can be compared at a step that nobody captured. All are little-endian float64, appended to, and cut back on resume as
`metrics.jsonl` is. NaN means that the engine shows nothing of that kind; 0 that it was looked at and is right.

    stream.json   version, sketches (m), every, columns of steps.f64, tensors (name and shape, in model order)
    steps.f64     a row a step; a finished run has one more, of which only `kept` and `kept_tensor` are there: the
                  weights and moments it ended with against those that its last step left
    tensors.f64   for each kept step a row [tensor][column]; kept are the first `DENSE` and each `every`-th

Outputs of a run's first step by module are `forward` in stream.json, or a former run's `forward.json`:

    version, sketches (m), rows (positions of the global batch that were looked at), batch (sequences and tokens of one
    call: runs that call their modules with other shapes may use other kernels), modules (name, sketches [m], squares)

Their sketches are those of `harness.probe.step_checks.local`, in the order in which modules are first called.

A sketch S_j, j < m, is a signed sum over a tensor's elements in fp64, whose signs depend on j, the tensor's name and
the element's place alone (`harness.probe.step_checks.sketch`).
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from harness.store.errors import StoreError
from harness.store.files import private_folder, write_json
from harness.store.reading import of_format, read_format, read_json
from harness.store.shapes import FORWARD

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FOLDER, FORMER = "step_checks", "vouch"
STREAM = "stream.json"
"""Folder in a run; and of runs by earlier versions, which are read."""
VERSION = 4
FORWARD_FILE, FORWARD_VERSION = "forward.json", 2
DENSE = 512
SMALL = 2**16
"""Numbers in a file from which on it is mapped instead of read."""
BYTES = 8
ONCE = ("again", "drift")
CHECKS = ("sum", "gather", "kept", "replicas", "rule", *ONCE)
"""Columns of every step, each the largest over all tensors, beside the index of that tensor."""
MOMENTS = ("first", "second")
"""Columns of an optimizer's two moments: the signed sum of all followed elements, copies too.

They are compared with those of the same run alone, after a resume.
"""


class CheckedTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]


@cache
def step_columns(sketches: int) -> tuple[str, ...]:
    """Names of a step's numbers, in order.

    `sum` is relative to the norm of the summed local gradients, or of their terms if longer; `gather`, `kept` and
    `replicas` to the norm of the weight; `rule` to the bound of rounding of an element; `again` and `drift` to the norm
    of one rank's local gradients; `norm` is relative. The others are sketches and squared norms of all tensors added
    up: of the averaged sum of local gradients, of the reduced gradient, of the weights after the update.
    """
    checks = tuple(name for check in CHECKS for name in (check, f"{check}_tensor"))
    return (
        *checks, "norm",
        *numbered("local", sketches), *numbered("reduced", sketches), "reduced_squares",
        *numbered("after", sketches), "after_squares",
    )  # fmt: skip


@cache
def tensor_columns(sketches: int) -> tuple[str, ...]:
    """Names of a tensor's numbers at a kept step, in order; `terms_squares` is of all local gradients, averaged."""
    return (
        *numbered("local", sketches), "terms_squares",
        *numbered("reduced", sketches), "reduced_squares",
        *numbered("after", sketches), "after_squares", *MOMENTS,
    )  # fmt: skip


def numbered(name: str, count: int) -> tuple[str, ...]:
    return tuple(f"{name}_{number}" for number in range(count))


def is_kept(step: int, every: int) -> bool:
    return step <= DENSE or step % every == 0


def cadence(steps: int, tensors: int, sketches: int, limit_bytes: int) -> int:
    """Smallest `every` with which all kept steps fit into `limit_bytes`, or the number of steps if none does."""
    row = tensors * len(tensor_columns(sketches)) * BYTES
    room = limit_bytes // row - DENSE if row else steps
    beyond = steps - DENSE
    return 1 if beyond <= room else max(1, -(-beyond // max(1, room)))


# -- writing -----------------------------------------------------------------------------------------------------------


class StreamWriter:
    """Appends to the stream of one run; of a resumed one, after the steps it has done."""

    def __init__(self, run_dir: Path, tensors: Sequence[CheckedTensor], sketches: int, every: int, done: int) -> None:
        """Raises `OSError`: the folder cannot be written.

        Args: tensors: in model order. sketches: m. every: cadence of kept steps beyond `DENSE`. done: steps to keep.
        """
        folder = run_dir / FOLDER
        private_folder(folder)
        self.every = every
        self._row = len(step_columns(sketches)) * BYTES
        named = [{"name": each.name, "shape": list(each.shape)} for each in tensors]
        facts = {"version": VERSION, "sketches": sketches, "every": every, "tensors": named}
        facts["columns"] = list(step_columns(sketches))
        before = read_json(folder / STREAM, dict) or {} if done else {}
        write_json(folder / STREAM, facts | {name: before[name] for name in ("forward",) if name in before})
        self._table = len(tensors) * len(tensor_columns(sketches)) * BYTES
        self._steps = _appending(folder / "steps.f64", self._row, done)
        kept = sum(is_kept(step, every) for step in range(1, done + 1))
        self._tensors = _appending(folder / "tensors.f64", self._table, kept)

    def write(self, step: int, row: Sequence[float], tensors: NDArray[np.float64] | None = None) -> None:
        """tensors: None in the row that follows the last step."""
        self._steps.write(struct.pack(f"<{len(row)}d", *row))
        if tensors is not None and is_kept(step, self.every):
            self._tensors.write(tensors.astype("<f8").tobytes())

    def leave_out(self, step: int) -> None:
        """Write NaN for a step that was not looked at."""
        self._steps.write(_nothing(self._row))
        if is_kept(step, self.every):
            self._tensors.write(_nothing(self._table))

    def sync(self) -> None:
        for file in (self._steps, self._tensors):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        self._steps.close()
        self._tensors.close()


def _appending(path: Path, row_bytes: int, rows: int) -> IO[bytes]:
    file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115 - kept open over the run
    there = min(file.seek(0, os.SEEK_END) // row_bytes, rows) if row_bytes else 0
    file.truncate(there * row_bytes)
    file.seek(0, os.SEEK_END)
    file.write(_nothing((rows - there) * row_bytes))
    return file


def _nothing(count: int) -> bytes:
    """NaN in so many bytes."""
    return struct.pack("<d", math.nan) * (count // BYTES)


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Stream:
    folder: Path
    tensors: tuple[CheckedTensor, ...]
    sketches: int
    every: int

    @cached_property
    def steps(self) -> NDArray[np.float64]:
        """[rows, columns]: row s - 1 is step s; a finished run has one row more than steps."""
        return _table(self.folder / "steps.f64", len(step_columns(self.sketches)))

    def column(self, name: str) -> NDArray[np.float64]:
        """One number over all rows. Raises `ValueError`: there is no such column."""
        values: NDArray[np.float64] = self.steps[:, step_columns(self.sketches).index(name)]
        return values

    @cached_property
    def looked(self) -> NDArray[np.bool_]:
        """[rows]: True of a step that was looked at; where looking is dear, others are left out (`leave_out`)."""
        import numpy as np

        found: NDArray[np.bool_] = np.logical_not(np.isnan(self.steps).all(axis=1))
        return found

    @cached_property
    def kept(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Kept steps [n] that were looked at, counted from 1, and their tensors' numbers [n, tensors, columns]."""
        import numpy as np

        columns = len(tensor_columns(self.sketches))
        rows = _table(self.folder / "tensors.f64", len(self.tensors) * columns)
        steps = np.arange(1, len(self.steps) + 1)
        chosen = steps[(steps <= DENSE) | (steps % self.every == 0)][: len(rows)]
        found, looked = rows[: len(chosen)].reshape(len(chosen), len(self.tensors), columns), self.looked[chosen - 1]
        return (chosen, found) if looked.all() else (chosen[looked], found[looked])


def last(run_dir: Path, step: int, names: Sequence[str], columns: Sequence[str]) -> NDArray[np.float64] | None:
    """Columns [tensors, columns] of a kept step; None if it is not there, if one is NaN, or of other tensors."""
    found = read(run_dir)
    if found is None or [each.name for each in found.tensors] != list(names):
        return None
    steps, rows = found.kept
    if step not in steps:
        return None
    places = [tensor_columns(found.sketches).index(name) for name in columns]
    wanted: NDArray[np.float64] = rows[steps.tolist().index(step)][:, places].copy()
    return None if bool((wanted != wanted).any()) else wanted


def _table(path: Path, columns: int) -> NDArray[np.float64]:
    import numpy as np

    rows = path.stat().st_size // (columns * BYTES) if path.is_file() and columns else 0
    if not rows:
        return np.empty((0, columns))
    if rows * columns <= SMALL:
        return np.fromfile(path, "<f8", rows * columns).reshape(rows, columns)
    return np.memmap(path, "<f8", "r", shape=(rows, columns)).view(np.ndarray)  # a subclass costs at every slice


def folder_of(run_dir: Path) -> Path:
    return run_dir / (FORMER if (run_dir / FORMER).is_dir() else FOLDER)


def read(run_dir: Path) -> Stream | None:
    """None without a stream. Raises `StoreError`: it is unreadable."""
    folder = folder_of(run_dir)
    facts = read_format(folder / STREAM, VERSION)
    if facts is None:
        return None
    try:
        tensors = tuple(CheckedTensor(str(each["name"]), tuple(map(int, each["shape"]))) for each in facts["tensors"])
        sketches, every = int(facts["sketches"]), int(facts["every"])
        if facts["version"] != VERSION or sketches < 1 or every < 1:
            raise ValueError(f"version={facts['version']!r}, sketches={sketches}, every={every}")
    except (KeyError, TypeError, ValueError, OverflowError) as error:  # an endless number is no integer
        raise StoreError(f"{folder / STREAM} is damaged: {error!r}") from None
    return Stream(folder, tensors, sketches, every)


# -- outputs of the first step -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forward:
    rows: int
    batch: tuple[int, int]
    modules: Mapping[str, tuple[tuple[float, ...], float]]
    """By name, in the order of first calls: sketches, and the sum of squares of all elements."""


def write_forward(run_dir: Path, rows: int, batch: tuple[int, int], modules: Mapping[str, Sequence[float]]) -> None:
    """Called once, by the first rank, after its `StreamWriter` is made. Raises `OSError`: it cannot be written."""
    described = [
        {"name": name, "sketches": list(each[:-1]), "squares": each[-1]}
        for name, each in modules.items()
        if all(math.isfinite(value) for value in each)  # JSON has no others, and the loss tells of them
    ]
    facts = {"version": FORWARD_VERSION, "rows": rows, "batch": list(batch), "modules": described}
    path = run_dir / FOLDER / STREAM
    write_json(path, {**(read_json(path, dict) or {}), "forward": facts})


def read_forward(run_dir: Path) -> Forward | None:
    """None if not observed. Raises `StoreError`: the file is unreadable."""
    path = folder_of(run_dir) / STREAM
    if "forward" in (stream := read_json(path, dict) or {}):
        facts = of_format(stream["forward"], path, FORWARD_VERSION, FORWARD)
    else:
        path = path.with_name(FORWARD_FILE)
        facts = read_format(path, FORWARD_VERSION, FORWARD)
    if facts is None:
        return None
    try:
        numbers = {each["name"]: tuple(map(float, (*each["sketches"], each["squares"]))) for each in facts["modules"]}
    except OverflowError as error:
        raise StoreError(f"{path} is damaged: {error}") from None
    if wrong := [each for each in numbers.values() if not all(map(math.isfinite, each))]:
        raise StoreError(f"{path} is damaged: {wrong[0]} are not all finite")
    modules = {name: (each[:-1], each[-1]) for name, each in numbers.items()}
    return Forward(facts["rows"], (facts["batch"][0], facts["batch"][1]), modules)
