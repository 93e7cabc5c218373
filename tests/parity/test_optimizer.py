"""The update oracle: what clean updates leave, what wrong ones show, without a control that could share the fault."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.config.update_rule import Rule, UpdateState
from harness.parity.alone import optimizer
from harness.parity.outcome import Finding, Grade, Outcome, Stage
from harness.parity.record import load
from harness.parity.tensors import read
from tests.parity.arms import Arm, Params, broken
from tests.parity.conftest import Bench
from tests.parity.edits import edit_capture, edit_config
from tests.parity.network import initial
from tests.support.mutants import finds

THREE = Arm(captures=(1, 2, 3), updates=(1, 2, 3))
WIDE = Arm(captures=(1, 2, 3), updates=(1, 2, 3), compute="fp64", main="fp64", ranks=1, k=4)
KINDS = {"update by the rule", "update by the rule, worst piece"}


def judged(path: Path) -> list[Finding]:
    return optimizer.check(load(path))


def wrong(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.grade is not Grade.ok]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("clip", [None, 0.1, 1e9])
@pytest.mark.parametrize("base", [THREE, WIDE, replace(THREE, compute="bf16"), replace(THREE, ranks=4, k=1)])
def test_a_clean_update_lies_within_half_of_what_is_allowed(bench: Bench, name: str, clip: float | None, base: Arm):
    found = judged(bench.run(replace(base, optimizer=name, clip=clip)))
    assert {finding.step for finding in found} == {1, 2, 3}
    assert {finding.check for finding in found} == KINDS
    assert max(finding.ratio for finding in found) < 0.75
    assert max(finding.ratio for finding in found) > 0.01  # a bound that says something


SGD = replace(THREE, optimizer="sgd", lr=0.1)
CLIPPED = broken(replace(SGD, clip=0.1), norm_factor=1.01, logged_norm_factor=1 / 1.01)
FAULTS: dict[str, tuple[Arm, str]] = {
    "one step ahead": (broken(THREE, adam_steps_ahead=1), "bias correction of step 2"),
    "no decay": (broken(THREE, no_decay=True), ""),
    "learning rate 1.001": (broken(THREE, lr_factor=1.001), "1.001 x the rule's"),
    "SGD's learning rate 1.001": (broken(SGD, lr_factor=1.001), "1.001 x the rule's"),
    "clipped by a wrong norm": (CLIPPED, "x the rule's"),
}


PURE = Arm(captures=(1, 2), updates=(1, 2), compute="bf16", main="bf16")


def wrong_in_16_bits(bench: Bench) -> list[str]:
    """Of a decay that only one weight in a hundred notices, and of none that is left out."""
    clean, faulty = (judged(bench.run(arm)) for arm in (PURE, broken(PURE, no_decay=True)))
    told = [(f.check, f.step, f.grade) for f in (*clean, *faulty)]
    return [] if told == [(optimizer.IN_16_BITS, 1, grade) for grade in (Grade.ok, Grade.bad)] else list(map(str, told))


def a_rate_off_by_5e_6_is_found(bench: Bench) -> None:
    """In both runs."""
    arm = broken(replace(THREE, captures=(1,), updates=(1,), optimizer="sgd", lr=1.0, clip=None), lr_factor=1 + 5e-6)
    assert bench.held(arm, replace(arm, replicate=1)).outcome is not Outcome.EQUAL


test_a_mutant_of_one_run_is_found = finds(
    "The comparator: the optimizer's rule",
    a_rate_off_by_5e_6_is_found="""
        bounds ten times as wide: bounds ten times as wide
            parity.alone.optimizer.SAFETY: was * 10
        blind: blind
            parity.alone.optimizer.check: lambda run: []
    """,
    wrong_in_16_bits="""
        no share: Other bits are not counted
            parity.alone.optimizer._rounded_once: (main(before + update) != => 0 * (main(before + update) !=
        no rounding: A weight is held to what 16 bits do not hold
            parity.alone.optimizer._rounded_once: main(before + update) => before + update
    """,
    test_a_decay_that_cancels_with_its_gradient_is_no_fault="""
        what cancels is exact: Adam's change of an element whose gradient and decay cancel is held to the norm of its tensor
            config.update_rule.Rule.cancelling: lambda *_, **__: 0.0
            (hooks={"reduced": cancels})
    """,  # noqa: E501
)


DECAYED = Arm(captures=(1, 2, 3), updates=(1, 2, 3), optimizer="adam", clip=None)
NAME = "blocks.0.w_up.weight"


def cancels(mean: Params, own: list[Params], arm: Arm) -> Params:
    """Some gradients that leave next to nothing of the decay of the first weights, and are rounded by as much."""
    weights, gradient = initial(arm.seed)[NAME].ravel(), mean[NAME].copy()
    for place, share in enumerate((0.0, 1e-7, -1e-7, 1e-6, 1e-5)):
        gradient.ravel()[place] = np.float32(-0.1 * weights[place] * (1 + share))
    return {**mean, NAME: gradient}


@pytest.mark.parametrize("hooks", [{}, {"reduced": cancels}], ids=["as it is", "some cancel"])
def test_a_decay_that_cancels_with_its_gradient_is_no_fault(bench: Bench, hooks: dict[str, Any]) -> None:
    """Seen with optimizer=adam optimizer.weight_decay=0.1: one element in 200,000 made a clean run DIFFERENT."""
    found = judged(bench.run(broken(DECAYED, **hooks)))
    assert {finding.step for finding in found} == {1, 2, 3}
    assert max(finding.ratio for finding in found) < 0.75
    for fault in ({"no_decay": True}, {"lr_factor": 1.001}, {"adam_steps_ahead": 1}):
        assert wrong(judged(bench.run(broken(DECAYED, **hooks, **fault))))[0].step == 1


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_update_shows_in_a_pair_that_shares_it(bench: Bench, name: str) -> None:
    arm, says = FAULTS[name]
    verdict = bench.held(arm, replace(arm, replicate=1))
    assert verdict.outcome is Outcome.DIFFERENT, verdict.sentence
    assert verdict.findings[0].step == 1
    assert "update by the rule" in verdict.sentence
    assert says in verdict.sentence


def test_one_factor_on_all_clipped_gradients_is_of_clipping_or_of_sgd(bench: Bench) -> None:
    """Which dampens, so that the first step of its momentum looks the same."""
    assert {finding.place for finding in wrong(judged(bench.run(CLIPPED)))} == {"between clipping and optimizer"}
    unclipped = broken(replace(SGD, clip=None), lr_factor=1.01)
    assert {finding.stage for finding in wrong(judged(bench.run(unclipped)))} == {Stage.optimizer}


def test_a_lost_tail_of_an_update_shows_in_its_piece(bench: Bench, tmp_path: Path) -> None:
    run = bench.copy(THREE, tmp_path)
    before = read(run / "capture", (), (1, 2)).ends[1].values("blocks.0.w_up.weight")

    def change(tensors: dict[str, Any]) -> None:
        tensors["after/blocks.0.w_up.weight"].ravel()[-2:] = before.ravel()[-2:]

    edit_capture(run, 2, change)
    found = wrong(judged(run))
    assert {finding.step for finding in found} == {2, 3}  # and then other weights are decayed
    assert found[0].tensor == "blocks.0.w_up.weight"
    assert any("elements" in finding.note for finding in found)


def test_what_has_no_gradient_must_not_move(bench: Bench, tmp_path: Path) -> None:
    run = bench.copy(THREE, tmp_path)
    for step in (1, 2, 3):
        edit_capture(run, step, lambda tensors: tensors.pop("gradient/embedding.weight"))
    assert "update without a gradient" in {finding.check for finding in wrong(judged(run))}


def test_where_it_cannot_be_worked_out_nothing_is_said(bench: Bench, tmp_path: Path) -> None:
    run = bench.copy(THREE, tmp_path)
    (run / "capture/step-000002.safetensors").unlink()
    edit_config(run, "measure", capture_steps=[1, 3])  # not by damage
    assert {finding.step for finding in judged(run)} == {1}
    assert judged(bench.run(replace(THREE, updates=(2, 3)))) == []
    assert judged(bench.run(replace(PURE, engine="single"))) == []
    assert judged(bench.run(replace(PURE, numerics="ordered"))) == []


MUON = {
    "optimizer.name": "muon", "optimizer.betas": [0.9, 0.95], "optimizer.eps": 1e-8, "optimizer.momentum": 0.95,
    "optimizer.weight_decay": 0.1, "optimizer.nesterov": True, "optimizer.ns_coefficients": [3.4445, -4.775, 2.0315],
    "optimizer.ns_steps": 5, "optimizer.adjust_lr_fn": "original", "optimizer.clip_norm": 1.0,
}  # fmt: skip


def muons_distance(shape: tuple[int, int], settings: dict[str, Any]) -> float:
    """Of the third update of torch's Muon in fp32 from the rule's, over what is allowed."""
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape, generator=generator).requires_grad_()
    stepper = torch.optim.Muon([weight], lr=0.01, **settings)
    rule = Rule.of(MUON | {f"optimizer.{name}": value for name, value in settings.items()})
    state = UpdateState(weight.detach().double().numpy(), 0.0)
    for step in range(1, 4):
        weight.grad = torch.randn(shape, generator=generator)
        gradient = weight.grad.double().numpy()
        stepper.step()
        allowed = rule.rounding(state, gradient, 0.01) + 1e-6
        predicted = rule.update(state, gradient, step, 0.01, decays=True)
        update = weight.detach().double().numpy() - state.weights
        state.weights = weight.detach().double().numpy()
    assert allowed < 0.3 * np.linalg.norm(predicted)
    return float(np.linalg.norm(update - predicted) / allowed)


def far_from_muons_rule() -> Iterator[str]:
    """Where torch's Muon is farther from it than rounding of its iteration explains."""
    for settings in ({}, {"nesterov": False, "momentum": 0.5}, {"adjust_lr_fn": "match_rms_adamw"}):
        for shape in ((40, 24), (24, 40), (1, 9), (9, 1), (64, 64), (7, 128)):
            if muons_distance(shape, settings) >= 1:
                yield f"{shape}, {settings}"


test_a_slip_of_muons_rule_is_noticed = finds(
    "Muon's rule",
    far_from_muons_rule="""
        scale: Wide ones are scaled as tall
            config.update_rule.Iteration.scale: rows / columns => columns / rows
        norm: Squares are the norm
            config.update_rule.Iteration.orthogonalized: ** 0.5) => )
        iterations: Less
            config.update_rule.Iteration.orthogonalized: range(self => range(1, self
        mix: The momentum itself
            config.update_rule.Rule.mix: if self.iteration.nesterov => if False
        share: As SGD's momentum
            config.update_rule.Rule._update: (1 - self.momentum) * gradient => gradient
    """,
)
