"""Mutants of the comparator: a bound ten times too wide or too tight, a tier or a check switched off, must be noticed.

`broken_expectations` is the suite in miniature. It is empty for the comparator as it is; each mutant must break some of
it. A mutant that survives means that a constant or a check could rot unseen.
"""

from __future__ import annotations

import importlib
import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.parity import Grade, Outcome, Verdict, compare
from harness.parity.tiers import numeric
from harness.parity.tiers.arithmetic import Arithmetic
from harness.parity.tiers.comparable import Admission
from harness.parity.tiers.envelope import Envelope
from harness.parity.tiers.gradients import Block, Pooled, TensorPair
from harness.store.rundir import flatten
from tests.parity.arms import Arm, broken
from tests.parity.conftest import Bench
from tests.parity.corpus import FAULTS, FP32, OURS, OURS_BF16, TWINS, WIDE, Case, fifteen_bits, stored_as
from tests.parity.edits import edit_capture, edit_config, edit_json, edit_lines, next_float
from tests.parity.lab import CLEAN
from tests.support.mutants import each

PASSES = (Outcome.EQUAL, Outcome.EQUIVALENT)
OTHER_ORDER = replace(OURS, strategy="optim_grads_params")
NO_UPDATES = replace(OTHER_ORDER, updates=())
LONG = replace(OTHER_ORDER, steps=40, captures=(1, 2))
LONG_CONTROL = replace(FP32, steps=40, captures=(1, 2))
ORDERED = replace(OURS, numerics="ordered", k=1)
TWICE = replace(ORDERED, replicate=1)
CHECKS = {
    "tokens as fed",
    "comparable",
    "files as the run left them",
    "loss bits",
    "gradient bits",
    "grad_norm bits",
    "param_norm bits",
    "final weights",
    "scale of all gradients",
    "gradient distance",
    "gradient, worst piece",
    "gradient scale",
    "loss",
    "gradient norm",
    "update size",
    "update by the rule",
    "update by the rule, worst piece",
}


def times(key: str, factor: float, first: int, last: int | None = None) -> Callable[[Path], None]:
    """Multiply a logged number by a factor from one step on."""

    def change(lines: list[dict[str, Any]]) -> None:
        for line in lines[first - 1 : last]:
            line[key] = None if line[key] is None else line[key] * factor

    return lambda run: edit_lines(run, change)


NUDGES: list[tuple[str, Arm, Arm, Callable[[Path], None], Outcome]] = [
    # Within a bound, in doubt beyond it, refuted beyond twice that: at most a factor three between neighbours.
    ("loss 1 + 1e-7", LONG, LONG_CONTROL, times("loss", 1 + 1e-7, 1, 1), Outcome.EQUIVALENT),
    ("loss 1 + 8e-7", LONG, LONG_CONTROL, times("loss", 1 + 8e-7, 1, 1), Outcome.UNDECIDED),
    ("loss 1 + 3e-6", LONG, LONG_CONTROL, times("loss", 1 + 3e-6, 1, 1), Outcome.DIFFERENT),
    ("loss 1 + 4e-5 at step 6", LONG, LONG_CONTROL, times("loss", 1 + 1e-5, 6, 6), Outcome.UNDECIDED),
    ("loss 1 + 5e-4 at step 6", LONG, LONG_CONTROL, times("loss", 1 + 5e-4, 6, 6), Outcome.DIFFERENT),
    ("loss up and down late", LONG, LONG_CONTROL, lambda run: _up_and_down(run), Outcome.UNDECIDED),
    ("norm 1 + 1e-6", LONG, LONG_CONTROL, times("grad_norm", 1 + 3e-7, 1, 1), Outcome.EQUIVALENT),
    ("norm 1 + 8e-6", LONG, LONG_CONTROL, times("grad_norm", 1 + 8e-6, 1, 1), Outcome.DIFFERENT),
    ("15 bits", broken(NO_UPDATES, reduced=stored_as(fifteen_bits)), FP32, lambda run: None, Outcome.UNDECIDED),
    ("NaN in both", broken(OURS, nan_at=4), broken(FP32, nan_at=4), lambda run: None, Outcome.UNDECIDED),
    ("bit owed", TWICE, ORDERED, lambda run: edit_lines(run, _one_bit), Outcome.DIFFERENT),
    ("weights owed", TWICE, ORDERED, lambda run: edit_json(run / "summary.json", final_weights="x"), Outcome.DIFFERENT),
    ("gradient owed", TWICE, ORDERED, lambda run: _flipped(run), Outcome.DIFFERENT),
    ("gradient not owed", replace(OURS, replicate=1), OURS, lambda run: _flipped(run), Outcome.EQUIVALENT),
    ("no capture of equal runs", TWICE, ORDERED, lambda run: shutil.rmtree(run / "capture"), Outcome.UNDECIDED),
    ("torch", OURS, FP32, lambda run: edit_json(run / "provenance.json", versions={}), Outcome.NOT_COMPARABLE),
    ("setting", OURS, FP32, lambda run: edit_config(run, "optimizer", eps=1.0), Outcome.NOT_COMPARABLE),
    ("no capture", OTHER_ORDER, FP32, lambda run: shutil.rmtree(run / "capture"), Outcome.UNDECIDED),
    ("1,000 ranks in bf16", OURS_BF16, WIDE, lambda run: _many_ranks(run), Outcome.UNDECIDED),
]


def no_scale(check: Callable[..., Any], kind: type) -> Callable[..., Any]:
    return lambda of, *more: check(replace(of, b=0) if isinstance(of, kind) else of, *more)


def _up_and_down(run: Path) -> None:
    times("loss", 1.03, 35, 35)(run)
    times("loss", 0.97, 36, 36)(run)


def _one_bit(lines: list[dict[str, Any]]) -> None:
    lines[3]["loss"] = next_float(lines[3]["loss"])


def _flipped(run: Path) -> None:
    """The lowest bit of one element of one captured gradient."""

    def change(tensors: dict[str, Any]) -> None:
        tensors["gradient/embedding.weight"].ravel().view(np.uint32)[0] ^= 1

    edit_capture(run, 1, change)


def _many_ranks(run: Path) -> None:
    edit_config(run, "mesh", world_size=1024)
    edit_config(run, "train", microbatch_size=1)


CORPUS = FAULTS + TWINS[:20] + TWINS[-4:]
"""The faults and a third of the baselines: enough to notice, and quick."""


def pooled_grade(b: float) -> Grade:
    """Of a scale error that forty noisy tensors share, in bf16 under fp32; each alone could be rounding."""
    envelope = Envelope(Arithmetic.of(flatten(OURS_BF16.config())), Arithmetic.of(flatten(WIDE.config())))
    pairs = [noisy_pair(f"blocks.{number // 4}.w{number % 4}", b + 1e-3 * (-1) ** number) for number in range(40)]
    kinds = numeric.first_step(pairs, [], envelope, numeric.suspects(envelope))
    found = {finding.check: finding.grade for kind in kinds for finding in kind}
    assert found.pop("gradient scale") is Grade.ok
    return found["scale of all gradients"]


def noisy_pair(name: str, b: float) -> TensorPair:
    """A tensor that bf16 has moved by 1 %, with a scale error."""
    whole = Block(0, 1000, 0.01)
    return TensorPair(name, False, True, True, 1000, 1.0, 1.0, 0.01, b, 2e-3, 0.01, whole)


def nudged(bench: Bench, root: Path) -> Iterator[tuple[str, Verdict, Outcome]]:
    for name, arm, control, edit, expected in NUDGES:
        changed = root / name / "lab" / "changed"
        if not changed.exists():
            shutil.copytree(bench.run(arm), changed)
            edit(changed)
        yield name, compare(changed, bench.run(control), sources=CLEAN), expected


def broken_expectations(bench: Bench, root: Path, corpus: Sequence[Case] = CORPUS) -> Iterator[str]:
    """What does not hold, lazily: a mutant needs one."""
    for name, verdict, expected in nudged(bench, root):
        if verdict.outcome is not expected:
            yield f"{name}: {verdict.sentence}"
    long = compare(bench.run(LONG), bench.run(LONG_CONTROL), sources=CLEAN)
    if {row.check for row in long.evidence} != CHECKS or any(
        row.tier == "T2" and row.ratio > 1 for row in long.evidence
    ):
        yield f"evidence: {sorted({row.check for row in long.evidence} ^ CHECKS)}"
    if pooled_grade(0.0145) is not Grade.bad or pooled_grade(0.0) is not Grade.ok:
        yield "a factor of 1.45 % that no tensor shows alone"
    for case in corpus:
        verdict = bench.judge(case)
        bad = [finding for finding in verdict.findings if finding.grade is Grade.bad]
        if case.step is None and verdict.outcome not in PASSES:
            yield f"{case.name} does not pass: {verdict.sentence}"
        if case.step is not None and (verdict.outcome is not Outcome.DIFFERENT or bad[0].step != case.step):
            yield f"{case.name} is not caught: {verdict.sentence}"
        others = [f for f in bad if f.step == 1 and f.tensor and not f.tensor.startswith(case.tensor)]
        if others or (case.tensor and f"first in {case.tensor}" not in verdict.sentence):
            yield f"{case.name} is found elsewhere: {verdict.sentence}"
        if case.says not in " ".join((verdict.sentence, *(finding.note for finding in bad))):
            yield f"{case.name} is not explained: {verdict.sentence}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nudged")


def test_the_comparator_as_it_is_breaks_nothing(bench: Bench, root: Path) -> None:
    assert list(broken_expectations(bench, root, FAULTS + TWINS)) == []


def scaled(name: str, factor: float) -> tuple[str, str, Callable[[Any], Any]]:
    module, attribute = name.split(".")
    return module, attribute, lambda value: value * factor


def empty(*_: Any, **__: Any) -> list[Any]:
    return []


CONSTANTS = [
    ("envelope.SAFETY", 10),
    ("envelope.SAFETY", 0.1),
    ("envelope.SIGMAS", 10),
    ("numeric.REFUTED", 10),
    ("trajectory.REFUTED", 10),
    ("trajectory.MOST_GROWTH", 3),
    ("trajectory.EXPECTED_GROWTH", 3),
    ("trajectory.LOSS_CEILING", 10),
    ("arithmetic.GRADIENT_FACTOR", 100),
    ("arithmetic.FORWARD_BLOCK", 100),
]

MUTANTS: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    **{f"{name} x {factor}": scaled(name, factor) for name, factor in CONSTANTS},
    "fp32 is ten times as coarse": ("arithmetic", "UNIT", lambda unit: {**unit, "fp32": unit["fp32"] * 10}),
    "bf16 is ten times as coarse": ("arithmetic", "UNIT", lambda unit: {**unit, "bf16": unit["bf16"] * 10}),
    "T0 off": ("comparable", "check", lambda _: empty),
    "T0 facts off": ("comparable", "_origin", lambda _: lambda origin: {}),
    "T0 configuration off": ("comparable", "must_agree", lambda _: lambda key: False),
    "T1 never owed": ("judgement", "admissible", lambda _: lambda *a, **k: Admission("T2", "mutant")),
    "T1 always owed": ("judgement", "admissible", lambda _: lambda *a, **k: Admission("T1", "mutant")),
    "T1 blind to weights": ("bitwise", "_weights", lambda check: lambda a, c: replace(check(a, a), count=0)),
    "bits never differ": ("bitwise", "same_float", lambda _: lambda a, c: True),
    "NaN passes": ("bitwise", "finite_values", lambda _: empty),
    "no gradients": ("numeric", "first_step", lambda _: empty),
    "no distance": (
        "numeric",
        "_distance",
        lambda check: lambda pair, a, r, s=1: check(replace(pair, distance=0), a, r, s),
    ),
    "no scale of a tensor": ("numeric", "_scale", lambda check: no_scale(check, TensorPair)),
    "no pooled scale": ("numeric", "_scale", lambda check: no_scale(check, Pooled)),
    "standard errors are naive": ("gradients", "_standard_error", lambda _: lambda *a: 0.0),
    "no losses": ("trajectory", "losses", lambda _: empty),
    "no norms": ("trajectory", "_norms", lambda check: lambda a, c, e, p, _: check(a, c, e, p, 0)),
    "no updates": ("numeric", "update_sizes", lambda _: empty),
    "updates a hundred times as wide": (
        "numeric",
        "_bounds_of_size",
        lambda bounds: lambda *a: tuple(100 * bound for bound in bounds(*a)),
    ),
    "no growth": ("trajectory", "growths", lambda _: lambda rate, steps: steps * 0.0),
    "no later captures": ("numeric", "later_step", lambda _: empty),
}


def sentence(name: str) -> str:
    module, attribute, _ = MUTANTS[name]
    return f"`{module}.{attribute}` is not what it should be: {name}"


@pytest.mark.parametrize("name", each("The comparator", ((name, sentence(name)) for name in MUTANTS)))
def test_a_mutant_is_noticed(bench: Bench, root: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, attribute, mutate = MUTANTS[name]
    target = importlib.import_module(f"harness.parity.{'' if module == 'judgement' else 'tiers.'}{module}")
    monkeypatch.setattr(target, attribute, mutate(getattr(target, attribute)))
    try:
        noticed = list(itertools.islice(broken_expectations(bench, root), 1))
    except (AssertionError, TypeError, IndexError, ValueError):  # a mutant that crashes is noticed
        return
    assert noticed, f"{name} survives"
