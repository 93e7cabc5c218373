"""Updates that a dynamic loss scale leaves out: no numbers by right, which nobody counts and no verdict takes for a
fault; but they are left out for an overflow alone, and in both runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness.config.schema import CkptPolicy, Config, Dtype, EngineName
from harness.parity.alone import every_step, optimizer
from harness.parity.judgement import Judgement
from harness.parity.outcome import Grade, Outcome
from harness.parity.record import Record, load
from harness.parity.tiers import bitwise
from harness.parity.tiers.arithmetic import Arithmetic
from harness.store.metrics import read_metrics
from tests.support.factory import freeze, small_config, stopping, train
from tests.support.mutants import finds
from tests.support.spawn import made_by

STEPS = 13
CAPTURED = [1, 3, 7, 10, 13]
"""From 6 or so on every second update is left out: some of these are, and some are made after that."""
AT = 3
"""A step at which nothing overflows."""


def configured(**changes: Any) -> Config:
    """In fp16, under a factor that doubles in every step until gradients overflow."""
    return small_config(
        engine__name=EngineName.native,
        train__steps=STEPS,
        measure__step_checks=True,
        measure__capture_steps=CAPTURED,
        measure__update_steps=CAPTURED,
        dtype__compute=Dtype.fp16,
        dtype__loss_scale="dynamic",
        dtype__loss_scale_growth_steps=1,
        **changes,
    )


def overflows(engine: Any) -> Any:
    """Have the engine leave an update out whose gradients did not overflow."""
    engine.steps = 0
    scaler, step = engine.loss_scale.scaler, engine.step
    unscale = scaler.unscale_

    def found(optimizer: Any) -> None:
        unscale(optimizer)
        if engine.steps + 1 == AT:
            for each in scaler._found_inf_per_device(optimizer).values():
                each.fill_(1.0)

    def counted(lr: float) -> float:
        norm: float = step(lr)
        engine.steps += 1
        return norm

    scaler.unscale_ = found
    engine.step = counted
    return engine


def trains(rank: int, root: Path) -> None:
    for name, wrap in (("clean", lambda engine: engine), ("wrong", overflows)):
        train(configured(), root / name, rank, wrap_engine=wrap)
        freeze(configured(), root / name)
    resumed = configured(ckpt__policy=CkptPolicy.last)
    train(resumed, root / "resumed", rank, should_stop=stopping(STEPS - 1))
    train(resumed, root / "resumed", rank)
    freeze(resumed, root / "resumed")


trained = made_by(trains, 1)


@pytest.fixture(scope="module")
def runs(trained: Path) -> Mapping[str, Record]:
    return {name: load(trained / name) for name in ("clean", "wrong", "resumed")}


def own(run: Record) -> list[tuple[str, int | None, Grade]]:
    """What does not pass of what a run says of itself."""
    told = [*every_step.check(run, Arithmetic.of(run.config)), *optimizer.check(run)]
    return [(finding.check, finding.step, finding.grade) for finding in told if finding.grade is not Grade.ok]


def test_some_updates_are_left_out(runs: Mapping[str, Record]) -> None:
    assert 2 <= len(runs["clean"].skipped) <= STEPS // 2
    assert runs["clean"].skipped & {*range(1, STEPS - 1)}, "before the resume"
    assert AT not in runs["clean"].skipped
    assert min(runs["wrong"].skipped) == AT
    assert runs["clean"].skipped & {*CAPTURED}
    assert any(step > min(runs["clean"].skipped) for step in {*CAPTURED} - runs["clean"].skipped)
    for line, following in pairwise(read_metrics(runs["clean"].path / "metrics.jsonl")):
        assert following["loss_scale"] == line["loss_scale"] * (0.5 if line["skipped"] else 2)
        assert line["skipped"] == math.isnan(float(line["grad_norm"]))


# -- what is claimed ---------------------------------------------------------------------------------------------------


def wrong_own(runs: Mapping[str, Record]) -> Iterator[str]:
    """A run that left updates out is right at every step, resumed or not; one that had no reason to is not."""
    for name in ("clean", "resumed"):
        if told := own(runs[name]):
            yield f"{name}: {told}"
        until = every_step.checked_until(runs[name], Arithmetic.of(runs[name].config))
        if until != STEPS:
            yield f"{name} is checked until {until}"
    if own(runs["wrong"])[:1] != [("update left out", AT, Grade.bad)]:
        yield f"an update that was left out for nothing: {own(runs['wrong'])[:1]}"


def wrong_pairs(runs: Mapping[str, Record]) -> Iterator[str]:
    """Left out in both, an update is no difference; in one alone, nothing is known of what comes after."""
    clean = runs["clean"]
    first = min(clean.skipped)
    if found := bitwise.finite_values(clean, runs["resumed"], {}):
        yield f"left out in both: {found}"
    verdict = Judgement(clean, runs["resumed"], []).verdict()
    if verdict.outcome not in (Outcome.EQUAL, Outcome.EQUIVALENT):
        yield f"a resumed run: {verdict.sentence}"
    made = replace(clean, columns={**clean.columns, "skipped": [False] * STEPS})
    told = [(f.check, f.step, f.grade) for f in bitwise.finite_values(made, clean, {})]
    if ("update is made", first, Grade.doubt) not in told or any(grade is Grade.bad for *_, grade in told):
        yield f"left out in one: {told}"
    losses = [float("nan") if step == first else 1.0 for step in range(1, STEPS + 1)]
    odd = replace(clean, columns={**clean.columns, "loss": losses})
    if [(f.check, f.step) for f in bitwise.finite_values(odd, odd, {})] != [("loss is finite", first)]:
        yield "a loss that is no number passes where an update was left out"


test_a_mutant_is_found = finds(
    "The comparator: updates left out",
    wrong_own="""
        every step is counted: An update that was left out is counted
            parity.record.Record.updates_until: step - sum => step - 0 * sum
        a step without a sum is not right: A run is checked until it leaves an update out
            parity.alone.every_step.OF_GRADIENTS: ()
        left out for nothing: Any update may be left out
            parity.alone.every_step._left_out: known[step - 1] => False
    """,
    wrong_pairs="""
        one alone: One run alone may leave an update out
            parity.tiers.bitwise._left_out_once: arm.skipped ^ control.skipped => ()
        no loss: Losses may be no numbers then
            parity.tiers.bitwise.finite_values: if key == "grad_norm" else frozenset() =>
    """,
)
