"""The bounds against what they bound: rounding simulated in numpy, a perturbed reference, and their numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.config.roundoff import RMS, UNIT
from harness.parity import Outcome
from harness.parity.outcome import Grade
from harness.parity.tensors import read
from harness.parity.tiers import numeric
from harness.parity.tiers.arithmetic import ORDERS, SAFETY, Arithmetic, error, margin, noise, of_piece, rounder
from harness.parity.tiers.envelope import Envelope
from harness.parity.tiers.gradients import Block, Mismatch, TensorPair
from harness.store.rundir import flatten
from tests.parity.arms import Arm
from tests.parity.conftest import Bench
from tests.parity.edits import edit_capture
from tests.parity.network import bf16
from tests.support.mutants import each_found_by

TINY = Arithmetic("fp32", "fp32", "fp32", "fp32", 4, 2, 2, 4, 2048, 512, 200_000)
BF16 = replace(TINY, compute="bf16")


def test_one_rounding_errs_by_the_stated_mean_square_and_never_more_than_u() -> None:
    values = np.exp(np.random.default_rng(0).uniform(0, 8, 200_000)).astype(np.float32)
    errors = (bf16(values).astype(np.float64) - values) / values
    assert np.abs(errors).max() <= UNIT["bf16"]
    assert math.sqrt(float(np.mean(errors**2))) == pytest.approx(RMS * UNIT["bf16"], rel=0.02)


@pytest.mark.parametrize("ranks", [2, 8, 64, 512])
def test_fp32_sums_err_as_much_as_a_walk_over_partial_sums(ranks: int) -> None:
    """sqrt(N / 2) roundings of the sums, one of the mean; where addends are nearly equal, sums of hundreds walk a
    quarter farther, because they all lie near the top of one power of two."""
    walk = RMS * UNIT["fp32"] * math.sqrt(ranks / 2 + 1)
    assert 0.5 * walk < noise(ranks, 1, "fp32", "fp32", "fp32") < 1.4 * walk
    assert error("tree", ranks, "fp32", "fp32", "fp32", 0.0, 1.0) < 1.5 * RMS * UNIT["fp32"] * math.sqrt(
        math.log2(ranks) + 1
    )


def test_orders_are_told_apart_where_partial_sums_are_rounded() -> None:
    """Nearly equal contributions of 64 ranks in bf16: one after the other they stagnate, in pairs they do not."""
    ring, tree = (error(order, 64, "bf16", "bf16", "fp32", 0.9, 0.02) for order in ("ring", "tree"))
    assert ring > 10 * tree
    assert noise(64, 1, "bf16", "bf16", "fp32") >= ring


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_every_order_adds_every_contribution_once(order: str, count: int) -> None:
    addends = np.random.default_rng(count).integers(-8, 8, (count, 2 * count)).astype(np.float64)
    same = rounder("fp64")
    assert np.array_equal(ORDERS[order](addends, same, same), addends.sum(0))


def test_a_sum_kept_in_bf16_stagnates_within_the_worst_case() -> None:
    """Gradients with a common mean: additions are lost one-sidedly, far beyond any walk."""
    ranks = 512
    terms = (np.random.default_rng(3).standard_normal((ranks, 2_000)) / 50 + 0.9).astype(np.float32)
    total = bf16(terms[0])
    for term in terms[1:]:
        total = bf16(total + bf16(term))
    exact = terms.astype(np.float64).sum(0)
    bias = float(np.vdot(total - exact, exact) / np.vdot(exact, exact))
    kept = replace(TINY, ranks=ranks, accumulate="bf16")
    assert bias < -10 * RMS * UNIT["bf16"]  # a walk does not explain it
    assert abs(bias) < kept.stagnation


@pytest.mark.parametrize(
    ("arm", "control", "distance", "loss"),
    [
        (TINY, TINY, 3.03e-5, 6.25e-7),
        (BF16, TINY, 1.05e-1, 1.34e-3),
        (replace(TINY, wire="bf16"), TINY, 6.64e-3, 6.25e-7),
        (TINY, Arithmetic("fp64", "fp64", "fp64", "fp64", 4, 1, 4, 4, 2048, 512, 200_000), 2.14e-5, 5.12e-7),
    ],
)
def test_the_numbers_the_bounds_come_to(arm: Arithmetic, control: Arithmetic, distance: float, loss: float) -> None:
    """Pinned: whoever changes a constant sees here what it does to every verdict."""
    envelope = Envelope(arm, control)
    assert envelope.distance == pytest.approx(distance, rel=0.01)
    assert envelope.loss == pytest.approx(loss, rel=0.01)


QUANTIZED = {"current": (0.3247, 0.1510)} | dict.fromkeys(("block", "mx", "mx_32x32"), (0.2641, 0.1510))
"""By hand for four blocks: 16 products, u = 2^-4 and 2^-3; RMS sqrt(64 u^2 + 17 (u^2 + v^2)) and RMS sqrt(32 u^2)."""


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_operands_of_8_bits_are_counted_once_a_product(recipe: str) -> None:
    run = replace(BF16, fp8=recipe)
    gradient, forward = QUANTIZED[recipe]
    assert run.gradient == pytest.approx(gradient, rel=0.01)
    assert run.forward == pytest.approx(forward, rel=0.01)
    assert run.quantized(1) < run.quantized() < run.gradient
    assert replace(run, fp8="delayed").gradient > 1, "a recipe of an earlier version may lose anything"


def test_what_tensors_share_is_capped_by_their_residual_and_by_the_dtype() -> None:
    """Of two runs with no other difference, in 16 or in 8 bits, one thousandth is far beyond what may be shared."""
    for run in (BF16, replace(BF16, fp8="current")):
        assert Envelope(run, run).scale(standard_error=0.0, residual=1e-8) < 1e-6
        assert Envelope(run, run).is_low_precision
    envelope = Envelope(BF16, TINY)
    assert envelope.scale(0.0, 1.0) == pytest.approx(2 * UNIT["bf16"], rel=0.01)
    assert envelope.global_scale(0.0, 1.0) == pytest.approx(UNIT["bf16"], rel=0.01)
    assert of_piece(1.0, 1) > 1.5 * of_piece(1.0, 1000) > 1.5, "a small piece may lie farther off than a large one"


# -- routed, reused and tiny tensors: where a refutation becomes a doubt -----------------------------------------------

DENSE = Arithmetic("fp32", "fp32", "fp32", "fp32", 3, 2, 2, 4, 2048, 512, 157_392)
ROUTED = replace(DENSE, num_experts=8, experts_per_token=2)
EXACT = {"compute": "fp64", "wire": "fp64", "accumulate": "fp64", "main": "fp64"}


def envelope(run: Arithmetic, same_forward: bool = False) -> Envelope:
    return Envelope(run, replace(run, **EXACT), same_forward)


def pair(name: str, off: float, numel: int = 4096, b: float = 0.0) -> TensorPair:
    return TensorPair(name, False, True, True, numel, 1.0, 1.0, off, b, 1e-9, off, Block(0, numel // 32 or 1, off))


def grades(pairs: list[TensorPair], limits: Envelope) -> set[Grade]:
    return {f.grade for kind in numeric.first_step(pairs, [], limits, numeric.suspects(limits)) for f in kind}


def expert(number: int, off: float = 0.3) -> TensorPair:
    return pair(f"blocks.{number // 8}.ffn.experts.{number % 8}.w_up.weight", off)


def model(*off: TensorPair) -> list[TensorPair]:
    """A pair of runs in which all but these tensors are as close as rounding leaves them."""
    clean = [expert(number, 2e-7) for number in range(24)] + [pair(f"blocks.{n}.norm.weight", 2e-7) for n in range(9)]
    return [*(each for each in clean if each.name not in {other.name for other in off}), *off]


ATTENTION = "blocks.0.attention.wq.weight"
ROUTES: list[tuple[str, Envelope, list[TensorPair], set[Grade]]] = [
    ("clean", envelope(ROUTED), [], {Grade.ok}),
    ("as many experts as tokens may swap", envelope(ROUTED), [expert(n) for n in range(6)], {Grade.ok, Grade.doubt}),
    ("one expert more", envelope(ROUTED), [expert(n) for n in range(7)], {Grade.ok, Grade.bad}),
    ("used by one", envelope(ROUTED), [replace(expert(0, math.inf), norm=0.0)], {Grade.ok, Grade.doubt}),
    ("no experts", envelope(DENSE), [expert(0)], {Grade.ok, Grade.bad}),
    ("equal losses", envelope(ROUTED, same_forward=True), [expert(0)], {Grade.ok, Grade.bad}),
    ("all are chosen", envelope(replace(ROUTED, experts_per_token=8)), [expert(0)], {Grade.ok, Grade.bad}),
    ("a dense tensor", envelope(ROUTED), [pair(ATTENTION, 1.0)], {Grade.ok, Grade.bad}),
    ("a dense tensor's scale", envelope(ROUTED), [pair(ATTENTION, 2e-7, b=0.5)], {Grade.ok, Grade.bad}),
    ("a doubled gain", envelope(DENSE), [pair("blocks.0.gain", 1.0, 1, b=1.0)], {Grade.ok, Grade.bad}),
]


@pytest.mark.parametrize(("limits", "off", "expected"), [row[1:] for row in ROUTES], ids=[row[0] for row in ROUTES])
def test_what_swapped_tokens_may_explain_is_in_doubt(
    limits: Envelope, off: list[TensorPair], expected: set[Grade]
) -> None:
    assert grades(model(*off), limits) == expected


def test_no_route_flips_where_none_can() -> None:
    assert envelope(ROUTED).flips == 3
    for limits in (envelope(DENSE), envelope(ROUTED, same_forward=True)):
        assert limits.flips == limits.rerouted == limits.rerouted_scale == limits.rerouted_norm == 0.0
    lost = Mismatch("blocks.0.ffn.experts.0.w_up.weight", "absent", "[32, 48]")
    assert numeric.first_step(model(), [lost], envelope(ROUTED), [])[0][0].grade is Grade.bad
    coarse = envelope(replace(ROUTED, compute="bf16"))
    assert 100 < coarse.flips < 300
    assert coarse.rerouted > envelope(ROUTED).rerouted > 0, "flips grow with the error of the scores"


@pytest.mark.parametrize(("numel", "factor"), [(1, 2500), (2, 25), (3, 5.386), (6, 1.16), (7, 1), (4096, 1)])
def test_a_sum_of_few_elements_may_cancel(numel: int, factor: float) -> None:
    limits = envelope(DENSE)
    assert limits.few(numel) == pytest.approx(factor, rel=1e-3)
    for share, expected in ((0.9, {Grade.ok}), (2.5, {Grade.ok, Grade.bad})):
        off = share * factor * limits.distance
        one = replace(pair("blocks.0.gain", off, numel, b=off if numel < 7 else 0.0), block=Block(0, numel, off))
        found = [f for kind in numeric.first_step(model(one), [], limits, [(2.0, "")]) for f in kind]
        of_it = {f.grade for f in found if f.tensor == one.name and f.check == "gradient distance"}
        assert of_it == (expected - {Grade.ok} or expected)
        if share < 1:
            assert {f.grade for f in found if f.check in ("gradient scale", "scale of all gradients")} == {Grade.ok}


def test_a_reused_weight_may_be_one_rounding_off_and_no_other_may() -> None:
    run = replace(DENSE, compute="bf16", reused=r"embedding\.weight")
    limits = Envelope(run, run)
    assert limits.floor("embedding.weight") > 1e-3 > 100 * limits.floor("head.output.weight")


def test_families_are_read_from_the_frozen_configuration() -> None:
    config = flatten(Arm().config())
    assert Arithmetic.of(config).reused == ""
    assert Arithmetic.of({**config, "model.tie_embeddings": True}).reused == r"embedding\.weight"
    odd = Arithmetic.of({**config, "model.family": "odd", "model.repeat_unit": True})
    assert odd.layers == Arithmetic.of(config).layers + 1
    assert odd.gradient > Arithmetic.of(config).gradient
    moe = Arithmetic.of({**config, "model.family": "moe"})
    assert (moe.num_experts, moe.experts_per_token) == (4, 2)
    assert Arithmetic.of(config).num_experts == 1
    before = {key: value for key, value in config.items() if key not in ("model.family", "model.skip_idle")}
    assert Arithmetic.of(before) == Arithmetic.of(config), "runs from before there were families"


test_a_mutant_is_found = each_found_by(
    "The comparator: bounds of rounding",
    """
    equal losses: Routes are said to flip where losses are equal
        parity.tiers.envelope.Envelope.flips: if self.same_forward => if not self.arm
    a median of flips: Flips are bounded by what one run in two exceeds
        parity.tiers.envelope._most: 1 - 1e-6 => 0.5
    density of the chosen: Scores are as dense as the chosen experts alone
        parity.tiers.arithmetic.Arithmetic.swapped: density = n * => density = k *
    safety twice: Few elements have a margin on top of the margin
        parity.tiers.envelope.Envelope.few: / SAFETY) => )
    fewer: Of several elements none may cancel
        parity.tiers.envelope.Envelope.few: numel < FEW => numel < 2
    reuse in fp32: A reused weight's gradients are thought to be added in fp32
        parity.tiers.envelope.Envelope.floor: RMS * UNIT[run.compute] => RMS * UNIT["fp32"]
    an exact loss: The loss itself is not thought to be rounded
        parity.tiers.envelope.Envelope.loss: + 4 * UNIT[wide] =>
    one token: Errors of logits are not averaged over tokens
        parity.tiers.envelope.Envelope.loss: / math.sqrt(self.arm.tokens) =>
    a factor without residual: A shared factor is not capped by the residual it leaves
        parity.tiers.envelope.Envelope.scale: , residual) => , 1.0)
    a tensor's own: A factor of all gradients may be as large as that of one tensor
        parity.tiers.envelope.Envelope.global_scale: self.arm.global_coherent + => self.arm.coherent +
    a walk: A sum kept in 16 bits is thought to err as a walk does
        parity.tiers.arithmetic.Arithmetic.stagnation: (self.ranks - 1) * => math.sqrt(self.ranks - 1) *
    no recomputation: Operands of 8 bits are rounded once for two forwards
        parity.tiers.arithmetic.Arithmetic.quantized: squares = 2 * squares + => squares = squares +
    a piece as the whole: A small piece is bounded like a large one
        parity.tiers.arithmetic.of_piece: max(1, numel) => 1000
    """,
    test_what_tensors_share_is_capped_by_their_residual_and_by_the_dtype,
    test_no_route_flips_where_none_can,
    test_the_numbers_the_bounds_come_to,
    test_operands_of_8_bits_are_counted_once_a_product,
    test_a_sum_of_few_elements_may_cancel,
    test_a_reused_weight_may_be_one_rounding_off_and_no_other_may,
    test_a_sum_kept_in_bf16_stagnates_within_the_worst_case,
)


ARM = Arm(engine="native", strategy="optim", updates=())
REFERENCE = Arm(engine="single", strategy="no_shard", compute="fp64", main="fp64", ranks=1, k=4, updates=())
TENSOR = "blocks.0.w_up.weight"


def knowing(bench: Bench, tmp_path: Path, **moves: float) -> Path:
    """The exact control, with a reach of 1e-7 for every tensor, and another where one is given."""
    run = bench.copy(REFERENCE, tmp_path / "control")
    names = read(run / "capture", (1,), ()).gradients[1].tensors
    reach = {name: {"distance": moves.get(name.replace(".", "_"), 1e-7), "scale": 1e-8} for name in names}
    reach[""] = {"distance": 1e-7, "scale": 1e-8, "loss": 1e-8}
    (run / "capture/rounding-000001.json").write_text(json.dumps({"draws": 8, "moves": {"fp32": reach}}))
    return run


def moved(bench: Bench, tmp_path: Path, off: float) -> Path:
    """The arm, with noise of a relative size on one tensor."""
    run = bench.copy(ARM, tmp_path / "moved")

    def change(tensors: dict[str, Any]) -> None:
        grad = tensors[f"gradient/{TENSOR}"]
        noise = np.random.default_rng(5).standard_normal(grad.shape)
        grad += (off * noise * np.linalg.norm(grad) / np.linalg.norm(noise)).astype(np.float32)

    edit_capture(run, 1, change)
    return run


def test_what_counting_passes_a_known_reach_refutes(bench: Bench, tmp_path: Path) -> None:
    arm = moved(bench, tmp_path, 3e-6)
    assert bench.held(arm, REFERENCE).outcome in (Outcome.EQUIVALENT, Outcome.UNDECIDED)
    verdict = bench.held(arm, knowing(bench, tmp_path))
    assert verdict.outcome is Outcome.DIFFERENT
    assert TENSOR in verdict.sentence
    assert bench.held(arm, knowing(bench, tmp_path / "far", blocks_0_w_up_weight=1e-6)).findings == ()
    assert bench.held(ARM, tmp_path / "control" / "lab" / "run").outcome is Outcome.EQUIVALENT


def test_few_elements_are_given_more_room_by_what_few_draws_can_tell() -> None:
    rooms = [margin(numel, 8) for numel in (1, 2, 4, 16, 32, 1000)]
    assert rooms == sorted(rooms, reverse=True)
    assert rooms[-2:] == [SAFETY, SAFETY]
    assert 10 < rooms[0] < 30
    assert margin(1, 2) > 2 * rooms[0]


@pytest.mark.parametrize("numel", [1, 3, 32])
def test_the_room_holds_for_errors_drawn_alike(numel: int) -> None:
    """A hundred thousand times: an error as large as the draws were, beyond a bound once in ten thousand at most."""
    rng = np.random.default_rng(numel)
    squares = rng.chisquare(numel, 100_000), rng.chisquare(8 * numel, 100_000) / 8
    assert np.mean(np.sqrt(squares[0]) > margin(numel, 8) * np.sqrt(squares[1])) <= 1e-4
