"""A laboratory in numpy: a small residual network, trained by a simulated sharded engine that can be broken on purpose.

It writes run directories as the harness does, in milliseconds and without torch, so that the comparator can be tried on
hundreds of pairs whose truth is known. The arithmetic is real: dtypes round, sums have an order, Adam hides scales.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from harness.store.identity import signature
from harness.store.metrics import encode
from harness.store.rundir import RunDir, Store
from harness.store.shapes import METADATA
from harness.store.study import write_study
from tests.parity.arms import Arm, Params
from tests.parity.corpus import FP32, OURS
from tests.parity.network import Optimizer, add, batch, forward_backward, initial, reduce, rounder
from tests.parity.streams import Checker, Silent

CLEAN = "sources-of-this-test"


def digest(arrays: Params) -> str:
    """Of names, dtypes and bytes."""
    state = hashlib.sha256()
    for name, value in arrays.items():
        state.update(f"{name} {value.dtype} {value.shape}".encode() + value.tobytes())
    return state.hexdigest()


def witness(grads: list[list[Params]]) -> tuple[Params, dict[str, float]]:
    """What autograd handed out, before the engine touched it: the mean in fp64, and the norms of its terms."""
    each = [{name: value.astype(np.float64) for name, value in micro.items()} for one in grads for micro in one]
    mean = {name: value / len(each) for name, value in add(each).items()}
    squares = {name: sum(float(np.vdot(one[name], one[name])) for one in each) for name in mean}
    return mean, {name: float(np.sqrt(square)) / len(each) for name, square in squares.items()}


def train(arm: Arm) -> tuple[Any, ...]:
    """Run an arm: lines of the record, and its summary; by step what was captured, main weights before and after, and
    what witnesses saw; and who checked its steps."""
    fault, main = arm.fault, rounder(arm.main)
    weights = initial(arm.seed)
    first = digest(weights)
    weights = {name: main(value).copy() for name, value in weights.items()}
    compute = {name: rounder(arm.compute)(value) for name, value in weights.items()}
    optimizer, lines, captures, updates, witnesses = Optimizer(arm, weights), [], {}, {}, {}
    checker = Checker(arm, weights) if arm.checked else Silent()
    for step in range(1, arm.steps + 1):
        x, y = batch(arm, step)
        fault.between(step, weights, optimizer)
        used = [*([compute] * (arm.ranks - 1)), fault.used(step, compute)]
        checker.before(weights, optimizer, used, {n: rounder(arm.compute)(w) for n, w in weights.items()})
        parts = np.split(np.arange(arm.batch), arm.ranks)
        parts = [parts[0]] * arm.ranks if fault.same_data else parts
        losses, grads = [], []
        for part, seen in zip(parts, used, strict=True):
            micro = [forward_backward(seen, x[i], y[i], arm.compute) for i in np.split(part, arm.k)]
            losses += [loss for loss, _ in micro]
            grads.append([fault.local(step, g) for _, g in micro])
        mean = reduce(arm, grads, step)
        if step in arm.captures:
            captures[step] = mean
            if arm.witnessed:
                witnesses[step] = witness(grads)
        norm = float(np.sqrt(sum(float(np.vdot(g.astype(np.float64), g)) for g in mean.values()))) * fault.norm_factor
        scale = 1.0 if arm.clip is None else min(1.0, arm.clip / (norm + 1e-6))
        lr = arm.lr * min(1.0, step / 2)
        before = {name: value.copy() for name, value in weights.items()}
        clipped = {n: main(g * g.dtype.type(scale)) for n, g in mean.items()}
        had = tuple({n: v.copy() for n, v in each.items()} for each in (weights, optimizer.m, optimizer.v))
        checker.step(step, grads, mean, clipped, norm, lr)
        if step != fault.skipped:
            optimizer.step(weights, clipped, lr, step)
        fault.moments(step, optimizer)
        fault.updated(step, before, weights)
        checker.after(weights, optimizer, had)
        if step in arm.updates:
            updates[step] = before, {name: value.copy() for name, value in weights.items()}
        for name in weights:
            if not (fault.frozen and name.startswith(fault.frozen)):
                compute[name] = rounder(arm.compute)(weights[name])
        loss = float("nan") if fault.nan_at is not None and step >= fault.nan_at else float(np.mean(losses))
        param_norm = float(np.sqrt(sum(float(np.vdot(w.astype(np.float64), w)) for w in weights.values())))
        data = hashlib.sha256(b"".join(x[i].tobytes() for i in parts)).hexdigest()[:16]
        lines.append(
            {
                "step": step,
                "loss": loss,
                "grad_norm": norm * fault.logged_norm_factor,
                "param_norm": param_norm if step % 5 == 0 else None,
                "lr": lr,
                "tokens": arm.batch * arm.seq_len,
                "data_digest": data,
                "fed_digest": data,
                "step_time_s": 0.01 + 0.001 * (step % 3),
                "memory": {"allocated": None, "rss": 2**26},
                "comm": {"reduce_scatter": {"count": 4, "bytes": 1000}},
            }
        )
    fault.between(arm.steps + 1, weights, optimizer)
    checker.end(weights, optimizer)
    summary = {"initial_weights": first, "final_weights": digest(weights), "step": arm.steps}
    return lines, summary, captures, updates, witnesses, checker


@dataclass(frozen=True)
class Cell:
    """A cell as the store sees it, or a written run as the cell it was made from."""

    config: dict[str, Any]
    overrides: tuple[str, ...] = ()


PROVENANCE = {
    "sources_digest": CLEAN,
    "versions": {"torch": "2.13.0", "numpy": "2.0"},
    "cpu_model": "a processor",
    "device": "cpu",
    "threads_per_rank": 1,
    "environment": {},
}


def write(root: Path, arm: Arm, overrides: tuple[str, ...] = ()) -> Path:
    """Train an arm and write its run directory; returns its path."""
    lines, summary, captures, updates, witnesses, checker = train(arm)
    run = Store(root).create(Cell(arm.config(), overrides))
    (run.path / "metrics.jsonl").write_text("".join(encode(line) + "\n" for line in lines))
    status = {"state": "done", "reason": "", "attempt": 0, "keeper": "process"}
    for name, value in (("provenance", PROVENANCE), ("summary", summary), ("status", status)):
        (run.path / f"{name}.json").write_text(json.dumps(value))
    (run.path / "attempts/0").mkdir(parents=True, exist_ok=True)
    for step in {*captures, *updates}:
        before, after = updates.get(step, ({}, {}))
        mean, terms = witnesses.get(step, ({}, {}))
        kept = {} if step - 1 in updates else before
        parts = {"gradient": captures.get(step, {}), "local": mean, "before": kept, "after": after}
        tensors = {f"{part}/{name}": value for part, held in parts.items() for name, value in held.items()}
        facts = {"terms": terms, "wrong_weights": [], "whole": list(mean)} if mean else {}
        write_step(run.path, step, tensors, facts)
    checker.write(run.path)
    return run.path


def write_step(run: Path, step: int, tensors: Params, facts: Mapping[str, Any]) -> None:
    """A captured step, as the harness stores it."""
    (run / "capture").mkdir(exist_ok=True)
    path = run / f"capture/step-{step:06d}.safetensors"
    text = json.dumps({"step": step, **facts})
    save_file({name: np.ascontiguousarray(each) for name, each in tensors.items()}, path, {METADATA: text})


def pair(root: Path, *overrides: str) -> tuple[Path, Path]:
    """A study of a control and an arm that is the same, both done: their directories."""
    control, arm = (write(root, each, overrides) for each in (FP32, OURS))
    as_study(root, {control: None, arm: control}, "Is it the same?")
    return control, arm


def as_study(root: Path, controls: Mapping[Path, Path | None], question: str) -> None:
    """Record written runs as a study: each with the run it is held against, None for a control."""
    cells = {run: Cell(RunDir(run).config()) for run in controls}
    for cell in cells.values():
        cell.config["study"]["question"] = question
    pairs = {run: control for run, control in controls.items() if control is not None}
    of = {signature(cells[run].config): signature(cells[control].config) for run, control in pairs.items()}
    write_study(root, list(cells.values()), of)
