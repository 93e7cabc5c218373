"""T0 of runs that were recorded from outside (`harness.capture`): what must agree, and what is not known of them.

Programs differ in everything that a configuration says, and that is why they are compared. What must agree is what the
trajectory begins with: the weights, the data where both told it, the optimizer's rule and its rates. Machines and
versions are named, as differences of which nobody knows what they do. A run of this harness has digests of
another kind: its first weights are held against the other's tensor by tensor, where both captured them. Its gradients
are recorded before clipping and the other program's after it: they are compared as the optimizer took them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.parity.outcome import Finding, Grade, Stage
from harness.parity.record import Record
from harness.parity.tensors import Capture, Computed, Float64
from harness.store.check_stream import Stream, step_columns, tensor_columns

RULE = ("name", "target", "betas", "eps", "momentum", "weight_decay")
OF_RULE = {"sgd": ("momentum", "weight_decay"), "adam": RULE[2:4] + RULE[5:], "adamw": RULE[2:4] + RULE[5:]}
"""Constants that matter, by the optimizer's name."""

NAMED = ("device", "cpu_model", "cpu_capability", "threads_per_rank", "cuda", "allow_tf32")

Compare = Callable[..., Finding]


def is_one(arm: Record, control: Record) -> bool:
    return arm.is_watched or control.is_watched


def is_mixed(arm: Record, control: Record) -> bool:
    return arm.is_watched != control.is_watched


def check(arm: Record, control: Record, compare: Compare) -> list[Finding]:
    """Facts that must agree. Args: compare: `comparable.finding`."""
    steps = compare("steps", Stage.record, arm.length, control.length)
    found = [steps, *_rule(arm, control, compare), *_weights(arm, control, compare)]
    if steps.grade is Grade.ok:
        found += _series(arm, control, compare)
    return found


def _rule(arm: Record, control: Record, compare: Compare) -> Iterator[Finding]:
    names = [str(run.config["optimizer.name"]) for run in (arm, control)]
    for key in ("name", *OF_RULE.get(names[0], RULE[1:])):
        values = [run.config.get(f"optimizer.{key}") for run in (arm, control)]
        yield compare(f"optimizer.{key}", Stage.optimizer, *values)


def _weights(arm: Record, control: Record, compare: Compare) -> Iterator[Finding]:
    left, right = (str(run.summary.get("initial_weights") or "") for run in (arm, control))
    if is_mixed(arm, control):
        if 1 in arm.weights and 1 in control.weights:
            yield _first_weights(arm.weights[1], control.weights[1], compare)
    elif left and right:
        yield compare("initial weights", Stage.weights, left, right)


def _first_weights(left: Capture, right: Capture, compare: Compare) -> Finding:
    """First tensor that only one has, or that begins otherwise, in fp32."""
    for name in sorted(left.tensors.keys() | right.tensors.keys()):
        shapes = [list(of.tensors[name].shape) if name in of.tensors else None for of in (left, right)]
        if shapes[0] != shapes[1]:
            return compare(f"shape of {name}", Stage.weights, *shapes)
        one, other = (of.values(name).astype(np.float32) for of in (left, right))
        if not np.array_equal(one, other):
            apart = f"off by {abs(one - other).max():.2g}"
            return compare(f"{name} before the first step", Stage.weights, apart, "the same")
    return compare("initial weights", Stage.weights, "equal", "equal")


def _series(arm: Record, control: Record, compare: Compare) -> Iterator[Finding]:
    fed = tells_data(arm) and tells_data(control) and not is_mixed(arm, control)
    for key, stage in (("lr", Stage.optimizer), *((("data_digest", Stage.data),) if fed else ())):
        pairs = enumerate(zip(arm.columns[key], control.columns[key], strict=True), start=1)
        first = next(((step, *pair) for step, pair in pairs if pair[0] != pair[1]), None)
        if first is None:
            yield Finding("T0", key, stage, Grade.ok, "equal", "equal", count=arm.length)
        else:
            yield compare(key, stage, *first[1:], step=first[0])


def tells_data(run: Record) -> bool:
    return all(run.columns["data_digest"]) and run.length > 0


def limits(arm: Record, control: Record) -> list[str]:
    """Unknown facts of two runs, of which one or both were watched, as clauses."""
    found = []
    silent = [run.name for run in (arm, control) if not tells_data(run)]
    if silent:
        found.append(f"what {' and '.join(silent)} was fed is not known")
    mixed = is_mixed(arm, control)
    if mixed and not silent:
        found.append("their data are hashed by two rules, so gradients alone show that they were fed the same")
    if not all(1 in run.weights if mixed else run.summary.get("initial_weights") for run in (arm, control)):
        found.append("their first weights are not known to be the same")
    blind = [run.name for run in (arm, control) if not run.captures and not _sees(run, "reduced_squares")]
    if blind:
        found.append(f"{' and '.join(blind)} shows no gradients, so only losses and weights were held side by side")
    return [*found, *_others(arm, control)]


def _sees(run: Record, column: str) -> bool:
    return run.stream is not None and not bool((run.stream.column(column) != run.stream.column(column)).all())


def _others(arm: Record, control: Record) -> Iterator[str]:
    left, right = (_facts(run.provenance) for run in (arm, control))
    odd = [f"{key} {left[key]} and {right[key]}" for key in left if left[key] != right[key]]
    if odd:
        yield f"they ran with {', '.join(odd)}"


def _facts(origin: Mapping[str, Any]) -> dict[str, Any]:
    versions = origin.get("versions") or {}
    return {"torch": versions.get("torch"), **{key: origin.get(key) for key in NAMED}}


def as_stepped(run: Record) -> Record:
    """The run itself where nothing was clipped, or where it was watched."""
    clip = run.config.get("optimizer.clip_norm")
    if run.is_watched or clip is None:
        return run
    norms = np.array(run.series("grad_norm"), float)
    with np.errstate(invalid="ignore"):
        factors = np.where(np.isfinite(norms), np.minimum(1.0, float(clip) / (norms + 1e-6)), 1.0)
    if (factors == 1.0).all():
        return run
    return replace(
        run,
        captures={step: _times(capture, float(factors[step - 1])) for step, capture in run.captures.items()},
        columns={**run.columns, "grad_norm": (norms * factors).tolist()},
        stream=run.stream and _Stepped(**_fields(run.stream), factors=factors),
        as_recorded=run,
    )


def _fields(stream: Stream) -> dict[str, Any]:
    return {each.name: getattr(stream, each.name) for each in fields(Stream)}


def _times(capture: Capture, factor: float) -> Capture:
    return Computed(capture, lambda name: capture.values(name) * factor)


@dataclass(frozen=True, eq=False)
class _Stepped(Stream):
    factors: Float64
    """Clipping factor by step."""

    @cached_property
    def steps(self) -> Float64:
        rows = super().steps
        factors = np.ones(len(rows))  # a finished run has one row more than steps
        factors[: len(self.factors)] = self.factors[: len(rows)]
        return self._scaled(rows, factors, step_columns(self.sketches))

    @cached_property
    def _kept(self) -> tuple[NDArray[np.int64], Float64]:
        steps, rows = super()._kept
        return steps, self._scaled(rows, self.factors[steps - 1][:, None], tensor_columns(self.sketches))

    def _scaled(self, rows: Float64, factors: Float64, columns: Sequence[str]) -> Float64:
        found = rows.copy()
        for at, name in enumerate(columns):
            if name.startswith("reduced_"):
                found[..., at] *= factors**2 if name.endswith("squares") else factors
        return found
