"""What begins late passed as EQUIVALENT when step 1 alone was looked at; now a run with nothing but default settings is
DIFFERENT where the fault begins, whatever it is held against, and its baseline without the fault passes. So in hot
training, where clean pairs that differed in the size of their microbatches were called DIFFERENT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from benchmarks.power.classes import LAST as STEPS, LATE, ONE
from harness.parity import Outcome, Stage, Verdict, compare
from harness.parity.compare import judge
from harness.parity.outcome import Finding, Grade
from harness.parity.record import Record, load
from tests.faults.corpus import corpus
from tests.study import short
from tests.study.short import Overrides
from tests.support.mutants import kills

CELL = (
    *("study.name=late", f"train.steps={STEPS}", "train.warmup_steps=0", "train.global_batch_size=8", "ckpt=none"),
    *("train.microbatch_size=4", "data.seq_len=32", f"model.num_layers={short.LAYERS}"),
)

SEEN = {
    "the last update is skipped": ("skipped_step", STEPS, STEPS, Stage.optimizer, ""),
    "all weights x 1.1 after the last step": ("grown_at_the_end", 1, STEPS, Stage.weights, ""),
    "gradients rounded to bf16": ("round_gradient", LATE, LATE, Stage.reduction, ""),
    "momentum kept in bf16": ("round_momentum", LATE, LATE, Stage.optimizer, ""),
    "momentum swapped between two parts of a shard": ("swapped_momentum", LATE, LATE, Stage.weights, ""),
    "a gathered element + 0.1 on one rank": ("gathered_element_off", LATE, LATE, Stage.gather, "embedding.weight"),
    "Adam's count one too high": ("F04_extra_adam_step", LATE, LATE, Stage.optimizer, ""),
    "1 % noise on gradients": ("noisy_gradient", LATE, LATE, Stage.reduction, ""),
}
"""What was seen to pass: fault, where it begins, where it must be found, in which stage, in which tensor."""


def baseline(fault: str) -> Overrides:
    return (*CELL, *corpus()[fault].cell)


def arm(fault: str, begins: int) -> Overrides:
    return (*baseline(fault), *corpus()[fault].asked(begins_at=begins))


REFERENCE = (*CELL, "engine=ddp")
ORACLE = (*CELL, *ONE, "dtype=fp64")
CONTROLS = sorted({baseline(fault) for fault, *_ in SEEN.values()})
FORWARD = arm("wrong_targets", LATE)
OFTEN = (*baseline("noisy_gradient"), "measure.capture_steps=[1,3,10,12]", "measure.update_steps=[1,3,10,12]")
"""As runs of so many steps were captured when docs/records/power.md was made."""
OFTEN_FAULT = (*OFTEN, *corpus()["noisy_gradient"].asked(begins_at=LATE))

DEEP = tuple(text for text in CELL if not text.startswith(("train.microbatch_size", "model.num_layers")))
ALL = ("train.seed=1", "measure.step_checks_share=1")
"""Every step is looked at, however slow the machine: by default a second of looking is what 12 steps may take."""
HOT = {
    times: [(*DEEP, *ALL, *ONE, f"optimizer.lr={rate}", f"train.microbatch_size={size}") for size in (8, 4)]
    for times, rate in (("60 times its rate", 0.06), ("300 times its rate", 0.3))
}
"""AdamW on one rank, with more than its default rate: nothing but the size of the microbatches differs."""
HOT_TWIN = (*CELL, *corpus()["noisy_gradient"].cell, "optimizer.lr=0.06", "train.seed=1")
HOT_FAULT = (*HOT_TWIN, *corpus()["noisy_gradient"].asked(begins_at=LATE))
HOT_REFERENCE = (*CELL, "engine=ddp", "optimizer.lr=0.06", "train.seed=1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Overrides, Path]:
    faulty = [arm(fault, begins) for fault, begins, *_ in SEEN.values()]
    hot = [*chain(*HOT.values()), HOT_TWIN, HOT_FAULT, HOT_REFERENCE]
    wanted = [*faulty, *CONTROLS, REFERENCE, ORACLE, FORWARD, OFTEN, OFTEN_FAULT, *hot]
    return short.runs(wanted, tmp_path_factory.mktemp("late") / "runs")


def first(verdict: Verdict) -> Finding:
    return next(finding for finding in verdict.findings if finding.grade is not Grade.ok)


@pytest.mark.parametrize("against", ["its baseline", "the oracle in fp64"])
@pytest.mark.parametrize("name", SEEN)
def test_it_is_different_where_it_begins(runs: Mapping[Overrides, Path], name: str, against: str) -> None:
    fault, begins, step, stage, tensor = SEEN[name]
    verdict = compare(runs[arm(fault, begins)], runs[baseline(fault) if against == "its baseline" else ORACLE])
    assert verdict.outcome is Outcome.DIFFERENT, verdict.sentence
    found = first(verdict)
    assert (found.step, found.stage) == (step, stage), verdict.sentence
    assert found.tensor == tensor or not tensor, verdict.sentence


@pytest.mark.parametrize("against", [REFERENCE, ORACLE], ids=["ddp", "fp64"])
@pytest.mark.parametrize("overrides", CONTROLS, ids=lambda overrides: overrides[-1])
def test_its_baseline_passes(runs: Mapping[Overrides, Path], overrides: Overrides, against: Overrides) -> None:
    verdict = compare(runs[overrides], runs[against])
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.sentence


def test_a_late_forward_is_found_and_not_called_the_optimizers(runs: Mapping[Overrides, Path]) -> None:
    """The plain model refutes the first step from there on that it works out; where it began is where the pair jumped.
    What follows the gradient was seen to be right."""
    verdict = compare(runs[FORWARD], runs[baseline("wrong_targets")])
    assert verdict.outcome is Outcome.DIFFERENT, verdict.sentence
    stream = load(runs[FORWARD]).stream
    assert stream is not None
    again = np.flatnonzero(~np.isnan(stream.column("again"))) + 1
    graded = (Grade.bad, int(again[again >= LATE].min())), (Grade.doubt, LATE)
    for grade, step in graded:
        found = next(finding for finding in verdict.findings if finding.grade is grade)
        place = "between gather and gradient"  # the weights of its backward are gathered again, and nobody sees them
        assert (found.step, found.place) == (step, place), verdict.sentence


@kills("The comparator: where it arose", "only forwards gather", "A gather that no look sees is said to be right")
def test_a_gather_that_nobody_saw_is_not_cleared(
    runs: Mapping[Overrides, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Record, "gathers_twice", False)
    verdict = compare(runs[FORWARD], runs[baseline("wrong_targets")])
    assert next(f for f in verdict.findings if f.grade is Grade.bad).place == "between forward and gradient"


def silent(run: Path, control: Path) -> Verdict:
    """The verdict, had neither run said anything of itself."""
    return judge(*map(_unseen, (run, control)))


def _unseen(run: Path) -> Record:
    found = load(run)
    own = ("restored", "structure", "other_replicas")
    summary = {key: value for key, value in found.summary.items() if key not in own}
    return replace(found, witnesses={}, weights={}, moments={}, summary=summary, forward=None, stream=None)


@pytest.mark.parametrize("fault", ["wrong_targets", *(fault for fault, begins, *_ in SEEN.values() if begins == LATE)])
def test_without_witnesses_what_was_not_captured_has_an_interval(runs: Mapping[Overrides, Path], fault: str) -> None:
    """It was called the optimizer's, whatever it was. What moves no loss and no norm is not found without them."""
    verdict = silent(runs[arm(fault, LATE)], runs[baseline(fault)])
    if verdict.outcome not in (Outcome.EQUAL, Outcome.EQUIVALENT):
        assert corpus()[fault].stage in [stage.value for stage in first(verdict).stages], verdict.sentence
    else:
        assert fault in ("round_gradient", "round_momentum", "gathered_element_off", "noisy_gradient"), verdict.sentence


def test_without_witnesses_noise_is_found_where_a_step_soon_after_is_captured(runs: Mapping[Overrides, Path]) -> None:
    """Four steps later, where default settings capture next, drift hides it."""
    verdict = silent(runs[OFTEN_FAULT], runs[OFTEN])
    assert verdict.outcome in (Outcome.UNDECIDED, Outcome.DIFFERENT), verdict.sentence
    assert Stage.reduction in first(verdict).stages, verdict.sentence


@pytest.mark.parametrize("times", HOT)
def test_hot_training_is_no_fault(runs: Mapping[Overrides, Path], times: str) -> None:
    arm, control = (runs[each] for each in HOT[times])
    for pair in ((arm, control), (control, arm)):
        assert (verdict := compare(*pair)).outcome is Outcome.EQUIVALENT, verdict.sentence
        assert "looked at in both at every step, and right: what it was fed, weights between steps" in verdict.sentence
        assert (verdict := silent(*pair)).outcome is Outcome.UNDECIDED, verdict.sentence


def test_it_is_hot_and_it_trains(runs: Mapping[Overrides, Path]) -> None:
    """What two clean runs do at 60 times the rate: a step multiplies rounding a hundredfold, and the loss falls."""
    arm, control = (np.array(load(runs[each]).series("loss"), dtype=float) for each in HOT["60 times its rate"])
    off = abs(arm - control) / control
    assert (off[2:] / off[1:-1]).max() > 100, off
    assert off.max() > 1e-3, off
    assert control[-1] < control[0] - 2


def test_a_fault_in_hot_training_is_different_where_it_begins(runs: Mapping[Overrides, Path]) -> None:
    for control in (HOT_TWIN, HOT_REFERENCE):
        verdict = compare(runs[HOT_FAULT], runs[control])
        assert verdict.outcome is Outcome.DIFFERENT, verdict.sentence
        assert (first(verdict).step, first(verdict).stage) == (LATE, Stage.reduction), verdict.sentence
    assert compare(runs[HOT_TWIN], runs[HOT_REFERENCE]).outcome is Outcome.EQUIVALENT
