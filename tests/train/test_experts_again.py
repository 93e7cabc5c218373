"""Forwards of experts are worked out again too: what is off where no route can flip is refuted, as of other models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.config.schema import ModelFamily
from harness.parity.alone import every_step
from harness.parity.outcome import Grade
from harness.parity.tiers.arithmetic import Arithmetic
from tests.support.mutants import finds
from tests.train import test_drift
from tests.train.test_again import STEPS, found, trained


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize(("fault", "wanted"), [("", []), ("tokens", [(STEPS, Grade.bad)])])
def test_a_late_forward_is_refuted_of_experts_too(
    tmp_path: Path, kind: str, fault: str, wanted: list[tuple[int, Grade]]
) -> None:
    """Which were let off: a route that flips may change an expert by anything, and on a CPU none does."""
    assert found(trained(tmp_path, kind, fault, model__family=ModelFamily.moe)) == wanted


@pytest.mark.parametrize(("fault", "wanted"), [("", []), ("a softcap", [(STEPS, Grade.bad)])])
def test_another_function_is_refuted_of_experts_too(
    tmp_path: Path, fault: str, wanted: list[tuple[int, Grade]]
) -> None:
    run = test_drift.trained(tmp_path, "fp32", fault, model__family=ModelFamily.moe)
    assert test_drift.found(run) == wanted


# -- mutants -----------------------------------------------------------------------------------------------------------


def wrong_routes(root: Path) -> Iterator[str]:
    """What is refuted of experts: where routes can flip, and where they cannot."""
    run = trained(root / "bounds", "bf16", model__tie_embeddings=False)
    assert run.stream is not None
    of = Arithmetic.of(run.config)
    routed = replace(of, num_experts=8)
    own, elsewhere = (
        replace(run, config={**run.config, key: other})
        for key, other in (("engine.name", "ext"), ("cluster.device", "cuda"))
    )
    for name, which in (("again", own), ("again", elsewhere), ("drift", elsewhere)):
        if every_step.bounds(name, which, run.stream, routed)[1] != float("inf"):
            yield "a route that rounding turned is refuted"
    for name in ("again", "drift"):
        if not 0.2 < every_step.bounds(name, run, run.stream, routed)[1] < 0.787:
            yield f"in bf16, {name}: {every_step.bounds(name, run, run.stream, routed)}"
    for compute in ("fp32", "fp64"):
        dense, chosen = (replace(each, compute=compute) for each in (of, routed))
        if every_step.bounds("again", run, run.stream, chosen) != every_step.bounds("again", run, run.stream, dense):
            yield f"routes that cannot flip in {compute}"
    many = replace(routed, compute="fp32", tokens=1 << 16)
    if not every_step.bounds("again", run, run.stream, many)[1] > 0.01:
        yield "of many routes in fp32, none can flip"


test_a_mutant_is_found = finds(
    "The comparator: experts worked out again",
    wrong_routes="""
        routes are refuted: A token that took another route is a fault
            parity.alone.every_step.bounds: if owes_bits else => if True else
        no route is refuted: Experts may be anything on CPUs too
            parity.alone.every_step.bounds: if owes_bits else => if False else
        routes that never flip: No route flips on a CPU, in bf16 either
            parity.alone.every_step._rerouted: flips > RARE => False
        routes that always flip: A route of a few flips in fp32
            parity.alone.every_step._rerouted: flips > RARE => True
    """,
)
