"""Which tier two configurations admit: bitwise only where the order of arithmetic is provably the same.

    same settings, numerics deterministic or ordered      T1: a re-run, or a resumed run, repeats every sum
    numerics=ordered, native, k = 1, one world size       T1 across all strategies: every sum is in rank order
    numerics=ordered, native, k > 1                       T1 within {no_shard, optim}, which add microbatches before
                                                          ranks, and within {optim_grads, optim_grads_params}, which
                                                          add ranks before microbatches; not between the two
    numerics=exact, one M and one microbatch size         T1 across strategies, numbers of ranks, hybrid shapes and
                                                          sizes of units, and between native and single: integers are
                                                          added
    anything else                                         T2

Bits are compared whatever the tier, and equal ones are reported as EQUAL. The tier says when unequal ones are a fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from harness.config.capabilities import SAME_BITS
from harness.fsdp import Placements
from harness.fsdp.vocabulary import Strategy
from harness.store.identity import EXCLUDED

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
