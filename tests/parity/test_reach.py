"""A control that knows how far rounding moves each of its gradients: bounds of a tensor's own, instead of counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from harness.parity import Outcome
from harness.parity.tiers.arithmetic import SAFETY, Arithmetic, margin
from harness.parity.tiers.envelope import Envelope
from harness.store.rundir import flatten
from tests.parity.arms import Arm
from tests.parity.conftest import Bench
from tests.parity.lab import write_capture

ARM = Arm(engine="native", strategy="optim", updates=())
EXACT = Arm(engine="single", strategy="no_shard", compute="fp64", main="fp64", ranks=1, k=4, updates=())
TENSOR = "blocks.0.w_up.weight"
RUN = Arithmetic.of(flatten(ARM.config()))


def knowing(bench: Bench, tmp_path: Path, **moves: float) -> Path:
    """The exact control, with a reach of 1e-7 for every tensor, and another where one is given."""
    run = bench.copy(EXACT, tmp_path / "control")
    names = load_file(run / "capture/step-000001.safetensors")
    reach = {name: {"distance": moves.get(name.replace(".", "_"), 1e-7), "scale": 1e-8} for name in names}
    reach[""] = {"distance": 1e-7, "scale": 1e-8, "loss": 1e-8}
    (run / "capture/rounding-000001.json").write_text(json.dumps({"draws": 8, "moves": {"fp32": reach}}))
    return run


def moved(bench: Bench, tmp_path: Path, off: float) -> Path:
    """The arm, with noise of a relative size on one tensor."""
    run = bench.copy(ARM, tmp_path / "moved")
    grads = load_file(run / "capture/step-000001.safetensors")
    noise = np.random.default_rng(5).standard_normal(grads[TENSOR].shape)
    grads[TENSOR] += (off * noise * np.linalg.norm(grads[TENSOR]) / np.linalg.norm(noise)).astype(np.float32)
    write_capture(run, 1, grads)
    return run


def test_what_counting_passes_a_known_reach_refutes(bench: Bench, tmp_path: Path) -> None:
    arm = moved(bench, tmp_path, 3e-6)
    assert bench.held(arm, EXACT).outcome in (Outcome.EQUIVALENT, Outcome.UNDECIDED)
    verdict = bench.held(arm, knowing(bench, tmp_path))
    assert verdict.outcome is Outcome.DIFFERENT
    assert TENSOR in verdict.sentence
    assert bench.held(arm, knowing(bench, tmp_path / "far", blocks_0_w_up_weight=1e-6)).findings == ()
    assert bench.held(ARM, tmp_path / "control" / "lab" / "run").outcome is Outcome.EQUIVALENT


def test_few_elements_are_given_more_room_by_what_few_draws_can_tell() -> None:
    envelope = Envelope(RUN, RUN, draws=8)
    rooms = [margin(numel, envelope.draws) for numel in (1, 2, 4, 16, 32, 1000)]
    assert rooms == sorted(rooms, reverse=True)
    assert rooms[-2:] == [SAFETY, SAFETY]
    assert 10 < rooms[0] < 30
    fewer = replace(envelope, draws=2)
    assert margin(1, fewer.draws) > 2 * rooms[0]


@pytest.mark.parametrize("numel", [1, 3, 32])
def test_the_room_holds_for_errors_drawn_alike(numel: int) -> None:
    """A hundred thousand times: an error as large as the draws were, beyond a bound once in ten thousand at most."""
    envelope = Envelope(RUN, RUN, draws=8)
    rng = np.random.default_rng(numel)
    squares = rng.chisquare(numel, 100_000), rng.chisquare(8 * numel, 100_000) / 8
    assert np.mean(np.sqrt(squares[0]) > margin(numel, envelope.draws) * np.sqrt(squares[1])) <= 1e-4
