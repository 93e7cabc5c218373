"""The fault, not the arm it sits in, is what is refused; and where nothing but captured gradients shows it."""

from __future__ import annotations

from dataclasses import replace

from harness.parity import Outcome
from tests.parity.arms import Fault
from tests.parity.conftest import Bench
from tests.parity.corpus import FAULTS


def test_every_fault_has_a_baseline_that_passes(bench: Bench) -> None:
    """The fault, not the arm it sits in, is what is refused."""
    baselines = {repr(replace(case.arm, fault=Fault())): case for case in FAULTS}
    for case in baselines.values():
        baseline = replace(case, arm=replace(case.arm, fault=Fault()))
        assert bench.judge(baseline).exit_code == 0, case.name


def test_adam_hides_a_scale_from_the_loss_and_not_from_the_verdict(bench: Bench) -> None:
    """Why gradients are captured: the losses of a doubled gradient under Adam stay within half a per cent."""
    case = next(case for case in FAULTS if case.name == "scale twice, Adam")
    verdict = bench.judge(case)
    losses = [finding for finding in verdict.evidence if finding.check == "loss"]
    assert all(float(finding.observed) < 5e-3 for finding in losses)
    assert verdict.outcome is Outcome.DIFFERENT
