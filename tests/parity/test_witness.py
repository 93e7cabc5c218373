"""A run's own witnesses: a fault is found without another run, and placed by what it comes after."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from harness.config.roundoff import UNIT
from harness.parity import Grade, Outcome, Verdict
from harness.parity.alone import witness
from harness.parity.outcome import Stage
from harness.parity.tiers import gradients
from harness.parity.tiers.arithmetic import Arithmetic
from tests.parity.arms import Arm, Array, broken
from tests.parity.conftest import Bench
from tests.parity.corpus import BF16, FP32, OURS, OURS_BF16, OURS_SGD, REDUCTIONS, ROUNDINGS, scaled, stored_as
from tests.parity.edits import edit_capture, edit_json
from tests.support.mutants import finds, kills

TINY_RUN = Arithmetic("fp32", "fp32", "fp32", "fp32", 4, 2, 2, 4, 2048, 512, 200_000)
CONTROL = replace(FP32, witnessed=True)
SEEN = replace(OURS, witnessed=True)
SEEN_BF16 = replace(OURS_BF16, witnessed=True)
CONTROL_BF16 = replace(BF16, witnessed=True)
CHECKS = {"sum of local gradients", "sum, worst piece", "scale of the sum", "weights of the forward"}


def own(verdict: Verdict) -> list[Any]:
    """Evidence that witnesses gave."""
    return [row for row in verdict.evidence if row.check in CHECKS]


@pytest.mark.parametrize("change", ROUNDINGS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_what_rounding_does_passes_with_room(bench: Bench, change: dict[str, Any], seed: int) -> None:
    verdict = bench.held(replace(SEEN, seed=seed, **change), replace(CONTROL, seed=seed))
    assert verdict.outcome in (Outcome.EQUAL, Outcome.EQUIVALENT), verdict.sentence
    assert {row.check for row in own(verdict)} == CHECKS
    assert max(row.ratio for row in own(verdict)) < 0.8


@pytest.mark.parametrize("arm", [SEEN, SEEN_BF16, replace(OURS_SGD, witnessed=True)], ids=["fp32", "bf16", "sgd"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_wrong_sum_is_found_in_the_reduction_whatever_it_is_held_against(bench: Bench, arm: Arm, name: str) -> None:
    wrong = broken(arm, **REDUCTIONS[name])
    verdict = bench.held(wrong, replace(arm, engine="ddp", strategy="no_shard"))
    assert verdict.outcome is Outcome.DIFFERENT
    first = next(finding for finding in verdict.findings if finding.grade is not Grade.ok)
    assert (first.step, first.stage) == (1, Stage.reduction)


def test_two_runs_with_the_same_fault_are_different_too(bench: Bench) -> None:
    """Equal bits prove nothing where both are wrong."""
    wrong = broken(SEEN, **REDUCTIONS["duplicated"])
    verdict = bench.held(replace(wrong, replicate=1), wrong)
    assert verdict.outcome is Outcome.DIFFERENT
    assert "sum of local gradients (reduction" in verdict.sentence


def test_wrong_weights_come_first(bench: Bench, tmp_path: Path) -> None:
    run = bench.copy(SEEN, tmp_path)
    wrong = {"rank": 1, "tensor": "head.output.weight", "what": "computed with other weights than the main ones"}
    edit_capture(run, 1, lambda tensors: None, wrong_weights=[wrong])
    verdict = bench.held(run, CONTROL)
    assert verdict.outcome is Outcome.DIFFERENT
    assert "weights of the forward (gather, first in head.output.weight)" in verdict.sentence


def test_a_rank_that_ends_with_other_weights_is_different_and_named(bench: Bench, tmp_path: Path) -> None:
    run, found = bench.copy(OURS, tmp_path), []
    for others in ([], [1]):
        edit_json(run / "summary.json", other_replicas=others)
        found.append(bench.held(run, FP32))
    sound, wrong = found
    assert sound.exit_code == 0
    assert "replicas" in {row.check for row in sound.evidence}
    assert wrong.outcome is Outcome.DIFFERENT
    assert "replicas (gather) is rank 1 ends with other weights" in wrong.sentence


@kills("The comparator: structure", "replica", "not looked at: replica")
def test_replicas_that_nobody_looks_at_pass(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "replicas", lambda run: [])
    with pytest.raises(AssertionError):
        test_a_rank_that_ends_with_other_weights_is_different_and_named(bench, tmp_path)


def twenty_one_bits(values: Array) -> Array:
    """Rounded to 21 significant bits: three fewer than fp32 has."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x4)) & np.uint32(0xFFFFFFF8)).view(np.float32)


def three_bits_less_are_in_doubt(bench: Bench) -> None:
    """Of what fp32 has: no matter to ten times the bound or to the envelope of a pair."""
    arm = broken(SEEN, reduced=stored_as(twenty_one_bits))
    assert bench.held(arm, CONTROL).outcome is Outcome.UNDECIDED


@kills("The comparator: a run's own witnesses", "scale x 10", "The bound on the scale of a sum is ten times as wide")
def test_a_scale_ten_times_as_wide_is_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    arm = broken(SEEN_BF16, reduced=scaled(1 + 2e-6))
    scales = [row for row in bench.held(arm, CONTROL_BF16).evidence if row.check == "scale of the sum"]
    assert scales[0].grade is not Grade.ok
    monkeypatch.setattr(witness, "SIGMAS", 40.0)
    monkeypatch.setattr(Arithmetic, "scaling", 1e-4)
    scales = [row for row in bench.held(arm, CONTROL_BF16).evidence if row.check == "scale of the sum"]
    assert scales[0].grade is Grade.ok


def farthest_scale(heavy: float) -> float:
    """The largest scale error of 3,000 gains of 32 elements, one of them so many times the others, that were rounded to
    bf16: as a multiple of its standard error."""
    draws = np.random.default_rng(1)
    unit, found = UNIT["bf16"], 0.0
    for _ in range(3000):
        gain = draws.normal(size=32)
        gain[7] = heavy
        off = gain * draws.uniform(-unit, unit, 32)
        pair = gradients._fit("gain", off, gain, gain**2, float((gain**2).sum()), 1.0)
        found = max(found, abs(pair.b) / witness.scale_error(pair, unit / math.sqrt(3)))
    return found


@pytest.mark.parametrize("heavy", [1.0, 9.0, 50.0])
def test_a_scale_that_few_elements_carry_is_as_sure_as_these(heavy: float) -> None:
    assert farthest_scale(heavy) < witness.TENSOR_SIGMAS


def test_a_wrong_scale_of_one_element_is_no_rounding() -> None:
    gain = np.array([9.0, *np.ones(31)])
    pair = gradients._fit("gain", 0.05 * gain, gain, gain**2, float((gain**2).sum()), 1.0)
    assert pair.b / witness.scale_error(pair, UNIT["bf16"]) > 2 * witness.TENSOR_SIGMAS


def _in_integers(size: float) -> bool:
    """Whether a clean mean of four gradients under numerics=exact, whose elements have about so many times the
    integers' resolution, is within its bound."""
    run = replace(TINY_RUN, exact_bits=44)
    local = np.random.default_rng(0).standard_normal((4, 32, 32)) * size * 2.0**-44
    made = np.rint(local * 2.0**44).sum(0) * 2.0**-44 / 4
    pair = gradients.compare_values("w", made.astype(np.float32).astype(float), local.mean(0))
    told = SimpleNamespace(terms={"w": math.sqrt(float((local**2).sum())) / 4})
    return pair.distance <= witness._allowed(pair, cast(Any, told), run)


@pytest.mark.parametrize("size", [1e3, 1e6, 1e9, 1e12])
def test_what_integers_cannot_hold_of_a_tiny_gradient_is_no_fault(size: float) -> None:
    """A clean run of a user's model under numerics=exact was DIFFERENT though all bits were equal: its gradients, of
    1e-8, were rounded to the integers' resolution of 6e-14, which no bound had counted."""
    assert _in_integers(size)


test_a_mutant_is_found = finds(
    "The comparator: a run's own witnesses",
    three_bits_less_are_in_doubt="""
        bounds ten times as wide: bounds ten times as wide
            parity.alone.witness.SAFETY: was * 10
        blind: blind
            parity.alone.witness.check: lambda *a: []
        no distance, no piece: no distance, no piece
            parity.alone.witness._allowed: lambda *a: 1.0
    """,
    test_what_integers_cannot_hold_of_a_tiny_gradient_is_no_fault="""
        integers: What numerics=exact cannot hold of a tiny gradient counts as a fault
            parity.tiers.arithmetic.Arithmetic.lost: lambda *_: 0.0
            (size=1e3)
    """,
    test_a_scale_that_few_elements_carry_is_as_sure_as_these="""
        few speak for all: A scale fitted to one element has its residual
            parity.alone.witness.scale_error: lambda pair, _: pair.standard_error
            (heavy=9.0)
    """,
)
