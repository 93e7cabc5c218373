"""A run that is left to choose captures its first and last steps whole, and the weights it ends with; a verdict holds
them to the rule, to each other, and to what two runs can come apart by."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from harness.config.schema import Config
from harness.models.workload import TokenWorkload
from harness.parity.alone import optimizer, structure as own
from harness.parity.outcome import Finding, Grade
from harness.parity.record import Record, load
from harness.parity.tensors import Capture
from harness.parity.tiers import bitwise, divergence
from harness.parity.tiers.apart import Apart, apart
from harness.parity.tiers.envelope import Envelope
from tests.support.factory import freeze, small_config, train
from tests.support.mutants import Slip, each, slips
from tests.train.runs import described

STEPS = 5
SPREAD = [1, STEPS]
NAME = "head.output.weight"


def configured(**changes: object) -> Config:
    return small_config(train__steps=STEPS, measure__capture_steps=None, **changes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of one training, in two and in one microbatch."""
    paths = tmp_path_factory.mktemp("two"), tmp_path_factory.mktemp("one")
    for path, size in zip(paths, (4, 8), strict=True):
        config = configured(train__microbatch_size=size, measure__step_checks=True)
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
    return divergence.last_weights(arm, control, Envelope.of(arm, control), None)


def distances(pair: tuple[Record, Record]) -> Apart:
    left, right = (run.stream for run in pair)
    assert left is not None
    assert right is not None
    found = apart(left, right)
    assert found is not None
    return found


def test_first_last_and_some_between_are_captured_whole(pair: tuple[Record, Record]) -> None:
    for run in pair:
        assert run.config["measure.capture_steps"] == run.config["measure.update_steps"] == SPREAD
        assert sorted(run.captures) == sorted(run.updates) == sorted(run.weights) == SPREAD
        assert sorted(run.moments) == SPREAD[1:], "before step 1 there are none"
        assert [p for p in run.problems if "capture" in p or "final" in p] == []
        steps = {finding.step for finding in optimizer.check(run)}
        assert steps == set(SPREAD), "the rule is asked of whole tensors from any of them"
        assert all(finding.grade is Grade.ok for finding in [*optimizer.check(run), *own.check_ending(run)])
        assert len(own.check_ending(run)) == len(run.captures[1].tensors)


def test_last_weights_are_compared_tensor_by_tensor(pair: tuple[Record, Record]) -> None:
    found = ends(*pair)
    assert {finding.check for finding in found} == {divergence.END}
    assert all(finding.grade is Grade.ok for finding in found)
    bits = bitwise.check(*pair, {}, {})[-1]
    assert (bits.check, bits.grade) == ("final weights", Grade.bad)
    assert bits.tensor in pair[0].captures[1].tensors
    assert "tensors differ" in bits.note


def test_weights_changed_after_the_last_step_are_found(pair: tuple[Record, Record]) -> None:
    changed = with_last(pair[0], NAME, 1.001)
    (wrong,) = [finding for finding in own.check_ending(changed) if finding.grade is not Grade.ok]
    assert (wrong.tensor, wrong.grade, wrong.step) == (NAME, Grade.bad, STEPS)
    for factor, said in ((1.001, Grade.ok), (2.0, Grade.bad)):
        graded = {finding.tensor: finding.grade for finding in ends(with_last(pair[0], NAME, factor), pair[1])}
        assert graded.pop(NAME) is said, "what both could have walked is not refuted, and no more"
        assert set(graded.values()) == {Grade.ok}


def test_without_whole_weights_their_sketches_are_compared(pair: tuple[Record, Record]) -> None:
    arm, control = (replace(run, final=None) for run in pair)
    found = divergence.last_weights(arm, control, Envelope.of(arm, control), distances(pair))
    assert {finding.check for finding in found} == {divergence.SKETCHED}
    whole = {finding.tensor: float(finding.observed) for finding in ends(*pair)}
    for finding in found:
        assert finding.tensor is not None
        assert finding.grade is Grade.ok
        assert float(finding.observed) < 4 * whole[finding.tensor] + 1e-12
    assert ends(arm, control) == []


def test_adam_moves_no_weight_farther_than_its_reach() -> None:
    """The largest of many pasts, the worst one by Cauchy and Schwarz among them."""
    beta1, beta2 = 0.9, 0.95
    bound = divergence.steepest(beta1, beta2)
    rng, worst = np.random.default_rng(0), 0.0
    worst_past = (beta1 / beta2) ** np.arange(200)[::-1]
    for past in [worst_past, np.ones(50), np.eye(1, 50)[0], *rng.standard_normal((50, 60))]:
        first = second = 0.0
        for step, gradient in enumerate(past, start=1):
            first = beta1 * first + (1 - beta1) * gradient
            second = beta2 * second + (1 - beta2) * gradient**2
            worst = max(worst, abs(first / (1 - beta1**step)) / np.sqrt(second / (1 - beta2**step)))
    assert 0.99 * bound < worst <= bound
    assert divergence.steepest(0.99, 0.9) == np.inf


def test_weights_decay_where_the_workload_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of one's own may leave a matrix alone; by the matrices it has, its update would be wrong."""
    own_rule = lambda self, name, shape: len(shape) > 1 and "embedding" not in name  # noqa: E731
    monkeypatch.setattr(TokenWorkload, "decays", own_rule)
    config = configured(optimizer__weight_decay=0.1)
    train(config, tmp_path)
    freeze(config, tmp_path)
    run = load(tmp_path)
    assert {finding.grade for finding in optimizer.check(run)} == {Grade.ok}
    silent = replace(run, summary={key: value for key, value in run.summary.items() if key != "decayed"})
    wrong = {finding.tensor for finding in optimizer.check(silent) if finding.grade is not Grade.ok}
    assert wrong == {"embedding.weight"}


def rewritten(source: Path, target: Path, change: Callable[[dict[str, np.ndarray], dict[str, Any]], object]) -> Path:
    """Copy of a run in which `change` edited tensors and description of every captured step."""
    shutil.copytree(source, target)
    for path in sorted((target / "capture").glob("step-*.safetensors")):
        tensors, facts = dict(load_file(path)), described(path)
        change(tensors, facts)
        save_file(tensors, path, {"harness": json.dumps(facts)})
    return target


GONE: dict[str, tuple[Callable[[dict[str, np.ndarray], dict[str, Any]], object], str]] = {
    "plan": (lambda _, facts: facts.pop("plan"), "which steps were to be captured is not known"),
    "a part of the plan": (lambda _, facts: facts["plan"].pop("updates"), "updates"),
    "a step": (lambda _, facts: facts["plan"]["gradients"].append(2), r"step-000002.safetensors is missing"),
    "last weights": (
        lambda tensors, _: [tensors.pop(name) for name in [*tensors] if name.startswith("after/")],
        "final.safetensors is missing",
    ),
    "the description": (lambda _, facts: facts.clear(), "its description is damaged"),
    "terms": (lambda _, facts: facts.pop("terms"), "damaged description: KeyError"),
    "terms of one": (lambda _, facts: facts["terms"].popitem(), "damaged description: KeyError"),
    "kinds of terms": (lambda _, facts: facts.update(kept=3), "its description is damaged: .*kept"),
}


@pytest.mark.parametrize("what", GONE)
def test_a_part_of_a_captured_step_that_is_gone_is_damage(runs: tuple[Path, Path], tmp_path: Path, what: str) -> None:
    change, said = GONE[what]
    problems = load(rewritten(runs[0], tmp_path / "run", change)).problems
    assert any(re.search(said, problem) for problem in problems), problems


def test_weights_that_changed_after_the_last_step_have_a_file(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """It holds what is not as the last step left it, and the verdict takes that for the end."""
    assert not (runs[0] / "capture/final.safetensors").exists()
    shutil.copytree(runs[0], tmp_path / "run")
    last = load(tmp_path / "run").final
    assert last is not None
    save_file({NAME: 2 * last.values(NAME)}, tmp_path / "run/capture/final.safetensors")
    changed = load(tmp_path / "run")
    assert changed.final is not None
    assert changed.final.tensors.keys() == last.tensors.keys()
    assert {f.tensor for f in own.check_ending(changed) if f.grade is not Grade.ok} == {NAME}


# -- mutants -----------------------------------------------------------------------------------------------------------


def walked(pair: tuple[Record, Record], share: float) -> tuple[Record, Record]:
    """The pair, had the arm's last weights come from the control's by a share of what both can walk, every element
    alike."""
    arm, control = pair
    assert control.final is not None
    farthest = (
        2 * divergence.steepest(*control.config["optimizer.betas"]) * sum(rate or 0.0 for rate in control.series("lr"))
    )
    values = {name: control.final.values(name) + share * farthest for name in control.final.tensors}
    return replace(arm, final=Changed(control.final, **values)), control


def broken_expectations(pair: tuple[Record, Record]) -> Iterator[str]:
    """What is not as it is tested above, lazily."""
    arm, control = pair
    for run in pair:
        if not own.check_ending(run) or any(finding.grade is not Grade.ok for finding in own.check_ending(run)):
            yield "clean weights do not follow from the last update"
        earlier = {step: update for step, update in run.updates.items() if step < STEPS}
        if own.check_ending(replace(run, updates=earlier)):
            yield "weights follow from an update that is not the last"
    for factor in (1 + 1e-7, 1.001):
        wrong = [
            (f.tensor, f.grade, f.step)
            for f in own.check_ending(with_last(arm, NAME, factor))
            if f.grade is not Grade.ok
        ]
        if wrong != [(NAME, Grade.bad, STEPS)]:
            yield f"weights times {factor}: {wrong}"
    for share, grade in ((0.99, Grade.ok), (1.5, Grade.doubt), (2.1, Grade.bad)):
        if {finding.grade for finding in ends(*walked(pair, share))} != {grade}:
            yield f"{share} of what both can walk is not {grade}"
    arm, control = (replace(run, final=None) for run in pair)
    found = distances(pair)
    held = divergence.last_weights(*walked(pair, 0.0), Envelope.of(*pair), None)
    allowed = {f.tensor: float(f.allowed) for f in held}
    for factor, grade in ((2.0, Grade.ok), (10.0, Grade.bad)):
        weights = found.weights.copy()
        weights[-1] = [factor * allowed[name] for name in found.names]
        told = divergence.last_weights(arm, control, Envelope.of(*pair), replace(found, weights=weights))
        if {(finding.grade, finding.step) for finding in told} != {(grade, STEPS)}:
            yield f"sketches {factor} times as far apart as weights may be are not {grade}"


MUTANTS = slips(
    """
    without the last update: Weights of the end are held to those before the last step
        parity.alone.structure.check_ending: range(begin, run.length + 1) => range(begin, run.length)
    any captured update: The last captured update is taken for the last
        parity.alone.structure._begin: step = run.length => step = max(run.updates)
    rounding of the weights: Weights of the end are allowed a rounding of their own
        parity.alone.structure.check_ending: unit * moved / norm => unit
    one run walks: The control is taken to stand still
        parity.tiers.divergence.reach: for run in runs => for run in runs[:1]
    Adam walks lr a step: C is left out
        parity.tiers.divergence.reach: max(steepest(*rule.betas), of_matrix) * =>
    one tensor walks for all: A tensor is allowed what all may walk
        parity.tiers.divergence._graded_weights: runs[1].config["optimizer.name"] != "sgd" => False
    elements for tensors: The share of a tensor is its number of weights, and not its root
        parity.tiers.divergence._graded_weights: math.sqrt(numel / envelope.control.parameters)
            => numel / envelope.control.parameters
    Adam's path in one element: One weight walks
        parity.tiers.trajectory.path_lengths: np.cumsum(rates) * math.sqrt(parameters) => np.cumsum(rates)
    no doubt: What no run can walk is never refuted
        parity.tiers.divergence._graded_weights: since=Stage.weights) => since=Stage.weights, refuted=1e9 * allowed)
    sketches of the first step: Sketches are those of the beginning
        parity.tiers.divergence.last_weights: found.weights[-1].tolist() => found.weights[0].tolist()
    """
) | {
    "sketches are exact": Slip(divergence, "DRAW", "", lambda _: 1.0, "The error of four sketches is left out"),
}


def test_the_judges_as_they_are_break_nothing(pair: tuple[Record, Record]) -> None:
    assert list(broken_expectations(pair)) == []


@pytest.mark.parametrize("name", each("The comparator: weights of the end", MUTANTS))
def test_a_mutant_is_noticed(pair: tuple[Record, Record], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    MUTANTS[name].put(monkeypatch)
    try:
        noticed = any(broken_expectations(pair))
    except KeyError:  # an update that is not there
        return
    assert noticed, f"{name} survives"
