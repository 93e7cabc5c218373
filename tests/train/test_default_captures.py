"""A run that is left to choose captures its first and last steps whole, and the weights it ends with; a verdict holds
them to the rule, to each other, and to what two runs can come apart by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.config.captured import Captured
from harness.config.schema import Config
from harness.parity.alone import ending as own
from harness.parity.alone import optimizer
from harness.parity.outcome import Finding, Grade
from harness.parity.record import Record, load
from harness.parity.tensors import Capture
from harness.parity.tiers import bitwise, ending
from harness.parity.tiers.envelope import Envelope
from harness.store.files import write_json
from tests.support.factory import freeze, small_config, train

STEPS = 5
SPREAD = [1, 3, STEPS]


def configured(**changes: object) -> Config:
    return small_config(train__steps=STEPS, measure__capture_steps=None, **changes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of one training, in two and in one microbatch."""
    paths = tmp_path_factory.mktemp("two"), tmp_path_factory.mktemp("one")
    for path, size in zip(paths, (4, 8), strict=True):
        config = configured(train__microbatch_size=size, measure__vouch=True)
        train(config, path)
        freeze(config, path)
    return paths


@pytest.fixture
def pair(runs: tuple[Path, Path]) -> tuple[Record, Record]:
    return load(runs[0]), load(runs[1])


class Changed(Capture):
    """A capture in which some tensors are others."""

    def __init__(self, of: Capture, **values: np.ndarray) -> None:
        self.path, self.tensors, self.of, self.changed = of.path, of.tensors, of, values

    def values(self, name: str) -> np.ndarray:
        return self.changed.get(name, self.of.values(name))

    def raw(self, name: str) -> np.ndarray:
        return self.values(name).ravel()


def with_last(run: Record, name: str, factor: float) -> Record:
    assert run.final is not None
    return replace(run, final=Changed(run.final, **{name: factor * run.final.values(name)}))


def ends(arm: Record, control: Record) -> list[Finding]:
    return ending.check(arm, control, Envelope.of(arm, control), None)


def test_first_last_and_some_between_are_captured_whole(pair: tuple[Record, Record]) -> None:
    for run in pair:
        assert run.config["measure.capture_steps"] == run.config["measure.update_steps"] == SPREAD
        assert sorted(run.captures) == sorted(run.updates) == sorted(run.weights) == SPREAD
        assert sorted(run.moments) == SPREAD[1:], "before step 1 there are none"
        assert [p for p in run.problems if "capture" in p or "final" in p] == []
        steps = {finding.step for finding in optimizer.check(run)}
        assert steps == set(SPREAD), "the rule is asked of whole tensors from any of them"
        assert all(finding.grade is Grade.ok for finding in [*optimizer.check(run), *own.check(run)])
        assert len(own.check(run)) == len(run.captures[1].tensors)


def test_last_weights_are_compared_tensor_by_tensor(pair: tuple[Record, Record]) -> None:
    found = ends(*pair)
    assert {each.check for each in found} == {ending.END}
    assert all(each.grade is Grade.ok for each in found)
    bits = bitwise.check(*pair, {}, {})[-1]
    assert (bits.check, bits.grade) == ("final weights", Grade.bad)
    assert bits.tensor in pair[0].captures[1].tensors
    assert "tensors differ" in bits.note


def test_weights_changed_after_the_last_step_are_found(pair: tuple[Record, Record]) -> None:
    name = "head.output.weight"
    changed = with_last(pair[0], name, 1.001)
    (wrong,) = [each for each in own.check(changed) if each.grade is not Grade.ok]
    assert (wrong.tensor, wrong.grade, wrong.step) == (name, Grade.bad, STEPS)
    for factor, said in ((1.001, Grade.ok), (2.0, Grade.bad)):
        graded = {each.tensor: each.grade for each in ends(with_last(pair[0], name, factor), pair[1])}
        assert graded.pop(name) is said, "what both could have walked is not refuted, and no more"
        assert set(graded.values()) == {Grade.ok}


def test_without_whole_weights_their_sketches_are_compared(pair: tuple[Record, Record]) -> None:
    from harness.parity.tiers.apart import apart

    arm, control = (replace(run, final=None) for run in pair)
    assert arm.stream is not None
    assert control.stream is not None
    found = ending.check(arm, control, Envelope.of(arm, control), apart(arm.stream, control.stream))
    assert {each.check for each in found} == {ending.SKETCHED}
    whole = {each.tensor: float(each.observed) for each in ends(*pair)}
    for each in found:
        assert each.tensor is not None
        assert each.grade is Grade.ok
        assert float(each.observed) < 4 * whole[each.tensor] + 1e-12
    assert ends(arm, control) == []


def test_adam_moves_no_weight_farther_than_its_reach() -> None:
    """The largest of many pasts, the worst one by Cauchy and Schwarz among them."""
    beta1, beta2 = 0.9, 0.95
    bound = ending.steepest(beta1, beta2)
    rng, worst = np.random.default_rng(0), 0.0
    worst_past = (beta1 / beta2) ** np.arange(200)[::-1]
    for past in [worst_past, np.ones(50), np.eye(1, 50)[0], *rng.standard_normal((50, 60))]:
        first = second = 0.0
        for step, gradient in enumerate(past, start=1):
            first = beta1 * first + (1 - beta1) * gradient
            second = beta2 * second + (1 - beta2) * gradient**2
            worst = max(worst, abs(first / (1 - beta1**step)) / np.sqrt(second / (1 - beta2**step)))
    assert 0.99 * bound < worst <= bound
    assert ending.steepest(0.99, 0.9) == np.inf


def test_a_plan_that_is_gone_is_damage(runs: tuple[Path, Path]) -> None:
    """Which steps a run meant to capture is known from what it wrote down; captures without it prove nothing."""
    path = runs[0] / "capture" / "captured.json"
    told = path.read_bytes()
    try:
        path.unlink()
        assert any("captured.json is missing" in problem for problem in load(runs[0]).problems)
        write_json(path, {"gradients": [1]})
        assert any("captured.json" in problem and "updates" in problem for problem in load(runs[0]).problems)
        write_json(path, Captured((1, 2), (1,), True)._asdict())
        assert any("step-000002" in problem for problem in load(runs[0]).problems)
    finally:
        path.write_bytes(told)
    last = runs[0] / "capture" / "final.safetensors"
    hidden = last.rename(last.with_suffix(".hidden"))
    try:
        assert any("final.safetensors is missing" in problem for problem in load(runs[0]).problems)
    finally:
        hidden.rename(last)
