"""Runs with every step checked: what begins late is found at its step, stage and tensor; chaos alone is no fault."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.parity import Grade, Outcome, Verdict
from harness.parity.alone import every_step
from harness.parity.outcome import Finding, Stage
from harness.parity.record import load
from harness.parity.tiers import divergence
from harness.store.check_stream import FOLDER, step_columns
from tests.parity.arms import Arm, Params, broken
from tests.parity.conftest import Bench
from tests.parity.corpus import BF16, FP32, OURS, OURS_BF16, OURS_SGD, SGD, bf16, scaled, stored_as
from tests.parity.network import Optimizer
from tests.parity.streams import SKETCHES
from tests.support.mutants import finds

AT = 8
"""Step at which faults begin here; nothing but step 1 is captured."""
CONTROL = replace(FP32, checked=True)
SEEN = replace(OURS, checked=True, strategy="optim_grads", updates=())
HOT = {"lr": 0.1}
SAID = (
    "; looked at in both at every step, and right: what it was fed, weights between steps, weights of forwards, sums "
    "of gradients, the norm, samples of the update; forwards and backwards, worked out again: at no step"
)
NAME = "blocks.1.w_up.weight"


def late(what: Callable[[Params], Params]) -> Callable[[int, Params], Params]:
    """From step 8 on."""
    return lambda step, values: what(values) if step >= AT else values


def noisy(share: float) -> Callable[[Params], Params]:
    """Noise of a share of each element."""
    rng = np.random.default_rng(3)
    return lambda values: {n: v * (1 + share * rng.standard_normal(v.shape).astype(v.dtype)) for n, v in values.items()}


def scaled_down(factor: float) -> Callable[[Params], Params]:
    """One tensor times a factor."""
    return lambda values: {n: v * v.dtype.type(factor if n == NAME else 1.0) for n, v in values.items()}


def one_element(values: Params) -> Params:
    """A gathered element + 0.1."""
    changed = {name: value.copy() for name, value in values.items()}
    changed[NAME].ravel()[5] += 0.1
    return changed


def in_bf16(step: int, optimizer: Optimizer) -> None:
    """Adam's momentum is kept in bf16."""
    if step >= AT:
        optimizer.m = {name: bf16(value) for name, value in optimizer.m.items()}


def swapped(step: int, weights: Params, optimizer: Optimizer) -> None:
    """Momentum changes places between two halves of a shard."""
    if step == AT:
        flat = optimizer.m[NAME].ravel()
        flat[:] = np.concatenate((flat[flat.size // 2 :], flat[: flat.size // 2]))


def larger(step: int, weights: Params, optimizer: Optimizer) -> None:
    """All weights x 1.1 after the last step."""
    if step == OURS.steps + 1:
        for value in weights.values():
            value *= value.dtype.type(1.1)


def chaotic(step: int, values: Params) -> Params:
    """What hot training does: gradients part a hundredfold a step, and weights with them. (The laboratory's own network
    is too tame to do so by itself.)"""
    share = min(0.3, 1e-7 * 100 ** (step - 1)) if step > 1 else 0.0
    rng = np.random.default_rng(step)
    return {n: v * (1 + share * rng.standard_normal(v.shape)).astype(v.dtype) for n, v in values.items()}


FAULTS: dict[str, tuple[dict[str, Any], int, Stage, str]] = {
    "last update skipped": ({"skipped": 12}, 12, Stage.optimizer, ""),
    "weights x 1.1 after the last step": ({"between": larger}, 12, Stage.weights, ""),
    "gradients rounded to bf16": ({"reduced": stored_as(bf16), "reduced_from": AT}, AT, Stage.reduction, ""),
    "momentum in bf16": ({"moments": in_bf16}, AT, Stage.optimizer, ""),
    "momentum swapped": ({"between": swapped}, AT, Stage.weights, NAME),
    "a gathered element + 0.1": ({"used": late(one_element)}, AT, Stage.gather, NAME),
    "Adam's count one too high": ({"adam_steps_ahead": 1, "ahead_from": AT}, AT, Stage.optimizer, ""),
    "1 % noise": ({"reduced": lambda mean, *_: noisy(0.01)(mean), "reduced_from": AT}, AT, Stage.reduction, ""),
    "gradients x 1.00001": ({"reduced": scaled(1.00001), "reduced_from": AT}, AT, Stage.reduction, ""),
}
"""What passed as EQUIVALENT before (docs/verdicts.md): hooks, step, stage, tensor."""


def first(verdict: Verdict) -> Finding:
    return next(finding for finding in verdict.findings if finding.grade is not Grade.ok)


@pytest.mark.parametrize("name", FAULTS)
def test_what_begins_late_is_different_where_it_begins(bench: Bench, name: str) -> None:
    hooks, step, stage, tensor = FAULTS[name]
    verdict = bench.held(broken(SEEN, **hooks), CONTROL)
    assert verdict.outcome is Outcome.DIFFERENT, verdict.sentence
    found = first(verdict)
    assert (found.step, found.stage, found.since) == (step, stage, None), verdict.sentence
    assert not tensor or found.tensor == tensor


BACKWARDS: dict[str, Callable[[int, Params], Params]] = {
    "1 % noise": late(noisy(0.01)),
    "a tenth missing in one tensor": late(scaled_down(0.9)),
}
"""Kept here: the bench knows a run by the addresses of its hooks."""


def wrong_onsets(bench: Bench, folder: Path) -> Iterator[str]:
    """Wrong first steps in sentences and commands, of a forward that is worked out again in the last step alone."""

    def wrong_last(rows: Any) -> None:
        rows[11, step_columns(SKETCHES).index("again")] = 0.5

    def told(name: str, arm: Arm) -> Verdict:
        return bench.held(damaged(bench.run(arm), folder / name / "lab" / "arm", wrong_last), control)

    control = bench.run(CONTROL)
    last = "at step 12, gradient worked out again (between forward and gradient"
    lost = BACKWARDS["a tenth missing in one tensor"]
    late_fault = told("late", broken(SEEN, local=lost))
    begins, _, rest = late_fault.sentence.partition("; certain ")
    jump = f"at step {AT}, local gradient given the weights (between forward and gradient, first in {NAME})"
    if late_fault.outcome is not Outcome.DIFFERENT or jump not in begins or not rest.startswith(last):
        yield late_fault.sentence
    if f'"measure.capture_steps=[1,{AT - 1},{AT}]"' not in " ".join(late_fault.commands):
        yield f"captures other steps: {late_fault.commands}"
    at_the_end = told("end", SEEN).sentence
    if "certain" in at_the_end or f": {last}" not in at_the_end or "; begun " not in at_the_end:
        yield f"nothing jumped before: {at_the_end}"
    other = bench.held(broken(SEEN, local=lost, between=larger), CONTROL)
    if "certain" in other.sentence or ": at step 12, weights after the last step" not in other.sentence:
        yield f"another stage: {other.sentence}"


test_a_wrong_onset_is_found = finds(
    "Where a fault begins",
    wrong_onsets="""
        worked out before: No step before is named
            parity.telling.wording._since: before == first.step - 1 => True
        certain alone: Only the step that is certain is named
            parity.telling.wording.onset: f.check in JUMPS => False
        of any stage: Any jump begins a fault
            parity.telling.wording.onset: set(f.stages) & set(first.stages) => True
        captured late: The last step's captures are asked for
            parity.telling.wording._deciding: onset(first, findings) or first => first
    """,
)


SHARPER: dict[str, tuple[Arm, Arm]] = {
    "in bf16, by a third": (
        broken(replace(OURS_BF16, checked=True, steps=12), local=late(scaled_down(0.1))),
        replace(BF16, checked=True, steps=12),
    ),
    "in hot training, while weights are close": (
        broken(replace(SEEN, **HOT), local=late(scaled_down(0.87))),
        replace(SEEN, replicate=1, **HOT),
    ),
}
"""A backward that loses a part of one tensor, held against a baseline: embedding and head untied, in doubt in fp32
alone before."""


CLEAN_PAIRS: list[tuple[Arm, Arm]] = [
    *((replace(SEEN, seed=seed), replace(CONTROL, seed=seed)) for seed in range(3)),
    *((replace(SEEN, k=k), CONTROL) for k in (1, 4)),
    (replace(SEEN, captures=()), replace(CONTROL, captures=())),
    (replace(OURS_SGD, checked=True, k=1), replace(SGD, checked=True)),
    (replace(OURS_BF16, checked=True, k=1), replace(BF16, checked=True)),
    (replace(SEEN, captures=(1, 2, 3), updates=(1, 2, 3)), replace(CONTROL, captures=(1, 2, 3), updates=(1, 2, 3))),
    (replace(SEEN, steps=40), replace(CONTROL, steps=40)),
    *((replace(SEEN, k=1, seed=seed, **HOT), replace(CONTROL, seed=seed, **HOT)) for seed in range(3)),
    (replace(OURS_SGD, checked=True, k=1, lr=1.0, clip=None), replace(SGD, checked=True, lr=1.0, clip=None)),
]


@pytest.mark.parametrize("pair", CLEAN_PAIRS)
def test_a_clean_pair_passes_hot_or_not(bench: Bench, pair: tuple[Arm, Arm]) -> None:
    verdict = bench.held(*pair)
    assert verdict.outcome in (Outcome.EQUAL, Outcome.EQUIVALENT), verdict.sentence
    assert SAID in verdict.sentence or verdict.outcome is Outcome.EQUAL
    looks = {look.check for look in every_step.LOOKS.values()}
    assert max(row.ratio for row in verdict.evidence if row.check in looks) < 0.7


def damaged(run: Path, path: Path, change: Callable[[Any], None]) -> Path:
    """A copy of a run with its steps' numbers changed: an array [rows, columns] by `change`."""
    shutil.copytree(run, path)
    file = path / FOLDER / "steps.f64"
    rows = np.fromfile(file).reshape(-1, len(step_columns(SKETCHES)))
    change(rows)
    rows.tofile(file)
    return path


def test_a_factor_that_sgd_takes_gradients_with_is_not_called_clipping(bench: Bench, tmp_path: Path) -> None:
    """Dampening makes the same of a gradient as another clipping."""

    def dampened(rows: Any) -> None:
        rows[AT - 1 : -1, step_columns(SKETCHES).index("norm")] = 0.1

    arm, control = replace(OURS_SGD, checked=True, k=1), bench.run(replace(SGD, checked=True))
    found = first(bench.held(damaged(bench.run(arm), tmp_path / "lab" / "arm", dampened), control))
    assert (found.step, found.since, found.stage) == (AT, Stage.clipping, Stage.optimizer)
    under_adam = first(bench.held(broken(SEEN, logged_norm_factor=1.01), CONTROL))
    assert (under_adam.since, under_adam.stage) == (None, Stage.clipping)


def broken_expectations(bench: Bench) -> Iterator[str]:
    """What does not hold of a few late faults and clean pairs."""
    for name in ("gradients x 1.00001", "momentum in bf16", "weights x 1.1 after the last step"):
        hooks, step, stage, _ = FAULTS[name]
        verdict = bench.held(broken(SEEN, **hooks), CONTROL)
        if verdict.outcome is not Outcome.DIFFERENT or (first(verdict).step, first(verdict).stage) != (step, stage):
            yield name
    if bench.held(broken(SEEN, local=BACKWARDS["1 % noise"]), CONTROL).outcome is not Outcome.UNDECIDED:
        yield "a late backward passes"
    for name, pair in SHARPER.items():
        steps = [each.step for each in bench.held(*pair).findings if each.grade is not Grade.ok]
        yield from [] if steps[:1] == [AT] else [name]
    unseen = (replace(arm, **CAPTURED, checked=False) for arm in (CHAOS, CONTROL))
    if bench.held(*unseen).outcome is not Outcome.UNDECIDED:
        yield "chaos without witnesses is not in doubt"
    clean = [bench.held(arm, CONTROL) for arm in (SEEN, CHAOS)]
    yield from (verdict.sentence for verdict in clean if verdict.outcome is not Outcome.EQUIVALENT)


CHAOS = broken(SEEN, local=chaotic)
CAPTURED: dict[str, Any] = {"captures": (1, 2, 3, 4, 5), "updates": (1, 2, 3, 4, 5)}


test_a_mutant_is_noticed = finds(
    "The comparator: steps checked",
    broken_expectations="""
        no look at every step: no look at every step
            parity.alone.every_step.check: lambda *a: []
        bounds a thousand times as wide: bounds a thousand times as wide
            parity.alone.every_step.bound: lambda *a: 1000 * was(*a)
        bounds a thousandth: bounds a thousandth
            parity.alone.every_step.bound: lambda *a: was(*a) / 1000
        nothing is checked: nothing is checked
            parity.alone.every_step.checked_until: lambda *a: 0
        no jump of gradients: no jump of gradients
            parity.tiers.divergence.JUMP: 1e9
        no jump in hot training: no jump in hot training
            parity.tiers.divergence.gradient_jumps: DRAW *
            => np.where(found.steps <= last_stable, 1.0, np.inf)[:, None] * DRAW *
        every step is a jump: every step is a jump
            parity.tiers.divergence.DRAW: 1e-4
        losses are explained by nothing: losses are explained by nothing
            parity.tiers.divergence._by_distance: lambda *runs: (*was(*runs)[:2], 0.0 * was(*runs)[2])
        no growth is seen: no growth is seen
            parity.judgement.grown: lambda differences, *_: 0 * differences
    """,
)


# -- two runs that are equal so far owe equal weights after equal gradients --------------------------------------------


PURE = replace(OURS_BF16, checked=True, main="bf16", steps=12, captures=(1,), updates=(1,))
WIDE = replace(OURS, checked=True, strategy="optim_grads", updates=(1,))
Updated = Callable[[int, Params, Params], None]


def kept_in_bf16(step: int, before: Params, weights: Params) -> None:
    """Weights that are kept in 16 bits."""
    for value in weights.values():
        value[...] = bf16(value)


def frozen_row(step: int, before: Params, weights: Params) -> None:
    kept_in_bf16(step, before, weights)
    if step >= AT:
        weights[NAME][5] = before[NAME][5]


def grown_weight(step: int, before: Params, weights: Params) -> None:
    """One weight of large size grows by two units a step, which the rule of single updates allows."""
    kept_in_bf16(step, before, weights)
    if step >= AT:
        flat = weights[NAME].ravel()
        flat[abs(flat).argmax()] += 2**-6


def one_kept(step: int, before: Params, weights: Params) -> None:
    """One element is not updated in one step."""
    kept_in_bf16(step, before, weights)
    if step == AT:
        weights[NAME].flat[77] = before[NAME].flat[77]


def forgotten(step: int, optimizer: Optimizer) -> None:
    """Sixty-four second moments are zeroed as a step leaves them."""
    if step == AT - 1:
        optimizer.v[NAME].ravel()[:64] = 0.0


def rounded_otherwise(step: int, before: Params, weights: Params) -> None:
    """Another kernel's last bits."""
    if step >= AT:
        weights[NAME].ravel()[3] *= 1 + 2**-22


def another_element(step: int, values: Params) -> Params:
    """A gradient whose one element has another last bit."""
    changed = {name: value.copy() for name, value in values.items()}
    if step == AT:
        flat = changed[NAME].ravel()
        flat[abs(flat).argmax()] *= 1 + 2**-7
    return changed


TWIN = broken(replace(PURE, replicate=1), updated=kept_in_bf16)
CASES: dict[str, tuple[Arm, Arm, str]] = {
    "a frozen row": (broken(PURE, updated=frozen_row), TWIN, NAME),
    "a weight that grows": (broken(PURE, updated=grown_weight), TWIN, NAME),
    "an element, once": (broken(PURE, updated=one_kept), TWIN, NAME),
    "64 moments": (broken(PURE, updated=kept_in_bf16, moments=forgotten), TWIN, NAME),
    "in fp32": (broken(WIDE, updated=rounded_otherwise), replace(WIDE, replicate=1), NAME),
    "run twice": (broken(PURE, updated=kept_in_bf16), TWIN, ""),
    "run twice, hot": (
        broken(replace(PURE, lr=0.1), updated=kept_in_bf16),
        broken(replace(PURE, lr=0.1, replicate=1), updated=kept_in_bf16),
        "",
    ),
    "other gradients": (broken(PURE, updated=kept_in_bf16, local=another_element), TWIN, ""),
    "other microbatches": (broken(replace(PURE, k=4), updated=kept_in_bf16), TWIN, ""),
    "another engine": (broken(WIDE, updated=rounded_otherwise), replace(WIDE, engine="fsdp2"), ""),
}
"""Arm, control, and the tensor that is different in step 8; none in a clean pair."""


def wrong(bench: Bench) -> Iterator[str]:
    for name, (arm, control, tensor) in CASES.items():
        verdict = bench.held(arm, control)
        found = [f for f in verdict.findings if f.grade is Grade.bad]
        if not tensor and verdict.outcome not in (Outcome.EQUAL, Outcome.EQUIVALENT):
            yield f"{name}: {verdict.sentence}"
        if tensor and [(f.check, f.step, f.tensor, f.place) for f in found[:1]] != [
            (divergence.ALIKE, AT, tensor, "between clipping and optimizer")
        ]:
            yield f"{name}: {verdict.sentence}"
    left, right = (load(bench.run(each)) for each in CASES["a frozen row"][:2])
    elsewhere = [replace(run, config={**run.config, "cluster.device": "cuda"}) for run in (left, right)]
    if [f.grade for f in divergence.after_equal_gradients(*elsewhere)] != [Grade.doubt]:
        yield "on another device"
    own = [replace(run, config={**run.config, "optimizer.name": "ext"}) for run in (left, right)]
    other = replace(left, provenance={**left.provenance, "sources_digest": "another"})
    clipped = replace(left, columns={**left.columns, "grad_norm": [1.0, *left.columns["grad_norm"][1:]]})
    for name, pair in {"sources": (other, right), "own optimizer": own, "another norm": (clipped, right)}.items():
        if divergence.after_equal_gradients(*pair):
            yield name


def test_what_a_run_shows_of_itself_comes_first(bench: Bench) -> None:
    """A whole tensor that is not updated breaks the rule of single updates, which says in which run."""

    def stopped(step: int, before: Params, weights: Params) -> None:
        if step >= AT:
            weights[NAME][...] = before[NAME]

    verdict = bench.held(broken(WIDE, updated=stopped), replace(WIDE, replicate=1))
    assert divergence.ALIKE not in {finding.check for finding in verdict.findings}
    assert f"at step {AT}, update by the rule, sampled" in verdict.sentence


test_weights_that_owe_nothing_are_found = finds(
    "The comparator: equal until",
    wrong="""
        whatever the gradients: Other gradients owe equal weights
            parity.tiers.divergence._steps_of_equal_gradients: steps if equal.all() => steps if True
        whatever the norm: Gradients that were clipped otherwise owe them too
            parity.tiers.divergence._steps_of_equal_gradients: "grad_norm", =>
        any configuration: Any kernel owes bits
            parity.tiers.divergence._one_configuration: same and same_code => same_code
        any sources: Other code owes bits
            parity.tiers.divergence._one_configuration: same and same_code => same
        any optimizer: One's own optimizer owes bits
            parity.tiers.divergence._one_configuration: in KNOWN => != ''
        all tensors: One tensor is let off
            parity.tiers.divergence._finding: differs.any(1) => differs.all(1)
        on any device: Memory chooses no kernel on any device
            parity.tiers.divergence._finding: == "cpu" => != ""
        nobody asks: Equal gradients owe nothing
            parity.judgement.Judgement.verdict: own += [ => [
    """,
)
