"""T0: facts that must agree before two runs may be compared; and the tier that their configurations admit.

Bits are owed only where the order of arithmetic is provably the same: docs/verdicts.md ("T1: bits") has the table. Bits
are compared whatever the tier, and equal ones are reported as EQUAL. The tier says when unequal ones are a fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from harness.config.capabilities import SAME_BITS
from harness.fsdp import Placements
from harness.fsdp.vocabulary import Strategy
from harness.parity.outcome import Finding, Grade, Stage
from harness.parity.record import Record
from harness.parity.tiers import watched
from harness.store.identity import EXCLUDED, must_agree

FREE_OWN = ("engine", "callback", "fault")

FACTS = ("cpu_model", "cpu_capability", "device", "threads_per_rank", "cuda", "nccl", "allow_tf32")

VERSIONS = ("torch",)
"""Packages whose version must agree; numpy only feeds data, whose digest is compared."""

VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "NVIDIA_TF32_OVERRIDE")

NEEDED = ("cpu_model", "threads_per_rank")


def check(arm: Record, control: Record) -> list[Finding]:
    unfit = [*_problems(arm), *_problems(control)]
    if unfit:
        return unfit
    if watched.is_one(arm, control):
        return watched.check(arm, control, finding)
    return [
        finding("sources", Stage.record, arm.provenance["sources_digest"], control.provenance["sources_digest"]),
        *_config(arm, control),
        *_origin(arm, control),
        *_kernels(arm, control),
        *_own(arm, control),
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


def _config(arm: Record, control: Record) -> list[Finding]:
    held = [key for key in sorted(arm.config.keys() | control.config.keys()) if must_agree(key)]
    differing = [key for key in held if arm.config.get(key) != control.config.get(key)]
    if not differing:
        return [Finding("T0", "configuration", Stage.record, Grade.ok, "equal", "equal", count=len(held))]
    return [finding(key, Stage.record, arm.config.get(key), control.config.get(key)) for key in differing]


def _origin(arm: Record, control: Record) -> list[Finding]:
    left, right = _facts(arm.provenance), _facts(control.provenance)
    findings = [finding(key, Stage.record, left[key], right[key]) for key in left]
    unknown = [key for key in NEEDED if left[key] is None]
    return findings + [
        Finding("T0", key, Stage.record, Grade.bad, "absent", "known", note="provenance.json does not say")
        for key in unknown
    ]


def _own(arm: Record, control: Record) -> list[Finding]:
    left, right = (
        {each["name"]: each["digest"] for each in run.provenance.get("own", ()) if each["kind"] not in FREE_OWN}
        for run in (arm, control)
    )
    return [finding(f"files of {name}", Stage.record, left.get(name), right.get(name)) for name in {**left, **right}]


def _kernels(arm: Record, control: Record) -> list[Finding]:
    """Switches of torch that both records have; runs of versions before do not say."""
    left, right = (run.provenance.get("kernels") or {} for run in (arm, control))
    note = "a switch of torch that chooses kernels; the program, or a package that it imports, has set it"
    return [
        finding(f"torch's {key}", Stage.record, left[key], right[key], note=note if left[key] != right[key] else "")
        for key in sorted(left.keys() & right.keys())
    ]


def _facts(origin: Mapping[str, Any]) -> dict[str, object]:
    versions, environment = origin.get("versions") or {}, origin.get("environment") or {}
    return {
        **{f"{name} version": versions.get(name) for name in VERSIONS},
        **{key: origin.get(key) for key in FACTS},
        **{name: environment.get(name) for name in VARIABLES},
    }


def _steps(key: str, arm: Record, control: Record) -> Finding:
    stage = Stage.optimizer if key == "lr" else Stage.data
    series = arm.columns[key], control.columns[key]
    if series[0] != series[1]:
        for step, (left, right) in enumerate(zip(*series, strict=False), start=1):  # of another length: train.steps
            if left != right:
                note = "the data of the two runs holds other tokens" if key == "data_digest" else ""
                return finding(key, stage, left, right, step=step, note=note)
    return Finding("T0", key, stage, Grade.ok, "equal", "equal", count=arm.length)


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
    left, right = (sum_order(Strategy[run["sharding.strategy"]]) for run in (arm, control))
    if left == right:
        return Admission("T1", f"numerics=ordered, and both strategies add {left}")
    return Admission("T2", f"with k = {k} one strategy adds {left}, the other {right}")


def sum_order(strategy: Strategy) -> str:
    local = Placements.of(strategy, None).accumulates_locally
    return "microbatches before ranks" if local else "ranks before microbatches"


@cache
def matters(key: str) -> bool:
    """True if a dotted setting can change a sum, or its terms."""
    return key.split(".")[0] not in EXCLUDED and not key.startswith(WITHOUT_EFFECT)


def microbatches_per_rank(config: Mapping[str, Any]) -> int:
    return global_microbatches(config) // (int(config["mesh.world_size"]) // int(config.get("mesh.tp", 1)))


def global_microbatches(config: Mapping[str, Any]) -> int:
    return int(config["train.global_batch_size"]) // int(config["train.microbatch_size"])
