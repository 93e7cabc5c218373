"""The fault, not the arm it sits in, is what is refused; and where nothing but captured gradients shows it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from safetensors.numpy import load_file

from harness.parity import Outcome, compare
from tests.parity.arms import Fault
from tests.parity.conftest import Bench
from tests.parity.corpus import BF16, FAULTS, OURS_BF16
from tests.parity.lab import CLEAN, write_capture


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


def test_a_wrong_element_among_equal_ones_is_in_doubt_even_in_bf16(bench: Bench, tmp_path: Path) -> None:
    """bf16's envelope alone would pass it; the other tensors of the pair, which agree, say otherwise."""
    arm = tmp_path / "lab" / "changed"
    shutil.copytree(bench.run(replace(OURS_BF16, updates=())), arm)
    grads = load_file(arm / "capture/step-000001.safetensors")
    grads["blocks.0.w_up.weight"].ravel()[5] *= -1
    write_capture(arm, 1, grads)
    verdict = compare(arm, bench.run(replace(BF16, replicate=1)), sources=CLEAN)
    assert verdict.outcome is Outcome.UNDECIDED
    assert "gradient among its fellows (gradient, first in blocks.0.w_up.weight)" in verdict.sentence
