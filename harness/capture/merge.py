"""One run directory of what its ranks saw, in the format of every other run; see [Note: Parts] in `parts`."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from harness.capture import describe
from harness.capture.parts import END, FACTS, FOLDER, WIDTHS, captures_of
from harness.probe.capture import write_step
from harness.probe.step_checks.pieces import Block, Blocks, Piece
from harness.probe.step_checks.sketch import SKETCHES, Place
from harness.probe.step_checks.table import columns_of, relative, rows_of
from harness.store import check_stream, status
from harness.store.check_stream import BYTES, CheckedTensor, StreamWriter
from harness.store.files import held, write_atomic
from harness.store.metrics import MetricsWriter, decode, encode, write_summary
from harness.store.reading import folder_names, read_json, read_text
from harness.store.status import State, Status

Array = NDArray[np.float64]
PLACES = columns_of(WIDTHS)
SHOWING = 3
"""Steps that show by what gradients are divided; one of them could be clipped by just that much."""
ROUNDED = 1e-3
"""Relative: how near the ratio of gradients is to one over the number that they are divided by."""


def if_last(path: Path, world_size: int) -> None:
    """Merge a run's parts if every rank has ended."""
    with held(path / f"{FOLDER}.lock"):
        ended = [name for name in folder_names(path / FOLDER) if (path / FOLDER / name / END).exists()]
        if len(ended) >= world_size and not (path / "summary.json").exists():
            merge(path)


def merge(path: Path) -> None:
    """Write the run directory from the parts that are there, and remove them if nothing is missing."""
    parts = [Rank(path / FOLDER / name) for name in sorted(folder_names(path / FOLDER))]
    seeing, steps = [each for each in parts if each.facts], 0
    if seeing:
        run = Merged(path, seeing)
        run.write()
        steps = run.steps
    problem = _incomplete(parts, steps)
    state, reason = (State.failed, f"incomplete: {problem}") if problem else (State.done, "all ranks ended")
    present = status.read(path) or Status(State.running, "", 0)
    status.write(path, replace(present, state=state, reason=reason, steps=steps))
    if not problem:  # else it may go on from a checkpoint
        shutil.rmtree(path / FOLDER, ignore_errors=True)


def cut(folder: Path, done: int) -> None:
    """Leave the first steps of a rank's part alone, for a run that goes on. Raises `ValueError`: it has fewer."""
    part = Rank(folder)
    count = len(part.lines) if part.facts else 0
    if count < done:
        there = f"holds {count} steps" if count else "holds no run that can go on"
        raise ValueError(f"{folder.parent.parent} {there}: it cannot go on behind {done}")
    later = [path for path in captures_of(folder) if int(path.stem[5:]) > done]
    for path in (folder / END, *later):
        path.unlink(missing_ok=True)
    lines = part.lines[:done]
    os.truncate(folder / "rows.f64", part.row_bytes * sum(line["looked"] for line in lines))
    write_atomic(folder / "steps.jsonl", "".join(encode(line) + "\n" for line in lines))


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


def _mean(values: Sequence[float]) -> float | None:
    total = math.fsum(values) if all(map(math.isfinite, values)) else sum(values)  # `fsum` raises for inf - inf
    return total / len(values) if values else None


class Rank:
    """Part of one rank, as it lies on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = read_json(folder / FACTS) or {}
        self.end: dict[str, Any] = read_json(folder / END) or {}

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        found = []
        for line in (read_text(self.folder / "steps.jsonl") or "").splitlines():
            try:
                found.append(decode(line))
            except ValueError:  # torn, as the last one of a process that was killed
                break
        ends = [*accumulate(line["looked"] for line in found)]
        return found[: bisect_right(ends, len(self.rows))]

    @cached_property
    def row_of(self) -> list[int | None]:
        """Row of each step; None of one that was not looked at."""
        count = accumulate(line["looked"] for line in self.lines)
        return [row - 1 if line["looked"] else None for line, row in zip(self.lines, count, strict=True)]

    @property
    def row_bytes(self) -> int:
        return BYTES * len(self.facts["tensors"]) * sum(WIDTHS.values())

    @cached_property
    def rows(self) -> Array:
        """[steps that were looked at, tensors, columns]"""
        path, shape = self.folder / "rows.f64", (len(self.facts["tensors"]), sum(WIDTHS.values()))
        count = path.stat().st_size // self.row_bytes
        return np.memmap(path, "<f8", "r", shape=(count, *shape)).view(np.ndarray) if count else np.empty((0, *shape))

    @cached_property
    def held(self) -> dict[str, Piece]:
        """Place of each tensor's part; the tensors themselves are in other files."""
        found = {}
        for each in self.facts["tensors"]:
            places = (Place((top, bottom), (left, right)) for top, bottom, left, right in each["places"])
            blocks = tuple(map(Block, places))
            found[each["name"]] = Piece(each["name"], tuple(each["shape"]), torch.empty(0), blocks)
        return found

    @cached_property
    def index(self) -> dict[str, int]:
        return {each["name"]: place for place, each in enumerate(self.facts["tensors"])}

    def tensors(self, name: str) -> Mapping[str, Tensor]:
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            return {}
        with safe_open(path, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict

    def seen(self, kind: str, step: int, name: str) -> Array:
        """Numbers of one tensor at a step: sketches, or one square."""
        row = self.row_of[step]
        if row is None:
            return np.full(WIDTHS[kind], np.nan)
        found: Array = self.rows[row, self.index[name], PLACES[kind]]
        return found


class Merged:
    def __init__(self, path: Path, parts: Sequence[Rank]) -> None:
        self.path, self.parts = path, parts
        self.steps = min(len(each.lines) for each in parts)
        shapes = {each["name"]: tuple(each["shape"]) for part in parts for each in part.facts["tensors"]}
        self.tensors = [CheckedTensor(name, shape) for name, shape in shapes.items()]
        self.holders = {name: self._holders(name) for name in shapes}
        self.feeding = {name: self._feeding(name) for name in shapes}
        self.fed = [self._fed(step) for step in range(self.steps)]
        self.divisor = self._divisor()

    def _holders(self, name: str) -> list[Rank]:
        """A rank for each of its pieces; none where they do not make up the tensor."""
        found: dict[Blocks, Rank] = {}
        for part in self.parts:
            if name in part.held and part.held[name].blocks:
                found.setdefault(part.held[name].blocks, part)
        covered = sum(part.held[name].numel for part in found.values())
        return list(found.values()) if covered == math.prod(dict(self.tensors)[name]) else []

    def _feeding(self, name: str) -> list[Rank]:
        """Ranks whose local gradients add up; of those that were fed the same rows, the first."""
        first: dict[tuple[str, ...], Rank] = {}
        for part in self.parts:
            if name in part.held:
                rows = tuple(part.lines[0]["rows"]) if part.lines else ()
                first.setdefault(rows or (part.folder.name,), part)
        return list(first.values())

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
        """Number that the sum of local gradients is divided by: of the ranks, unless the first steps show another.

        1 where the program adds them up; that of the microbatches where it divides gradients by it, as pipelines do.
        """
        fed = self.fed[:SHOWING]
        ranks = int(fed[0]["readers"]) if fed else 1
        ratios = [ratio for step in range(len(fed)) if (ratio := self._ratio(step))]
        for number in dict.fromkeys((1, *(times * each["microbatches"] for each in fed for times in (1, ranks)))):
            if ratios and all(abs(ratio * number - 1) < ROUNDED for ratio in ratios):
                return int(number)
        return ranks

    def _ratio(self, step: int) -> float | None:
        """Median ratio of reduced gradients to sums of local ones; None where neither was seen."""
        local, reduced = self._added("local", step, self.feeding), self._added("reduced", step, self.holders)
        squares = (local * local).sum(1)
        ratios = (local * reduced).sum(1)[squares > 0] / squares[squares > 0]
        return statistics.median(ratios.tolist()) if len(ratios) else None

    # -- sketches ----------------------------------------------------------------------------------------------------

    def _added(self, kind: str, step: int, counted: Mapping[str, Sequence[Rank]]) -> Array:
        """[tensors, columns], added up over the ranks that count; not numbers where there is none."""
        found = np.full((len(self.tensors), WIDTHS[kind]), np.nan)
        for index, (name, _) in enumerate(self.tensors):
            if counted[name]:
                found[index] = np.sum([each.seen(kind, step, name) for each in counted[name]], 0)
        return found

    def _row(self, step: int) -> tuple[list[float], Array]:
        local, terms = (self._added(kind, step, self.feeding) for kind in ("local", "local_squares"))
        kinds = ("reduced", "reduced_squares", "after", "after_squares", "begin")
        reduced, squares, after, sizes, begins = (self._added(kind, step, self.holders) for kind in kinds)
        left = self._added("after", step - 1, self.holders) if step else begins
        with np.errstate(invalid="ignore"):  # of weights that overflowed
            kept = np.abs(begins - left).max(1)
        apart, scale = np.array([self._apart(step, name) for name in self.holders]), np.sqrt(sizes[:, 0])
        checks = {"kept": _known(relative(kept, scale)), "replicas": _known(relative(apart, scale))}
        moments = np.full((len(self.tensors), len(check_stream.MOMENTS)), np.nan)
        tensors = [local / self.divisor, terms / self.divisor**2, reduced, squares, after, sizes, moments]
        return rows_of(checks, math.nan, tensors, lambda values: _known(values).sum(0))

    def _apart(self, step: int, name: str) -> float:
        """Largest difference of two ranks' sketches of one piece."""
        most = 0.0 if self.holders[name] else math.nan
        for holder in self.holders[name]:
            own = holder.seen("after", step, name)
            for other in self.parts:
                if name in other.held and other.held[name].blocks == holder.held[name].blocks:
                    most = max(most, float(np.abs(own - other.seen("after", step, name)).max()))
        return most

    # -- files -------------------------------------------------------------------------------------------------------

    def write(self) -> None:
        captured = self._write_tensors()
        stream = StreamWriter(self.path, self.tensors, SKETCHES, 1, 0)
        metrics = MetricsWriter(self.path / "metrics.jsonl")
        lines = []
        for step in range(self.steps):
            if all(part.lines[step]["looked"] for part in self.parts):
                row, table = self._row(step)
                stream.write(step + 1, row, table)
            else:
                table = np.empty((0, len(check_stream.tensor_columns(SKETCHES))))
                stream.leave_out(step + 1)
            lines.append(self._line(step, table))
            metrics.write(lines[-1])
        stream.close()
        metrics.close()
        facts = [part.facts for part in self.parts]
        values = describe.config(facts, self.fed, f"{self.path.parent.name}/{self.path.name}")
        describe.write_config(self.path, values)
        describe.write_provenance(self.path, facts)
        write_summary(self.path / "summary.json", "done", self.steps, lines, {1}, self._facts(captured))

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
            "memory": lines[0]["memory"],
            "comm": lines[0]["comm"],
        }

    def _facts(self, captured: Sequence[int]) -> dict[str, Any]:
        return {
            "initial_weights": self._digest({part: part.facts["initial"] for part in self.parts}),
            "final_weights": self._digest({part: part.end.get("final", {}) for part in self.parts}),
            "decayed": sorted({name for part in self.parts for name in part.facts["decayed"]}),
            "unplaced": {name: why for part in self.parts for name, why in part.facts["unplaced"].items()},
            "captured": list(captured),
            "resumed": max((line.get("done", 0) for line in self.parts[0].lines), default=0) or None,
            "wall_s": max(sum(line["seconds"] for line in part.lines) for part in self.parts),
        }

    def _digest(self, told: Mapping[Rank, Mapping[str, int]]) -> str:
        """SHA-256 over names, shapes and sums of hashed elements; empty where a rank did not tell."""
        digest = hashlib.sha256()
        for name, shape in sorted(self.tensors):
            sums = [told[part][name] for part in self.holders[name] if name in told[part]]
            if len(sums) < max(1, len(self.holders[name])):
                return ""
            digest.update(f"{name} {list(shape)} {sum(sums) % 2**64}\n".encode())
        return digest.hexdigest()

    def _write_tensors(self) -> list[int]:
        names = [[path.stem for path in captures_of(part.folder)] for part in self.parts]
        found = [name for name in names[0] if all(name in each for each in names) and int(name[5:]) <= self.steps]
        steps = [int(name[5:]) for name in found]
        plan = {"gradients": steps, "updates": steps, "num_bytes": 0, "left_out": ""}
        folder = self.path / "capture"
        for name, step in zip(found, steps, strict=True):
            pieces = {part: part.tensors(name) for part in self.parts}
            tensors = self._assembled(pieces)
            norms = np.sqrt(self._added("local_squares", step - 1, self.feeding)[:, 0]) / self.divisor
            terms = {}
            for (of, feeding), norm in zip(self.feeding.items(), norms.tolist(), strict=True):
                local = [pieces[part][f"local/{of}"] for part in feeding if f"local/{of}" in pieces[part]]
                if local:
                    tensors[f"local/{of}"] = sum(local[1:], local[0]) / self.divisor
                    terms[of] = norm
            facts: dict[str, Any] = {"num_microbatches": self.fed[step - 1]["microbatches"], "plan": plan}
            if terms:
                facts |= {"terms": terms, "wrong_weights": [], "whole": list(terms)}
            write_step(folder, step, tensors, facts)
        return steps

    def _assembled(self, pieces: Mapping[Rank, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Whole tensors of the ranks' pieces, by their keys; those of which a piece is missing are left out."""
        shapes, found = dict(self.tensors), {}
        for key in dict.fromkeys(key for each in pieces.values() for key in each if not key.startswith("local/")):
            name = key.partition("/")[2]
            name = name if name in self.holders else name.rpartition("/")[0]  # of a moment
            holders = self.holders[name]
            if holders and all(key in pieces[part] for part in holders):
                found[key] = torch.empty(shapes[name], dtype=pieces[holders[0]][key].dtype)
                for part in holders:
                    part.held[name].put(found[key], pieces[part][key])
        return found


def _known(values: Array) -> Array:
    """With noughts for what is not known of single tensors [tensors, ...]."""
    return np.where(np.isnan(values) & ~np.isnan(values).all(0), 0.0, values)
