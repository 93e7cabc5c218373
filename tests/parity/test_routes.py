"""What rounding may do to routed, reused and tiny tensors: where a refutation becomes a doubt, and where not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.parity.outcome import Grade
from harness.parity.tiers import numeric
from harness.parity.tiers.arithmetic import Arithmetic
from harness.parity.tiers.envelope import Envelope
from harness.parity.tiers.gradients import Block, Mismatch, TensorPair

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


def test_a_few_experts_may_have_swapped_tokens_and_not_more() -> None:
    limits = envelope(ROUTED)
    assert limits.flips == 3
    assert grades(model(), limits) == {Grade.ok}
    assert grades(model(*(expert(number) for number in range(6))), limits) == {Grade.ok, Grade.doubt}
    assert Grade.bad in grades(model(*(expert(number) for number in range(7))), limits)


def test_an_expert_that_only_one_run_used_is_in_doubt() -> None:
    unused = replace(expert(0, float("inf")), norm=0.0)
    assert grades(model(unused), envelope(ROUTED)) == {Grade.ok, Grade.doubt}


@pytest.mark.parametrize(
    "limits", [envelope(DENSE), envelope(ROUTED, same_forward=True), envelope(replace(ROUTED, experts_per_token=8))]
)
def test_nothing_is_excused_where_no_route_can_have_flipped(limits: Envelope) -> None:
    assert limits.flips == 0
    assert limits.rerouted == limits.rerouted_scale == limits.rerouted_loss == limits.rerouted_norm == 0.0
    assert Grade.bad in grades(model(expert(0)), limits)


def test_a_lost_expert_and_a_wrong_dense_tensor_are_not_excused() -> None:
    limits = envelope(ROUTED)
    lost = Mismatch("blocks.0.ffn.experts.0.w_up.weight", "absent", "[32, 48]")
    kinds = numeric.first_step(model(), [lost], limits, [])
    assert kinds[0][0].grade is Grade.bad
    assert Grade.bad in grades(model(pair("blocks.0.attention.wq.weight", 1.0)), limits)
    assert Grade.bad in grades(model(pair("blocks.0.attention.wq.weight", 2e-7, b=0.5)), limits)


def test_flips_grow_with_the_error_of_the_scores() -> None:
    coarse = envelope(replace(ROUTED, compute="bf16"))
    assert 100 < coarse.flips < 300
    assert coarse.rerouted > envelope(ROUTED).rerouted > 0


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


def test_a_doubled_gain_is_refuted_in_fp32() -> None:
    one = replace(pair("blocks.0.gain", 1.0, 1, b=1.0), block=Block(0, 1, 1.0))
    assert Grade.bad in grades(model(one), envelope(DENSE))


def test_a_reused_weight_may_be_one_rounding_off_its_fellows_and_no_other_may() -> None:
    run = replace(DENSE, compute="bf16", reused=r"embedding\.weight")
    limits = Envelope(run, run)
    for name, expected in (("embedding.weight", {Grade.ok}), ("head.output.weight", {Grade.ok, Grade.doubt})):
        assert grades([*(replace(each, distance=0.0) for each in model()), pair(name, 1e-3)], limits) == expected


def test_families_are_read_from_the_frozen_configuration() -> None:
    from harness.store.rundir import flatten
    from tests.parity.arms import Arm

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
