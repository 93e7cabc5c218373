"""A control that knows how far rounding moves each of its gradients: bounds of a tensor's own, instead of counted."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from harness.config.schema import ModelFamily
from harness.parity import Outcome, Verdict, compare
from harness.parity.outcome import Grade
from harness.parity.tiers import numeric
from harness.parity.tiers.arithmetic import SAFETY, Arithmetic, margin
from harness.parity.tiers.envelope import Envelope
from harness.parity.tiers.gradients import Block, TensorPair
from harness.store.rundir import flatten
from tests.parity.arms import Arm
from tests.parity.conftest import Bench
from tests.parity.lab import CLEAN, write_capture
from tests.support.mutants import Slip, kills

ARM = Arm(engine="native", strategy="optim", updates=())
EXACT = Arm(engine="single", strategy="no_shard", compute="fp64", main="fp64", ranks=1, k=4, updates=())
TENSOR = "blocks.0.w_up.weight"
RUN = Arithmetic.of(flatten(ARM.config()))


def knowing(bench: Bench, tmp_path: Path, **moves: float) -> Path:
    """The exact control, with a reach of 1e-7 for every tensor, and another where one is given."""
    run = tmp_path / "lab" / "control"
    shutil.copytree(bench.run(EXACT), run)
    names = load_file(run / "capture/step-000001.safetensors")
    reach = {name: {"distance": moves.get(name.replace(".", "_"), 1e-7), "scale": 1e-8} for name in names}
    reach[""] = {"distance": 1e-7, "scale": 1e-8, "loss": 1e-8}
    (run / "capture/rounding-000001.json").write_text(json.dumps({"draws": 8, "moves": {"fp32": reach}}))
    return run


def moved(bench: Bench, tmp_path: Path, off: float) -> Path:
    """The arm, with noise of a relative size on one tensor."""
    run = tmp_path / "lab" / "moved"
    shutil.copytree(bench.run(ARM), run)
    grads = load_file(run / "capture/step-000001.safetensors")
    noise = np.random.default_rng(5).standard_normal(grads[TENSOR].shape)
    grads[TENSOR] += (off * noise * np.linalg.norm(grads[TENSOR]) / np.linalg.norm(noise)).astype(np.float32)
    write_capture(run, 1, grads)
    return run


def judged(arm: Path, control: Path) -> Verdict:
    return compare(arm, control, sources=CLEAN)


def test_what_counting_passes_a_known_reach_refutes(bench: Bench, tmp_path: Path) -> None:
    arm = moved(bench, tmp_path, 3e-6)
    assert judged(arm, bench.run(EXACT)).outcome in (Outcome.EQUIVALENT, Outcome.UNDECIDED)
    verdict = judged(arm, knowing(bench, tmp_path))
    assert verdict.outcome is Outcome.DIFFERENT
    assert TENSOR in verdict.sentence


def test_a_clean_arm_passes_it(bench: Bench, tmp_path: Path) -> None:
    assert judged(bench.run(ARM), knowing(bench, tmp_path)).outcome is Outcome.EQUIVALENT


def test_a_tensor_that_moves_far_is_allowed_to(bench: Bench, tmp_path: Path) -> None:
    arm = moved(bench, tmp_path, 3e-6)
    verdict = judged(arm, knowing(bench, tmp_path, blocks_0_w_up_weight=1e-6))
    assert {finding.check for finding in verdict.findings} <= {"gradient among its fellows"}


def test_a_damaged_reach_is_named(bench: Bench, tmp_path: Path) -> None:
    control = knowing(bench, tmp_path)
    (control / "capture/rounding-000001.json").write_text("{}")
    verdict = judged(bench.run(ARM), control)
    assert verdict.outcome is Outcome.NOT_COMPARABLE
    assert "rounding-000001.json is damaged" in verdict.sentence


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


OWN = replace(RUN, family=ModelFamily.ext, compute="bf16", wire="bf16")
MOVES = {"bf16": {name: {"distance": far, "scale": 0.0} for name, far in (("a", 3e-3), ("b", 4e-3), ("norm", 8e-2))}}


def fellows(family: ModelFamily, **distances: float) -> dict[str, Grade]:
    """What is said of pieces so far off, of a model whose gain rounding moves twenty times farther than the rest."""
    run = replace(OWN, family=family)
    pairs = [
        TensorPair(name, False, True, True, 64, 1.0, 1.0, off, 0.0, 0.0, off, Block(0, 2, off))
        for name, off in distances.items()
    ]
    found = numeric._outliers(pairs, Envelope(run, run, reach=MOVES, draws=8))
    return {str(each.tensor): each.grade for each in found}


def test_tensors_of_ones_own_model_are_held_against_what_rounding_does_to_each() -> None:
    """docs/own.md's first comparison stood within a thousandth of UNDECIDED: the gain of a norm moves 20 times farther
    than the median tensor, and its reference had seen that it does."""
    told = fellows(ModelFamily.ext, a=1e-2, b=1.2e-2, norm=0.3)
    assert set(told.values()) == {Grade.ok}
    told = fellows(ModelFamily.ext, a=1e-2, b=0.7, norm=0.3)
    assert told == {"a": Grade.ok, "b": Grade.doubt, "norm": Grade.ok}, "a doubt where counting had one"
    told = fellows(ModelFamily.ext, a=1e-7, b=1e-7, norm=0.5)
    assert told["norm"] is Grade.doubt, "a wrong piece of one that moves far, where the kernels are the same"
    assert fellows(ModelFamily.llama, a=1e-2, b=1.2e-2, norm=0.3)["norm"] is Grade.doubt, "counted ones are kin"


@kills("The comparator", "no kin", "Tensors of one's own model are held against the median tensor's distance")
def test_tensors_that_are_taken_for_kin_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Envelope, "share", lambda *_: 1.0)
    with pytest.raises(AssertionError):
        test_tensors_of_ones_own_model_are_held_against_what_rounding_does_to_each()


@kills("The comparator", "no fellows", "Tensors of one's own model are held against their own bound alone")
def test_tensors_without_fellows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    Slip(numeric, "_outliers", "OUTLIER * usual", "envelope.share(pair)").put(monkeypatch)
    with pytest.raises(AssertionError):
        test_tensors_of_ones_own_model_are_held_against_what_rounding_does_to_each()
