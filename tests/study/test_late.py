"""What begins late passed as EQUIVALENT when step 1 alone was looked at; now a run with nothing but default settings is
DIFFERENT where the fault begins, and its twin without the fault passes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from harness.config.faults import corpus
from harness.parity import Outcome, Stage, Verdict, compare
from harness.parity.outcome import Finding, Grade
from harness.study.whole import LATE, STEPS
from tests.study import short
from tests.study.short import Overrides

CELL = (
    "study.name=late",
    f"train.steps={STEPS}",
    "train.warmup_steps=0",
    "train.global_batch_size=8",
    "train.microbatch_size=4",
    "data.seq_len=32",
    f"model.num_layers={short.LAYERS}",
    "ckpt=none",
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


def twin(fault: str) -> Overrides:
    return (*CELL, *corpus()[fault].cell)


def arm(fault: str, begins: int) -> Overrides:
    return (*twin(fault), f"fault={fault}", *([f"fault.begins_at={begins}"] if begins > 1 else []))


REFERENCE = (*CELL, "engine=ddp")
TWINS = sorted({twin(fault) for fault, *_ in SEEN.values()})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Overrides, Path]:
    wanted = [*(arm(fault, begins) for fault, begins, *_ in SEEN.values()), *TWINS, REFERENCE]
    return short.runs(wanted, tmp_path_factory.mktemp("late") / "runs")


def first(verdict: Verdict) -> Finding:
    return next(finding for finding in verdict.findings if finding.grade is not Grade.ok)


@pytest.mark.parametrize("name", SEEN)
def test_it_is_different_where_it_begins(runs: Mapping[Overrides, Path], name: str) -> None:
    fault, begins, step, stage, tensor = SEEN[name]
    verdict = compare(runs[arm(fault, begins)], runs[twin(fault)])
    assert verdict.outcome is Outcome.DIFFERENT, verdict.sentence
    found = first(verdict)
    assert (found.step, found.stage) == (step, stage), verdict.sentence
    assert found.tensor == tensor or not tensor, verdict.sentence


@pytest.mark.parametrize("overrides", TWINS, ids=lambda overrides: overrides[-1])
def test_its_twin_passes(runs: Mapping[Overrides, Path], overrides: Overrides) -> None:
    verdict = compare(runs[overrides], runs[REFERENCE])
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.sentence


def test_up_to_its_first_step_a_late_fault_does_nothing(runs: Mapping[Overrides, Path]) -> None:
    for fault, begins, *_ in SEEN.values():
        faulty, clean = (
            [line.split('"grad_norm"')[0] for line in (runs[each] / "metrics.jsonl").read_text().splitlines()]
            for each in (arm(fault, begins), twin(fault))
        )
        until = begins - 1 if begins > 1 else STEPS
        assert faulty[:until] == clean[:until], fault
