"""Streams of step checks of the laboratory's runs, written beside the simulated engine, by the contract of
`harness.store.check_stream`, in numpy and with signs of its own (any will do, if both runs of a pair have them).

What is seen stands beside the engine, as in a real run: local gradients as the backward hands them out, weights as each
rank computes with them, moments and weights as they lie there before and after a step.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from harness.config.roundoff import UNIT
from harness.config.update_rule import Rule, UpdateState
from harness.store.check_stream import ONCE, CheckedTensor, StreamWriter, step_columns, tensor_columns
from harness.store.rundir import flatten

if TYPE_CHECKING:
    from tests.parity.arms import Arm, Params
    from tests.parity.network import Optimizer

SKETCHES = 4
Float64 = NDArray[np.float64]


class Silent:
    """Watches nothing: every method of a checker that is not there does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Checker(Silent):
    """Watches one run and keeps its rows."""

    def __init__(self, arm: Arm, weights: Params) -> None:
        self.arm = arm
        self.names = list(weights)
        self.shapes = [weights[name].shape for name in self.names]
        self.signs = {name: self._drawn(name, weights[name].size) for name in self.names}
        self.rule = Rule.of(flatten(arm.config()))
        self.rows: list[list[float]] = []
        self.tables: list[Float64] = []
        self._left: tuple[Params, Params, Params] | None = None
        self._row: dict[str, float] = {}

    @staticmethod
    def _drawn(name: str, size: int) -> Float64:
        generator = np.random.default_rng(zlib.crc32(name.encode()))
        return generator.choice([-1.0, 1.0], (SKETCHES, size))

    def sketch(self, name: str, values: Any) -> Float64:
        """S_j of one tensor, [m]."""
        found: Float64 = self.signs[name] @ np.asarray(values, np.float64).ravel()
        return found

    def _worst(self, column: str, found: dict[str, float]) -> None:
        name = max(found, key=lambda each: found[each])
        self._row |= {column: found[name], f"{column}_tensor": float(self.names.index(name))}

    def before(self, weights: Params, optimizer: Optimizer, used: list[Params], compute: Params) -> None:
        """Before a step: against what the last one left, and what each rank computes with against `compute`."""
        unseen = {column: float("nan") for each in ONCE for column in (each, f"{each}_tensor")}
        self._row = {"replicas": 0.0, "replicas_tensor": 0.0, **unseen}
        self._kept(weights, optimizer)
        size = {name: float(np.linalg.norm(compute[name].astype(np.float64))) for name in self.names}
        gathered = {
            name: max(abs(self.sketch(name, one[name]) - self.sketch(name, compute[name])).max() for one in used)
            / size[name]
            for name in self.names
        }
        self._worst("gather", gathered)

    def _kept(self, weights: Params, optimizer: Optimizer) -> None:
        now = (weights, optimizer.m, optimizer.v)
        if self._left is None:
            self._row |= {"kept": 0.0, "kept_tensor": 0.0}
        else:
            off = {}
            for name in self.names:
                parts = [abs(each[name] - old[name]).max() for each, old in zip(now, self._left, strict=True)]
                sizes = [np.linalg.norm(self._left[0][name]), *(abs(old[name]).max() for old in self._left[1:])]
                off[name] = max(
                    float(part / size) if size else float(part > 0) for part, size in zip(parts, sizes, strict=True)
                )
            self._worst("kept", off)

    def step(self, step: int, grads: list[list[Params]], mean: Params, clipped: Params, norm: float, lr: float) -> None:
        """Of the gradients of a step, before its update."""
        each = [micro for one in grads for micro in one]
        self._step, self._clipped, self._lr = step, clipped, lr
        self._local, self._terms, off = {}, {}, {}
        for name in self.names:
            wide = [one[name].astype(np.float64) for one in each]
            total = sum(wide) / len(each)
            self._terms[name] = float(sum((one**2).sum() for one in wide)) / len(each) ** 2
            self._local[name] = self.sketch(name, total)
            gap = abs(self.sketch(name, mean[name]) - self._local[name]).max()
            added = np.sqrt(max(self._terms[name], float((mean[name].astype(np.float64) ** 2).sum())))
            off[name] = float(gap / added) if added else float(gap)
        self._worst("sum", off)
        self._mean = mean
        true = float(np.sqrt(sum(float((mean[name].astype(np.float64) ** 2).sum()) for name in self.names)))
        self._row["norm"] = abs(norm - true) / true

    def after(self, weights: Params, optimizer: Optimizer, before: tuple[Params, Params, Params]) -> None:
        """Of what the update did, against the rule in fp64 on what there was before."""
        unit, off = UNIT[self.arm.main], {}
        for name in self.names:
            w, m, v = (each[name].astype(np.float64) for each in before)
            adam = self.arm.optimizer != "sgd"
            state = UpdateState(w, m if adam else 0.0, v if adam else 0.0)
            gradient = self._clipped[name].astype(np.float64)
            update = self.rule.update(state, gradient, self._step, self._lr, decays=w.ndim > 1)
            room = 16 * unit * (abs(w) + abs(update) + self._lr * (adam or abs(gradient))) + 1e-300
            found = float((abs(weights[name] - (w + update)) / room).max())
            if adam:
                for held, wanted, old in ((optimizer.m, state.first, m), (optimizer.v, state.second, v)):
                    room = 16 * unit * (abs(old) + abs(gradient) + gradient**2) + 1e-300
                    found = max(found, float((abs(held[name] - wanted) / room).max()))
            off[name] = found
        self._worst("rule", off)
        self._add(weights, optimizer)
        self._left = tuple({n: p[n].copy() for n in self.names} for p in (weights, optimizer.m, optimizer.v))

    def _add(self, weights: Params, optimizer: Optimizer) -> None:
        squares = lambda values: float((values.astype(np.float64) ** 2).sum())  # noqa: E731
        table = np.array(
            [
                [
                    *(*self._local[n], self._terms[n]),
                    *(*self.sketch(n, self._mean[n]), squares(self._mean[n])),
                    *(*self.sketch(n, weights[n]), squares(weights[n])),
                    *(self.sketch(n, moment[n])[0] for moment in (optimizer.m, optimizer.v)),
                ]
                for n in self.names
            ]
        )
        self.tables.append(table)
        pooled = dict(zip(tensor_columns(SKETCHES), table.sum(0), strict=True))
        self.rows.append([{**pooled, **self._row}[column] for column in step_columns(SKETCHES)])

    def end(self, weights: Params, optimizer: Optimizer) -> None:
        """The row after the last step."""
        self._row = {}
        self._kept(weights, optimizer)
        self.rows.append([self._row.get(column, float("nan")) for column in step_columns(SKETCHES)])

    def write(self, run: Path) -> None:
        """The stream, into a run directory."""
        tensors = [CheckedTensor(name, shape) for name, shape in zip(self.names, self.shapes, strict=True)]
        writer = StreamWriter(run, tensors, SKETCHES, 1, 0)
        empty = np.empty((0,))
        for step, row in enumerate(self.rows, start=1):
            writer.write(step, row, self.tables[step - 1] if step <= len(self.tables) else empty)
        writer.close()
