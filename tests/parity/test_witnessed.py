"""What a run says of its steps is judged step by step: each look has a value that is found, at its step, stage and
tensor; what nobody saw is not checked; and each mistake that a judge could make of that breaks something here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.parity import Outcome, compare, judgement
from harness.parity.alone import every_step
from harness.parity.judgement import Judgement
from harness.parity.outcome import Finding, Grade, Stage
from harness.parity.record import Record, load
from harness.parity.tiers import divergence
from harness.parity.tiers.arithmetic import Arithmetic
from harness.store.check_stream import ONCE, step_columns
from tests.parity.arms import Params, broken
from tests.parity.conftest import Bench
from tests.parity.corpus import bf16, stored_as
from tests.parity.edits import edit_lines
from tests.parity.lab import CLEAN
from tests.parity.network import Optimizer
from tests.parity.streams import SKETCHES
from tests.parity.test_every_step import AT, CONTROL, NAME, SEEN, damaged
from tests.support.mutants import finds

STEPS = SEEN.steps
LOOKS = dict(every_step.LOOKS)
OFF = (
    {"sum": 1e-3, "rule": 5.0}
    | dict.fromkeys(("gather", "kept", "replicas"), 1e-6)
    | dict.fromkeys(("norm", *ONCE), 0.01)
)
"""Values that no rounding explains, by column."""


def column(name: str) -> int:
    return step_columns(SKETCHES).index(name)


class Witnessed:
    """A checked run, and copies of it whose stream or record says other things."""

    def __init__(self, bench: Bench, root: Path) -> None:
        self.bench, self.root = bench, root
        self.clean, self.control = load(bench.run(SEEN)), load(bench.run(CONTROL))
        self.arithmetic = Arithmetic.of(self.clean.config)
        self.copies: dict[tuple[Any, ...], Record] = {}

    def saying(self, name: str, step: int, value: float, of: Record | None = None) -> Record:
        """The run, or another, with one number of one step in its stream another; it is the third tensor's."""
        key = (name, step, value, of)
        if key not in self.copies:
            places = [column(name)] if name == "norm" else [column(name), column(f"{name}_tensor")]
            change = lambda rows: rows[step - 1].__setitem__(places, [value, 2][: len(places)])  # noqa: E731
            self.copies[key] = load(damaged((of or self.clean).path, self.folder(), change))
        return self.copies[key]

    def logging(self, key: str, step: int, change: Callable[[Any], Any]) -> Path:
        """The run with one number of one step in its record another."""
        path = damaged(self.clean.path, self.folder(), list)
        edit_lines(path, lambda lines: lines[step - 1].update({key: change(lines[step - 1][key])}))
        return path

    def folder(self) -> Path:
        """Of another copy."""
        return self.root / f"{len([*self.root.iterdir()])}" / "lab" / "run"

    def found(self, run: Record) -> list[tuple[str, int | None, str | None, Grade]]:
        """What does not pass of what a run says of itself."""
        findings = every_step.check(run, self.arithmetic)
        return [(f.check, f.step, f.tensor, f.grade) for f in findings if f.grade is not Grade.ok]


@pytest.fixture(scope="module", name="it")
def _it(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Witnessed:
    return Witnessed(bench, tmp_path_factory.mktemp("witnessed"))


# -- what is claimed, lazily: a mutant needs one ----------------------------------------------------------------------


def wrong_looks(it: Witnessed) -> Iterator[str]:
    """One run's own word on each step."""
    third = it.clean.stream.tensors[2].name  # type: ignore[union-attr] # it is checked
    if it.found(it.clean) or it.found(it.control):
        yield "a clean run is not right"
    for name in LOOKS:
        look, tensor = LOOKS[name], None if name == "norm" else third
        if it.found(it.saying(name, AT, OFF[name])) != [(look.check, AT, tensor, Grade.bad)]:
            yield f"{name} is not found at its step"
        halfway = 1.5 * every_step.bound(name, it.clean.stream, it.arithmetic)  # type: ignore[arg-type] # it is checked
        if it.found(it.saying(name, AT, halfway)) != [(look.check, AT, tensor, Grade.doubt)]:
            yield f"{name} is not in doubt within twice its bound"
    after = it.found(it.saying("kept", STEPS + 1, OFF["kept"]))
    if after != [("weights after the last step", STEPS, third, Grade.bad)]:
        yield "weights that change after the last step are not found"
    for step, stage in ((4, Stage.checkpoint), (5, Stage.weights)):
        resumed = replace(it.saying("kept", 5, OFF["kept"]), summary={**it.clean.summary, "restored": {"step": step}})
        if [f.stage for f in every_step.check(resumed, it.arithmetic) if f.grade is Grade.bad] != [stage]:
            yield f"resumed after step {step}, what step 5 does not begin with is not the {stage.value}'s"


def wrong_8_bits(it: Witnessed) -> Iterator[str]:
    """In 8 bits a run is held to the bits of its own recomputed steps before; other ones refute nothing."""
    of_8_bits = {**it.clean.config, "dtype.compute": "bf16", "dtype.fp8": "current"}
    cases: list[tuple[float, float, dict[str, Any], Grade]] = [
        (0.0, 0.5, {}, Grade.bad),
        (0.0, 0.02, {}, Grade.doubt),
        (0.0, 0.0, {}, Grade.ok),
        (1e-3, 0.5, {}, Grade.doubt),
        (np.nan, 0.5, {}, Grade.doubt),
        (0.0, 0.5, {"attempts": 2}, Grade.doubt),
        (0.0, 0.5, {"config": of_8_bits | {"cluster.device": "cuda"}}, Grade.ok),
    ]
    for before, now, more, grade in cases:
        run = it.saying("again", AT, now, it.saying("again", 5, before))
        run = replace(run, **{"config": of_8_bits, **more})
        told = every_step.check(run, Arithmetic.of(run.config))
        found = [f.grade for f in told if (f.check, f.step) == (LOOKS["again"].check, AT)]
        if [*found, Grade.ok][0] is not grade:
            yield f"{now} after {before}, {[*more]}: {found}"


def wrong_step_checks(it: Witnessed) -> Iterator[str]:
    """How far a run, and a pair, was seen to be right."""
    if every_step.checked_until(it.clean, it.arithmetic) != STEPS:
        yield "a clean run is not checked to its end"
    for name in LOOKS:
        for value in (np.nan, OFF[name]):
            until = every_step.checked_until(it.saying(name, 5, value), it.arithmetic)
            if until != (STEPS if name in ("replicas", *ONCE) else 4):
                yield f"{name} is {value} at step 5, and checked until {until}"
    pairs = ((it.saying("rule", 5, np.nan), it.control, 4), (it.clean, it.saying("sum", 3, np.nan, it.control), 2))
    for arm, control, until in pairs:
        if Judgement(arm, control, []).certain != until:
            yield f"the pair is certain elsewhere than until {until}"


def wrong_testimony(it: Witnessed) -> Iterator[str]:
    """Each run is held to its own arithmetic: gradients in bf16 are an arm's that sends them so, and no control's."""
    arm = load(it.bench.run(replace(SEEN, wire="bf16")))
    control = load(it.bench.run(ROUNDED))
    told = [f for kind in Judgement(arm, control, []).alone for f in kind if f.grade is Grade.bad]
    if {f.check for f in told} != {LOOKS["sum"].check} or min(f.step or 0 for f in told) != AT:
        yield f"what is wrong in the control: {told[:1]}"
    if any(arm.name in f.note for f in told):
        yield "a wire in bf16 is a fault"


def wrong_data(it: Witnessed) -> Iterator[str]:
    """The same tokens, count and learning rate at every step, or nothing is compared."""
    for key, change in (("data_digest", str.upper), ("tokens", lambda n: n + 1), ("lr", lambda lr: lr * 1.5)):
        verdict = compare(it.logging(key, AT, change), it.control.path, sources=CLEAN)
        if verdict.outcome is not Outcome.NOT_COMPARABLE or f"{key} at step {AT}" not in verdict.sentence:
            yield f"another {key}: {verdict.sentence}"


def wrong_losses(it: Witnessed) -> Iterator[str]:
    """A loss that the distance of the weights does not explain is a jump, and a small one is none."""
    for factor, said in ((1 + 1e-6, None), (1 + 2e-6, AT)):
        verdict = compare(it.logging("loss", AT, lambda loss, by=factor: loss * by), it.control.path, sources=CLEAN)
        found = [(f.check, f.step, f.place) for f in verdict.findings if f.grade is not Grade.ok]
        if found != ([("loss given the weights", said, "between forward and gradient")] if said else []):
            yield f"a loss times {factor}: {found}"


def wrong_weights(it: Witnessed) -> Iterator[str]:
    """Where nobody saw the optimizer at work, weights that jump are in doubt."""
    arm, control = (load(unseen(it, run)) for run in (broken(SEEN, between=larger), CONTROL))
    verdict = judgement.Judgement(arm, control, []).verdict()
    found = [(f.check, f.step, f.tensor) for f in verdict.findings if f.grade is not Grade.ok]
    if (divergence.WEIGHTS, AT, NAME) not in found:
        yield f"weights that jump pass: {found}"


def wrong_places(it: Witnessed) -> Iterator[str]:
    """A stage is right where both runs saw it so, at the step and before it."""
    seen = {*every_step.ALWAYS, *(LOOKS[name].stage for name in every_step.REQUIRED)}
    cases: list[tuple[tuple[Record, Record], list[tuple[int | None, Stage]], set[Stage]]] = [
        ((it.clean, it.control), [], seen),
        ((it.saying("sum", AT, np.nan), it.control), [], seen - {Stage.reduction}),
        ((it.saying("sum", AT - 1, np.nan), it.control), [], seen - {Stage.reduction}),
        ((it.clean, it.saying("rule", AT, np.nan, it.control)), [], seen - {Stage.optimizer}),
        ((it.clean, it.control), [(AT - 1, Stage.gather)], seen - {Stage.gather}),
        ((it.clean, replace(it.control, stream=None)), [], {*every_step.ALWAYS}),
    ]
    for number, (runs, wrong, clear) in enumerate(cases):
        if every_step.cleared(runs, AT, wrong) != clear:
            yield f"stages cleared of case {number}: {every_step.cleared(runs, AT, wrong)}"
    off = Finding("T2", "x", Stage.optimizer, Grade.bad, 1.0, 0.0, step=AT, since=Stage.weights)
    for clear, (since, stage) in (
        ({Stage.optimizer, Stage.weights}, (Stage.gather, Stage.clipping)),
        ({Stage.gradient}, (Stage.weights, Stage.optimizer)),
        (set(off.stages) - {Stage.gradient}, (None, Stage.gradient)),
        (set(off.stages), (Stage.weights, Stage.optimizer)),
    ):
        left = every_step.narrowed(off, clear)
        if (left.since, left.stage) != (since, stage):
            yield f"without {clear}: {left.place}"


def larger(step: int, weights: Params, optimizer: Optimizer) -> None:
    """One tensor grows by 1 % before a step."""
    if step == AT:
        weights[NAME] *= np.float32(1.01)


def unseen(it: Witnessed, arm: Any) -> Path:
    """A run as an engine that shows weights and gradients, and no optimizer at work."""
    blind = lambda rows: rows.__setitem__((slice(None), [column("rule"), column("kept")]), np.nan)  # noqa: E731
    return damaged(it.bench.run(arm), it.folder(), blind)


ROUNDED = broken(CONTROL, reduced=stored_as(bf16), reduced_from=AT)
# -- mutants -----------------------------------------------------------------------------------------------------------


AREA = "The comparator: steps checked"


@pytest.fixture(autouse=True)
def _afresh() -> None:
    judgement._ALONE.clear()


test_a_look_or_column_left_out_is_found = finds(
    AREA,
    wrong_looks="\n".join(
        f"no {name}: `{name}` is not looked at\n"
        f"    parity.alone.every_step.LOOKS: {{each: look for each, look in was.items() if each != {name!r}}}"
        for name in LOOKS
    ),
    wrong_step_checks="\n".join(
        f"{name} not required: A step is checked where nobody saw its `{name}`\n"
        f"    parity.alone.every_step.REQUIRED: tuple(each for each in was if each != {name!r})"
        for name in every_step.REQUIRED
    ),
)
test_a_mutant_is_found = finds(
    AREA,
    wrong_looks="""
        steps from nought: A row is taken for the step before it
            parity.alone.every_step._column: np.minimum(rows + 1, run.length) => rows
        the row after the end: The closing row is the last step's
            parity.alone.every_step._column: rows >= run.length => rows > run.length
        no doubt: Beyond its bound all is refuted
            parity.alone.every_step.bounds: REFUTED * allowed => allowed
        the tensor of another row: The tensor is that of another step
            parity.alone.every_step._tensors: [rows] => [rows - 1]
    """,
    wrong_8_bits="""
        8 bits owe nothing: What was equal before is refuted by nothing afterwards
            parity.alone.every_step._owed_again: return (np => return 0 > (np
        unequal before: A run that never had equal bits owes them
            parity.alone.every_step._owed_again: np.cumsum(others) - others == 0 => others >= 0
        the first step: Nothing before it was equal, and it owes bits
            parity.alone.every_step._owed_again: np.arange(len(values)) > 0 => np.arange(len(values)) >= 0
        another attempt: Bits are owed across attempts
            parity.alone.every_step._owed_again: run.attempts < 2 => True
    """,
    wrong_step_checks="""
        until the last right step: A run is checked up to its last right step, whatever lies before
            parity.alone.every_step.checked_until: int(np.argmin(right)) => int(np.flatnonzero(right)[-1]) + 1
        one of two: A pair is certain as far as its arm is
            parity.judgement.Judgement.certain: (self.control, self.envelope.control) => (self.arm, self.envelope.arm)
    """,
    wrong_data="""
        data of step 1: Tokens are compared at the first step alone
            parity.tiers.comparable._steps: enumerate(pairs, start=1) => enumerate([*pairs][:1], start=1)
    """,
    wrong_losses="""
        losses with the room of hot training: Every loss has the room of unstable training
            parity.tiers.divergence.losses: <= last_stable => <= 0
        losses of the step before: A loss counts for the step before
            parity.tiers.divergence.losses: Stage.gradient, steps, => Stage.gradient, steps - 1,
        no loss: Losses are asked for nothing
            parity.tiers.divergence.losses: lambda *_: []
    """,
    wrong_places="""
        this step alone: A stage is right where this step's was seen
            parity.alone.every_step.cleared: {max(1, step - 1), step} => {step}
        one run's word: The arm clears a stage for both
            parity.alone.every_step.cleared: for run in runs => for run in list(runs)[:1]
        what was found wrong: A stage in which a witness found a fault is right
            parity.alone.every_step.cleared: stage is each => stage is None
        NaN is right: What was not seen is right
            parity.alone.every_step._seen: not math.isnan(float(values[step - 1])) => True
        the middle is taken out: One stage is named of several
            parity.alone.every_step.narrowed: since=None if len(left) == 1 else left[0] => since=None
    """,
    wrong_testimony="""
        of another's arithmetic: A control is held to what the arm rounds
            parity.judgement.Judgement._of_itself: right, self.envelope.control => right, self.envelope.arm
        the control is believed: What a control says against itself is not heard
            parity.judgement.Judgement.alone: chain(*self._of_itself) => self._of_itself[0]
    """,
    wrong_weights="""
        weights are not asked: Weights never jump
            parity.tiers.divergence.weight_jumps: _farthest(found, found.weights => _farthest(found, 0 * found.weights
    """,
)
