"""T0: facts that must agree before two runs may be compared; and the tier that their configurations admit.

Bits are owed only where the order of arithmetic is provably the same: docs/verdicts.md ("T1: bits") has the table. Bits
are compared whatever the tier, and equal ones are reported as EQUAL. The tier says when unequal ones are a fault.

docs/foreign.md says what must agree with a watched program, and what its first weights and gradients are held against.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.config.capabilities import SAME_BITS
from harness.fsdp import Placements
from harness.fsdp.options import Strategy
from harness.parity.outcome import Finding, Grade, Stage, fact
from harness.parity.record import Record
from harness.parity.tensors import Capture, Computed, Float64
from harness.store.check_stream import Stream, step_columns, tensor_columns
from harness.store.identity import EXCLUDED, must_agree

FREE_OWN = ("engine", "callback", "fault")

FACTS = ("cpu_model", "cpu_capability", "device", "threads_per_rank", "cuda", "nccl", "allow_tf32")

VERSIONS = ("torch",)
"""Packages whose version must agree; numpy only feeds data, whose digest is compared."""

VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "NVIDIA_TF32_OVERRIDE")

SOURCES = "sources"


def check(arm: Record, control: Record) -> list[Finding]:
    unfit = [*_problems(arm), *_problems(control)]
    if unfit:
        return unfit
    if is_one(arm, control):
        return _check_watched(arm, control)
    return [
        *_held([_facts(run) for run in (arm, control)]),
        *_kernels(arm, control),
        finding("initial weights", Stage.weights, arm.summary["initial_weights"], control.summary["initial_weights"]),
        *(_steps(key, arm, control) for key in ("tokens", "lr", "data_digest")),
    ]


def _problems(run: Record) -> list[Finding]:
    return [
        Finding("T0", "whole record", Stage.record, Grade.bad, problem, "a finished, current run", note=run.name)
        for problem in run.problems
    ]


def unlisted(arm: Record, control: Record) -> list[Finding]:
    if arm.files == control.files == "whole":
        return []
    note = "not known: an older version made the run and listed no checksums"
    return [Finding("T0", "files as the run left them", Stage.record, Grade.ok, arm.files, control.files, note=note)]


def finding(check: str, stage: Stage, left: object, right: object, step: int | None = None, note: str = "") -> Finding:
    verdict = Grade.ok if left == right else Grade.bad
    return Finding("T0", check, stage, verdict, _short(left), _short(right), step=step, note=note)


def _short(value: object) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 48 else f"{text[:45]}..."


def _held(facts: Sequence[Mapping[str, Any]], stage: Stage = Stage.record) -> list[Finding]:
    """A finding for each fact that differs between two runs, and one for all others."""
    left, right = facts
    odd = [key for key in {**left, **right} if left.get(key) != right.get(key)]
    equal = fact("configuration", stage, "equal", tier="T0", count=len({**left, **right}) - len(odd))
    return [*([equal] if equal.count else []), *(finding(key, stage, left.get(key), right.get(key)) for key in odd)]


def _facts(run: Record) -> dict[str, Any]:
    own = {f"files of {each['name']}": each["digest"] for each in _own(run)}
    settings = {key: run.config[key] for key in sorted(run.config) if must_agree(key)}
    return {SOURCES: run.provenance["sources_digest"], **settings, **_origin(run.provenance), **own}


def _own(run: Record) -> list[dict[str, str]]:
    return [each for each in run.provenance.get("own", ()) if each["kind"] not in FREE_OWN]


def _kernels(arm: Record, control: Record) -> list[Finding]:
    """Switches of torch that both records have; runs of versions before do not say."""
    left, right = (run.provenance.get("kernels") or {} for run in (arm, control))
    return _held([{f"torch's {key}": each[key] for key in left.keys() & right.keys()} for each in (left, right)])


def _origin(origin: Mapping[str, Any]) -> dict[str, object]:
    versions, environment = origin.get("versions") or {}, origin.get("environment") or {}
    return {
        **{f"{name} version": versions.get(name) for name in VERSIONS},
        **{key: origin.get(key) for key in FACTS},
        **{name: environment.get(name) for name in VARIABLES},
    }


def _steps(key: str, arm: Record, control: Record) -> Finding:
    stage = Stage.optimizer if key == "lr" else Stage.data
    pairs = zip(arm.columns[key], control.columns[key], strict=False)  # of another length: train.steps
    for step, (left, right) in enumerate(pairs, start=1):
        if left != right:
            of_ours = key == "data_digest" and not is_one(arm, control)
            note = "the data of the two runs holds other tokens" if of_ours else ""
            return finding(key, stage, left, right, step=step, note=note)
    return fact(key, stage, "equal", tier="T0", count=arm.length)


WITHOUT_EFFECT = (
    "ckpt.",
    "measure.",
    "train.replicate",
    "train.param_norm_every",
    "model.name",
    "dtype.name",
    *SAME_BITS,
)
"""Prefixes of settings that change no sum: saves, observations and callbacks; prefetch, because a gather does no
arithmetic; origin of buckets; transport."""

NCCL_ONLY = ("nccl_ub.", "sharp.")
"""Groups unused on CPU. On NCCL they choose kernels, and so the order of sums."""

REPEATABLE = ("deterministic", "ordered", "exact")

EXACT_FREEDOM = ("sharding.", "mesh.world_size", "mesh.dp_outer", "engine.")
"""Prefixes of settings that change no bit under numerics=exact, for these engines.

Not mesh.tp: torch sums over a cut dimension in another order.
"""
EXACT_ENGINES = ("native", "single")


@dataclass(frozen=True)
class Admission:
    """Strongest admissible tier, `T1` or `T2`, and the reason as a clause."""

    tier: str
    reason: str

    def __str__(self) -> str:
        return f"{self.tier}: {self.reason}"


def admissible(arm: Mapping[str, Any], control: Mapping[str, Any], *, resumed: bool = False) -> Admission:
    """Args: arm, control: flat configurations with dotted keys. resumed: for the wording only."""
    differing = sorted(key for key in arm.keys() | control.keys() if matters(key) and arm.get(key) != control.get(key))
    if {run.get("cluster.device") for run in (arm, control)} == {"cpu"}:
        differing = [key for key in differing if not key.startswith(NCCL_ONLY)]
    if any("watched.version" in run for run in (arm, control)):
        return Admission("T2", "recorded from outside, where nothing promises an order of sums")
    mode = arm["numerics.mode"]
    if "numerics.mode" in differing:
        return Admission("T2", f"one arm is numerics={mode}, the other {control['numerics.mode']}")
    if mode not in REPEATABLE:
        return Admission("T2", f"numerics={mode} promises no order of sums")
    if not differing:
        again = "resumed on the same layout" if resumed else "run twice"
        return Admission("T1", f"one configuration, {again}, under numerics={mode}")
    names = {arm["engine.name"], control["engine.name"]}
    if mode == "exact" and names <= set(EXACT_ENGINES) and all(key.startswith(EXACT_FREEDOM) for key in differing):
        return Admission("T1", "numerics=exact adds integers, in whatever order and wherever")
    in_order = mode == "ordered" and {*differing} <= {"sharding.strategy", "sharding.outer"}
    if in_order and arm["engine.name"] == "native":
        return _across_strategies(arm, control)
    return Admission("T2", f"sums may be ordered differently: {', '.join(differing[:4])} differ")


def _across_strategies(arm: Mapping[str, Any], control: Mapping[str, Any]) -> Admission:
    k = microbatches_per_rank(arm)
    if k == 1:
        return Admission("T1", "numerics=ordered with one microbatch a rank sums in rank order under every strategy")
    strategies = (Strategy[run["sharding.strategy"]] for run in (arm, control))
    local = (Placements.of(each, None).accumulates_locally for each in strategies)
    left, right = ("microbatches before ranks" if each else "ranks before microbatches" for each in local)
    if left == right:
        return Admission("T1", f"numerics=ordered, and both strategies add {left}")
    return Admission("T2", f"with k = {k} one strategy adds {left}, the other {right}")


@cache
def matters(key: str) -> bool:
    """True if a dotted setting can change a sum, or its terms."""
    return key.split(".")[0] not in EXCLUDED and not key.startswith(WITHOUT_EFFECT)


def microbatches_per_rank(config: Mapping[str, Any]) -> int:
    return global_microbatches(config) // (int(config["mesh.world_size"]) // int(config.get("mesh.tp", 1)))


def global_microbatches(config: Mapping[str, Any]) -> int:
    return int(config["train.global_batch_size"]) // int(config["train.microbatch_size"])


RULE = ("name", "target", "betas", "eps", "momentum", "weight_decay")
OF_RULE = {"sgd": ("momentum", "weight_decay"), "adam": RULE[2:4] + RULE[5:], "adamw": RULE[2:4] + RULE[5:]}
"""Constants that matter, by the optimizer's name."""


def is_one(arm: Record, control: Record) -> bool:
    return arm.is_watched or control.is_watched


def is_mixed(arm: Record, control: Record) -> bool:
    return arm.is_watched != control.is_watched


def _check_watched(arm: Record, control: Record) -> list[Finding]:
    steps = finding("steps", Stage.record, arm.length, control.length)
    settings = [f"optimizer.{key}" for key in ("name", *OF_RULE.get(str(arm.config["optimizer.name"]), RULE[1:]))]
    rules = [{setting: run.config.get(setting) for setting in settings} for run in (arm, control)]
    found = [steps, *_held(rules, Stage.optimizer), *_weights(arm, control)]
    if steps.grade is Grade.ok:
        fed = tells_data(arm) and tells_data(control) and not is_mixed(arm, control)
        found += [_steps(key, arm, control) for key in ("lr", *(["data_digest"] if fed else []))]
    return found


def _weights(arm: Record, control: Record) -> Iterator[Finding]:
    left, right = (str(run.summary.get("initial_weights") or "") for run in (arm, control))
    if is_mixed(arm, control):
        if 1 in arm.weights and 1 in control.weights:
            yield _first_weights(arm.weights[1], control.weights[1])
    elif left and right:
        yield finding("initial weights", Stage.weights, left, right)


def _first_weights(left: Capture, right: Capture) -> Finding:
    """First tensor that only one has, or that begins otherwise, in fp32."""
    for name in sorted(left.tensors.keys() | right.tensors.keys()):
        shapes = [list(of.tensors[name].shape) if name in of.tensors else None for of in (left, right)]
        if shapes[0] != shapes[1]:
            return finding(f"shape of {name}", Stage.weights, shapes[0], shapes[1])
        one, other = (of.values(name).astype(np.float32) for of in (left, right))
        if not np.array_equal(one, other):
            apart = f"off by {abs(one - other).max():.2g}"
            return finding(f"{name} before the first step", Stage.weights, apart, "the same")
    return finding("initial weights", Stage.weights, "equal", "equal")


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
    blind = [
        run.name
        for run in (arm, control)
        if not run.captures and (run.stream is None or np.isnan(run.stream.column("reduced_squares")).all())
    ]
    if blind:
        found.append(f"{' and '.join(blind)} shows no gradients, so only losses and weights were held side by side")
    left, right = (_origin(run.provenance) for run in (arm, control))
    known = [key for key in left if None not in (left[key], right[key])]
    odd = [f"{key.removesuffix(' version')} {left[key]} and {right[key]}" for key in known if left[key] != right[key]]
    if odd:
        found.append(f"they ran with {', '.join(odd)}")
    return found


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
        stream=run.stream
        and _Stepped(**{each.name: getattr(run.stream, each.name) for each in fields(Stream)}, factors=factors),
        as_recorded=run,
    )


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
    def kept(self) -> tuple[NDArray[np.int64], Float64]:
        steps, rows = super().kept
        return steps, self._scaled(rows, self.factors[steps - 1][:, None], tensor_columns(self.sketches))

    def _scaled(self, rows: Float64, factors: Float64, columns: Sequence[str]) -> Float64:
        found = rows.copy()
        for at, name in enumerate(columns):
            if name.startswith("reduced_"):
                found[..., at] *= factors**2 if name.endswith("squares") else factors
        return found
