"""One run directory of what its ranks saw, in the format of every other run; see [Note: Parts] in `parts`."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from harness.capture import describe
from harness.capture.parts import COLUMNS, END, FACTS, FOLDER
from harness.probe.capture import write_final, write_step
from harness.probe.step_checks.sketch import SKETCHES
from harness.store import check_stream, status
from harness.store.check_stream import BYTES, CheckedTensor, StreamWriter
from harness.store.errors import StoreError
from harness.store.files import held, write_json
from harness.store.metrics import MetricsWriter, decode, encode
from harness.store.reading import folder_names, read_json, read_text
from harness.store.status import State, Status

Array = NDArray[np.float64]
Places = tuple[tuple[int, ...], ...]
"""Blocks of a tensor (`Place.numbers`, `Range.numbers`); none where a rank has nothing of it."""
LIMIT_BYTES = 256 << 20
"""Most bytes of sketches on disk; beyond it, later steps are thinned (`check_stream.cadence`)."""
ROUNDED = 1e-3
"""Relative: how near the ratio of gradients is to one over the ranks, where they are averaged."""


def if_last(path: Path, world_size: int) -> bool:
    """Merge a run's parts if every rank has ended; True if that was done."""
    with held(path / f"{FOLDER}.lock"):
        ended = [name for name in folder_names(path / FOLDER) if (path / FOLDER / name / END).exists()]
        if len(ended) < world_size or (path / "summary.json").exists():
            return False
        merge(path)
        return True


def merge(path: Path) -> None:
    """Write the run directory from the parts that are there, and remove them."""
    parts = [Rank(path / FOLDER / name) for name in sorted(folder_names(path / FOLDER))]
    seeing, steps = [each for each in parts if each.facts], 0
    if seeing:
        run = Merged(path, seeing)
        run.write()
        steps = run.steps
    _end(path, steps, _incomplete(parts, steps))
    shutil.rmtree(path / FOLDER, ignore_errors=True)


def _end(path: Path, steps: int, problem: str) -> None:
    state = State.failed if problem else State.done
    present = status.read(path) or Status(State.running, "", 0)
    reason = f"incomplete: {problem}" if problem else "all ranks ended"
    status.write(path, replace(present, state=state, reason=reason, steps=steps))


def _incomplete(parts: Sequence[Rank], steps: int) -> str:
    """Why the record is not whole; empty if it is."""
    told = [f"{each.folder.name}: {each.end['reason']}" for each in parts if each.end.get("reason")]
    told += [f"{each.folder.name} has not ended" for each in parts if not each.end]
    nothing = "saw no step: none was told after an update of the optimizer that watch was given"
    told += [f"{each.folder.name} {nothing}" for each in parts if not each.facts]
    if told or not parts:
        return told[0] if told else "no step was seen"
    missing = parts[0].facts["world_size"] - len(parts)
    if missing:
        return f"{missing} of {parts[0].facts['world_size']} ranks left nothing"
    odd = next((each for each in parts if len(each.lines) > steps), None)
    return "" if odd is None else f"{odd.folder.name} made {len(odd.lines)} steps, and another {steps}"


def _numel(place: Sequence[int]) -> int:
    top, bottom, left, right = place
    return bottom - top if left < 0 else (bottom - top) * (right - left)


def _mean(values: Sequence[float]) -> float | None:
    total = math.fsum(values) if all(map(math.isfinite, values)) else sum(values)  # `fsum` raises for inf - inf
    return total / len(values) if values else None


class Rank:
    """Part of one rank, as it lies on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = read_json(folder / FACTS) or {}
        self.end: dict[str, Any] = read_json(folder / END) or {}

    @property
    def rank(self) -> int:
        return int(self.facts["rank"])

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        found = []
        for line in (read_text(self.folder / "steps.jsonl") or "").splitlines():
            try:
                found.append(decode(line))
            except ValueError:  # torn, as the last one of a process that was killed
                break
        return found[: len(self.rows)]

    @cached_property
    def rows(self) -> Array:
        """[steps, tensors, columns]"""
        path, shape = self.folder / "rows.f64", (len(self.facts["tensors"]), len(COLUMNS))
        count = path.stat().st_size // (BYTES * math.prod(shape))
        return np.memmap(path, "<f8", "r", shape=(count, *shape)).view(np.ndarray) if count else np.empty((0, *shape))

    @cached_property
    def places(self) -> dict[str, Places]:
        return {each["name"]: tuple(map(tuple, each["places"])) for each in self.facts["tensors"]}

    @cached_property
    def index(self) -> dict[str, int]:
        return {each["name"]: place for place, each in enumerate(self.facts["tensors"])}

    def pieces(self, name: str) -> Mapping[str, Tensor]:
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            return {}
        with safe_open(path, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict

    def part(self, kind: str, step: int, name: str) -> Array:
        """Sketches and squares of one tensor at a step."""
        at = COLUMNS.index(f"{kind}_0")
        found: Array = self.rows[step, self.index[name], at : at + SKETCHES]
        return found

    def square(self, kind: str, step: int, name: str) -> float:
        return float(self.rows[step, self.index[name], COLUMNS.index(f"{kind}_squares")])


class Merged:
    def __init__(self, path: Path, parts: Sequence[Rank]) -> None:
        self.path, self.parts = path, parts
        self.steps = min(len(each.lines) for each in parts)
        shapes = {each["name"]: tuple(each["shape"]) for part in parts for each in part.facts["tensors"]}
        self.tensors = [CheckedTensor(name, shape) for name, shape in shapes.items()]
        self.holders = {each.name: self._holders(each) for each in self.tensors}
        self.fed = [self._fed(step) for step in range(self.steps)]
        self.divisor = self._divisor()
        for each in self.fed:
            each["divisor"] = self.divisor

    def _holders(self, tensor: CheckedTensor) -> list[Rank]:
        """A rank for each of its pieces; none where they do not make up the tensor."""
        found: dict[Places, Rank] = {}
        for part in self.parts:
            if places := part.places.get(tensor.name):
                found.setdefault(places, part)
        covered = sum(_numel(place) for places in found for place in places)
        return list(found.values()) if covered == math.prod(tensor.shape) else []

    def _fed(self, step: int) -> dict[str, Any]:
        """Digest and size of the batch of all ranks; those with the same rows were given them together."""
        lines = [part.lines[step] for part in self.parts]
        readers = {tuple(line["rows"]): line for line in lines if line["rows"]}
        rows = sorted({row for line in readers for row in line})
        digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16] if rows else None
        return {
            "digest": digest,
            "readers": len(readers) or len(self.parts),
            "rows": sum(len(each) for each in readers),
            "tokens": sum(line["tokens"] for line in readers.values()),
            "microbatches": max(1, *(line["forwards"] for line in lines)),
            "repeats": any(line.get("repeats") for line in lines),
        }

    def _divisor(self) -> int:
        """Number that the sum of local gradients is divided by: 1 where the program adds them up, else of the ranks."""
        ranks = int(self.fed[0]["readers"]) if self.fed else 1
        ratios = []
        for tensor in self.tensors if self.steps else ():
            local, reduced = self._local(0, tensor.name), self._sum("reduced", 0, tensor.name)
            if float(local @ local) > 0:
                ratios.append(float(local @ reduced) / float(local @ local))
        return 1 if ratios and abs(statistics.median(ratios) - 1) < ROUNDED else ranks

    # -- sketches ----------------------------------------------------------------------------------------------------

    def _sum(self, kind: str, step: int, name: str) -> Array:
        """Sketches of the whole tensor; not numbers where a part of it is unknown."""
        holders = self.holders[name]
        return np.sum([each.part(kind, step, name) for each in holders], 0) if holders else np.full(SKETCHES, np.nan)

    def _squares(self, kind: str, step: int, name: str) -> float:
        holders = self.holders[name]
        return sum(each.square(kind, step, name) for each in holders) if holders else math.nan

    def _local(self, step: int, name: str) -> Array:
        """Sketches of the sum of all ranks' local gradients."""
        seen = [part.part("local", step, name) for part in self._seeing(name)]
        found: Array = np.sum(seen, 0) if seen else np.full(SKETCHES, np.nan)
        return found

    def _seeing(self, name: str) -> list[Rank]:
        """Ranks whose local gradients add up; of those that were fed the same rows, the first."""
        first: dict[tuple[str, ...], Rank] = {}
        for part in self.parts:
            if name in part.index:
                rows = tuple(part.lines[0]["rows"]) if part.lines else ()
                first.setdefault(rows or (f"rank {part.rank}",), part)
        return list(first.values())

    def _row(self, step: int) -> tuple[list[float], Array]:
        known: dict[str, Any] = {}
        table = np.full((len(self.tensors), len(check_stream.tensor_columns(SKETCHES))), np.nan)
        kept, replicas = np.full((2, len(self.tensors)), 0.0)
        for index, (name, _) in enumerate(self.tensors):
            terms = sum(part.square("terms", step, name) for part in self._seeing(name)) / self.divisor**2
            squares = [self._squares(kind, step, name) for kind in ("reduced", "after")]
            table[index, : -len(check_stream.MOMENTS)] = [
                *self._local(step, name) / self.divisor, terms,
                *self._sum("reduced", step, name), squares[0],
                *self._sum("after", step, name), squares[1],
            ]  # fmt: skip
            scale = math.sqrt(squares[1]) or 1.0
            begins = self._sum("begin", step, name)
            left = self._sum("after", step - 1, name) if step else begins
            kept[index] = np.abs(begins - left).max() / scale
            replicas[index] = self._apart(step, name) / scale
        for check, values in (("kept", kept), ("replicas", replicas)):
            if not np.isnan(values).all():
                known |= {check: float(np.nanmax(values)), f"{check}_tensor": float(np.nanargmax(values))}
        columns, rows = check_stream.tensor_columns(SKETCHES), np.nansum(table, 0)
        whole = dict(zip(columns, rows.tolist(), strict=True))
        whole |= {key: math.nan for key in whole if np.isnan(table[:, columns.index(key)]).all()}
        known |= {key: whole[key] for key in check_stream.step_columns(SKETCHES) if key in whole}
        return [float(known.get(key, math.nan)) for key in check_stream.step_columns(SKETCHES)], table

    def _apart(self, step: int, name: str) -> float:
        """Largest difference of two ranks' sketches of one piece."""
        most = 0.0
        for holder in self.holders[name]:
            own = holder.part("after", step, name)
            for other in self.parts:
                if other is not holder and other.places.get(name) == holder.places[name]:
                    most = max(most, float(np.abs(own - other.part("after", step, name)).max()))
        return most

    # -- files -------------------------------------------------------------------------------------------------------

    def write(self) -> None:
        captured = self._write_tensors()
        every = check_stream.cadence(self.steps, len(self.tensors), SKETCHES, LIMIT_BYTES)
        stream = StreamWriter(self.path, self.tensors, SKETCHES, every, 0)
        metrics = MetricsWriter(self.path / "metrics.jsonl")
        lines = []
        for step in range(self.steps):
            row, table = self._row(step)
            stream.write(step + 1, row, table)
            lines.append(self._line(step, table))
            metrics.write(lines[-1])
        stream.close()
        metrics.close()
        facts = [part.facts for part in self.parts]
        values = describe.config(facts, self.fed, f"{self.path.parent.name}/{self.path.name}")
        describe.write_config(self.path, values)
        describe.write_provenance(self.path, facts)
        write_json(self.path / "summary.json", json.loads(encode(self._summary(lines, captured))))

    def _line(self, step: int, table: Array) -> dict[str, Any]:
        lines = [part.lines[step] for part in self.parts]
        losses = [loss for line in lines for loss in line["losses"]]
        reduced = table[:, check_stream.tensor_columns(SKETCHES).index("reduced_squares")]
        seen = reduced[~np.isnan(reduced)]
        return {
            "step": step + 1,
            "loss": _mean(losses),
            "grad_norm": math.sqrt(float(seen.sum())) if len(seen) else None,
            "lr": lines[0]["lr"],
            "tokens": self.fed[step]["tokens"],
            "skipped": False,
            "data_digest": self.fed[step]["digest"],
            "step_time_s": lines[0]["seconds"],
        }

    def _summary(self, lines: Sequence[Mapping[str, Any]], captured: Sequence[int]) -> dict[str, Any]:
        last, ends = lines[-1] if lines else {}, [part.end for part in self.parts]
        times = [line["step_time_s"] for line in lines[1:]] or [0.0]
        quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
        return {
            "status": "done",
            "step": self.steps,
            "steps": self.steps,
            "tokens": sum(line["tokens"] for line in lines),
            "loss": last.get("loss"),
            "grad_norm": last.get("grad_norm"),
            "initial_weights": self._digest("initial"),
            "final_weights": self._digest("final"),
            "decayed": sorted({name for part in self.parts for name in part.facts["optimizer"]["decayed"]}),
            "unplaced": {name: why for part in self.parts for name, why in part.facts["unplaced"].items()},
            "captured": list(captured),
            "step_time_s": dict(zip(("p25", "median", "p75"), quartiles, strict=False)),
            "wall_s": max((end.get("seconds", 0.0) for end in ends), default=0.0),
        }

    def _digest(self, kind: str) -> str:
        """SHA-256 over names, shapes and sums of hashed elements; empty where a rank did not tell."""
        digest = hashlib.sha256()
        for name, shape in sorted(self.tensors):
            sums = [part.end.get(kind, {}).get(name) for part in self.holders[name]]
            if not sums or None in sums:
                return ""
            digest.update(f"{name} {list(shape)} {sum(sums) % 2**64}\n".encode())
        return digest.hexdigest()

    def _write_tensors(self) -> list[int]:
        names = [{path.stem for path in part.folder.glob("step-*.safetensors")} for part in self.parts]
        found = [name for name in sorted(set.intersection(*names)) if int(name[5:]) <= self.steps]
        steps = [int(name[5:]) for name in found]
        final = [part.pieces("final") for part in self.parts]
        has_final = all(final) and bool(steps)
        plan = {"gradients": steps, "updates": steps, "final": has_final, "num_bytes": 0, "left_out": ""}
        folder = self.path / "capture"
        for name, step in zip(found, steps, strict=True):
            pieces = [part.pieces(name) for part in self.parts]
            tensors, terms = self._assembled(pieces), {}
            for key in dict.fromkeys(key for each in pieces for key in each if key.startswith("local/")):
                tensors[key] = self._added(pieces, key)
                terms[key.removeprefix("local/")] = self._terms(step - 1, key.removeprefix("local/"))
            facts: dict[str, Any] = {"num_microbatches": self.fed[step - 1]["microbatches"], "plan": plan}
            if terms:
                facts |= {"terms": terms, "kept": {}, "wrong_weights": [], "whole": list(terms)}
            write_step(folder, step, tensors, facts)
        if has_final:
            write_final(folder, self.steps, self._assembled(final))
        return steps

    def _terms(self, step: int, name: str) -> float:
        return math.sqrt(sum(part.square("terms", step, name) for part in self._seeing(name))) / self.divisor

    def _added(self, pieces: Sequence[Mapping[str, Tensor]], key: str) -> Tensor:
        seen = self._seeing(key.removeprefix("local/"))
        total = sum(each[key] for part, each in zip(self.parts, pieces, strict=True) if part in seen and key in each)
        assert isinstance(total, Tensor)
        return total / self.divisor

    def _assembled(self, pieces: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Whole tensors of the ranks' pieces, by their keys; those of which a piece is missing are left out."""
        shapes, found = dict(self.tensors), {}
        for key in dict.fromkeys(key for each in pieces for key in each if not key.startswith("local/")):
            name = self._tensor_of(key)
            holders = [(part, of.get(key)) for part, of in zip(self.parts, pieces, strict=True)]
            chosen = [(part, piece) for part, piece in holders if part in self.holders[name]]
            if not chosen or any(piece is None for _, piece in chosen):
                continue
            first = chosen[0][1]
            assert first is not None
            shape = shapes[name]
            whole = torch.empty(shape, dtype=first.dtype).view(shape[0] if shape else 1, -1)
            for part, piece in chosen:
                assert piece is not None
                elements = piece.reshape(-1).split([_numel(place) for place in part.places[name]])
                for (top, bottom, left, right), here in zip(part.places[name], elements, strict=True):
                    if left < 0:
                        whole.view(-1)[top:bottom] = here
                    else:
                        whole[top:bottom, left:right] = here.view(bottom - top, right - left)
            found[key] = whole.view(shape)
        return found

    def _tensor_of(self, key: str) -> str:
        name = key.partition("/")[2]
        if name in self.holders:
            return name
        if name.rpartition("/")[0] in self.holders:  # a moment, or a last weight
            return name.rpartition("/")[0]
        if key in self.holders:
            return key
        raise StoreError(f"{self.path}: {key} belongs to no tensor of the model")
