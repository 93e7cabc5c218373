"""T1: where bits are owed, that a single one counts, and that equal ones are said to be equal."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from harness.parity import Outcome
from harness.parity.record import load
from harness.parity.telling import wording
from harness.parity.tiers.bitwise import same_float
from harness.parity.tiers.comparable import admissible
from harness.store.rundir import flatten
from tests.parity.arms import Arm
from tests.parity.conftest import Bench
from tests.parity.corpus import OURS
from tests.parity.edits import next_float
from tests.parity.lab import CLEAN

ORDERED = replace(OURS, numerics="ordered", strategy="optim", k=1)


def test_a_repetition_is_equal(bench: Bench) -> None:
    verdict = bench.held(replace(ORDERED, replicate=1), ORDERED)
    assert verdict.outcome is Outcome.EQUAL
    assert "every recorded bit" in verdict.sentence
    run, rows = load(bench.run(ORDERED), CLEAN), [row for row in verdict.evidence if row.tier == "T1"]
    (count,) = (row.count for row in rows if row.check == "gradient bits")
    several = wording.right_of(Outcome.EQUAL, run, run, [*rows, *rows], None, {}, (0, 0))
    assert re.findall(r"(\d+) gradient", several) == [str(2 * count)], "of several steps: one number"
    assert verdict.admissible.startswith("T1")


def test_bits_are_owed_across_strategies_only_while_sums_are_in_one_order(bench: Bench) -> None:
    """Real sums: ZeRO-1 and ZeRO-3 agree bit for bit at k = 1, and differ within rounding at k = 2."""
    for k, expected in ((1, Outcome.EQUAL), (2, Outcome.EQUIVALENT)):
        arm, control = (replace(ORDERED, k=k, strategy=s) for s in ("optim_grads_params", "optim"))
        assert bench.held(arm, control).outcome is expected
    wrong = replace(ORDERED, strategy="optim_grads_params")
    assert bench.held(wrong, replace(ORDERED, k=2)).outcome is Outcome.EQUIVALENT


def config(**changes: object) -> dict[str, object]:
    flat = flatten(replace(Arm(), **changes).config())  # type: ignore[arg-type]
    return flat


TIERS = [
    ("T2", {}, {}, "promises no order"),
    ("T1", {"numerics": "deterministic"}, {"numerics": "deterministic", "replicate": 1}, "run twice"),
    ("T1", {"numerics": "ordered", "captures": (1, 2)}, {"numerics": "ordered"}, "run twice"),
    ("T2", {"numerics": "ordered"}, {"numerics": "deterministic"}, "one arm is numerics=ordered"),
    (
        "T2",
        {"numerics": "deterministic", "strategy": "optim"},
        {"numerics": "deterministic"},
        "sharding.strategy differ",
    ),
    ("T1", {"numerics": "ordered", "k": 1, "strategy": "no_shard"}, {"numerics": "ordered", "k": 1}, "rank order"),
    (
        "T1",
        {"numerics": "ordered", "strategy": "no_shard"},
        {"numerics": "ordered", "strategy": "optim"},
        "before ranks",
    ),
    ("T1", {"numerics": "ordered", "strategy": "optim_grads"}, {"numerics": "ordered"}, "before microbatches"),
    ("T2", {"numerics": "ordered", "strategy": "optim"}, {"numerics": "ordered"}, "with k = 2"),
    ("T2", {"numerics": "ordered", "ranks": 4, "k": 1}, {"numerics": "ordered", "ranks": 2, "k": 1}, "world_size"),
    ("T2", {"numerics": "ordered", "ranks": 4, "k": 1}, {"numerics": "ordered", "ranks": 2, "k": 2}, "world_size"),
    ("T2", {"numerics": "ordered", "wire": "bf16"}, {"numerics": "ordered"}, "dtype.grad_comm"),
    ("T2", {"numerics": "ordered", "engine": "single"}, {"numerics": "ordered"}, "engine.name"),
    (
        "T2",
        {"numerics": "ordered", "engine": "deepspeed", "strategy": "optim"},
        {"numerics": "ordered", "engine": "deepspeed"},
        "differ",
    ),
]


@pytest.mark.parametrize(("tier", "arm", "control", "says"), TIERS)
def test_the_tier_follows_from_the_configurations(
    tier: str, arm: dict[str, object], control: dict[str, object], says: str
) -> None:
    for left, right in ((arm, control), (control, arm)):
        admission = admissible(config(**left), config(**right))
        assert admission.tier == tier
    assert says in admissible(config(**arm), config(**control)).reason


@pytest.mark.parametrize(("device", "tier"), [("cpu", "T1"), ("cuda", "T2")])
def test_user_buffers_choose_kernels_on_nccl_alone(device: str, tier: str) -> None:
    control = config(numerics="deterministic") | {"cluster.device": device}
    assert admissible(control | {"nccl_ub.mode": "auto"}, control).tier == tier


def test_floats_are_compared_by_bits() -> None:
    nan = float("nan")
    assert all(same_float(each, each) for each in (1.0, nan, None))
    assert not any(same_float(*pair) for pair in ((0.0, -0.0), (1.0, next_float(1.0)), (None, 1.0)))
