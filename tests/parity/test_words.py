"""A sentence claims what the record holds: parts of a pair's record are taken away, and the words go with them; and a
finding that explains itself does not hide another one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.parity import Outcome, Verdict, compare
from harness.store.check_stream import FOLDER, STREAM, step_columns
from tests.parity.arms import Arm, broken
from tests.parity.conftest import Bench
from tests.parity.corpus import bf16, scaled, stored_as
from tests.parity.edits import edit_lines
from tests.parity.lab import CLEAN
from tests.parity.streams import SKETCHES
from tests.parity.test_every_step import AT, CONTROL, SEEN, damaged, in_bf16, late, one_element
from tests.support.mutants import finds

Change = Callable[[Path], object]

RESOLVED = "in the gradients captured at step 1 would have shown"
BESIDES = "; and besides, "


# -- what is taken away ------------------------------------------------------------------------------------------------


def _without_capture(run: Path) -> None:
    for file in (run / "capture").glob("step-000001.*"):
        file.unlink()


def _without_a_followed_tensor(run: Path) -> None:
    """The last one: what the others' numbers are stands where it stood."""
    path = run / FOLDER / STREAM
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "tensors": facts["tensors"][:-1]}))
    table = run / FOLDER / "tensors.f64"
    rows = np.fromfile(table).reshape(SEEN.steps, len(facts["tensors"]), -1)
    rows[:, :-1].tofile(table)


TWIN = replace(SEEN, replicate=1)


def wrong_words(bench: Bench, folder: Path) -> Iterator[str]:
    """Claims of a sentence that the record of both runs, changed by `change`, does not hold."""

    def told(name: str, arm: Arm, control: Arm, *changes: Change) -> str:
        runs = []
        for place, each_arm in (("arm", arm), ("control", control)):
            path = folder / name / place / "lab" / place
            shutil.copytree(bench.run(each_arm), path)
            for change in changes:
                change(path)
            runs.append(path)
        return compare(*runs, sources=CLEAN).sentence

    if RESOLVED not in told("whole", SEEN, CONTROL):
        yield "a scale in what was captured"
    if "scale" in told("no capture", SEEN, CONTROL, _without_capture):
        yield "a scale in what nobody captured"
    equal, bare = told("equal", SEEN, TWIN), told("equal, no capture", SEEN, TWIN, _without_capture)
    if " gradient" not in equal or " gradient" in bare:
        yield f"bits of gradients: {bare}"
    count = len(json.loads((bench.run(SEEN) / FOLDER / STREAM).read_text())["tensors"])
    less = told("a tensor less", SEEN, CONTROL, _without_a_followed_tensor)
    if f"; of tensors, {count - 1} of {count} in every step" not in less:
        yield "of every tensor"
    if "of tensors" in told("all tensors", SEEN, CONTROL):
        yield "of too few tensors"


WORDS = {
    "kept": "weights between steps",
    "gather": "weights of forwards",
    "sum": "sums of gradients",
    "norm": "the norm",
    "rule": "samples of the update",
}
WORKED_OUT_AGAIN = "forwards and backwards, worked out again"
LOOKED_AT = "; looked at in both at every step, and right: what it was fed"


def said_of(verdict: Verdict) -> str:
    """What a sentence says was looked at."""
    return verdict.sentence.partition(" steps")[2].partition("; a wrong scale")[0].rstrip(".")


def wrong_looks(bench: Bench, folder: Path) -> Iterator[str]:
    """The same pair with parts of its record taken away, or more of it: the words go with them."""
    columns = step_columns(SKETCHES)

    def told(name: str, change: Callable[[Any], object], lines: Callable[[Any], object] = list) -> str:
        arm = damaged(bench.run(SEEN), folder / name / "lab" / "arm", change)
        edit_lines(arm, lines)
        return said_of(compare(arm, again, sources=CLEAN))

    def once(rows: Any) -> None:
        rows[11, columns.index("again")] = 0.0

    again = damaged(bench.run(CONTROL), folder / "control" / "lab" / "control", once)
    for column, word in WORDS.items():
        for rows, said in ((slice(5, 12), "at 5 of 12 steps"), (slice(1, 12), "at step 1 alone")):

            def blind(values: Any, rows: slice = rows, column: str = column) -> None:
                values[rows, columns.index(column)] = np.nan

            found = told(f"{column}-{said}", blind)
            if f"; {word}: {said}" not in found or word in found.partition("right: ")[2].partition(";")[0]:
                yield f"{column}: {found}"
    if f"; {WORKED_OUT_AGAIN}: at step 12 alone" not in told("again", once):
        yield "one step that was worked out again"
    if "fed" in told("unfed", list, lambda lines: [line.pop("fed_digest") for line in lines]):
        yield "nobody looked at what it was fed"
    silent = said_of(bench.held(*(replace(arm, checked=False) for arm in (SEEN, CONTROL))))
    if silent != f"{LOOKED_AT}; {WORKED_OUT_AGAIN}: at no step":
        yield f"of two without a stream: {silent}"


# -- a finding that explains itself ------------------------------------------------------------------------------------

AHEAD = broken(replace(CONTROL, updates=(1,), checked=False), adam_steps_ahead=1)
"""A peer whose Adam is one step ahead and that shows nothing of its steps, as megatron-fsdp."""

KNOWN = ", as if one step had been taken before"
REST = f"{KNOWN}; nothing else was found; forwards and backwards, worked out again: at no step."


LATE = {
    "gradients x 1.00001": (broken(SEEN, reduced=scaled(1.00001), reduced_from=AT), "sum, sketched (reduction"),
    "gradients in bf16": (broken(SEEN, reduced=stored_as(bf16), reduced_from=AT), "sum, sketched (reduction"),
    "a gathered element + 0.1": (broken(SEEN, used=late(one_element)), "weights of forwards, sketched (gather"),
    "momentum in bf16": (broken(SEEN, moments=in_bf16), "update by the rule, sampled (optimizer"),
}


def masked(bench: Bench) -> Iterator[str]:
    """Late faults of one run that another run's explained one hides, and clean runs that are accused."""
    for name, (arm, said) in LATE.items():
        for pair in ((arm, AHEAD), (AHEAD, arm)):
            sentence = bench.held(*pair).sentence
            known, _, more = sentence.partition(BESIDES)
            if "as if one step had been taken before" not in known or not more.startswith(f"at step {AT}, {said}"):
                yield f"{name}: {sentence}"
    both = broken(replace(SEEN, updates=(1,)), adam_steps_ahead=1, reduced=scaled(1.00001), reduced_from=AT)
    if f"{BESIDES}at step {AT}, sum, sketched" not in (sentence := bench.held(both, CONTROL).sentence):
        yield f"of one run: {sentence}"
    for pair in ((SEEN, AHEAD), (AHEAD, SEEN)):
        verdict = bench.held(*pair)
        if verdict.outcome is not Outcome.DIFFERENT or not verdict.sentence.endswith(REST):
            yield f"clean: {verdict.sentence}"
    if "besides" in (sentence := bench.held(LATE["gradients in bf16"][0], CONTROL).sentence):
        yield f"one fault is two: {sentence}"


def wrong_intervals(bench: Bench, folder: Path) -> Iterator[str]:
    """Where a fault of few recomputed steps has begun, by those of its own run that were right; masked or not."""

    def again(*off: float) -> Callable[[Any], object]:
        """Of steps 1, 6 and 12."""
        return lambda rows: rows.__setitem__(([0, 5, 11], step_columns(SKETCHES).index("again")), off)

    def ninth(rows: Any) -> None:
        rows[8, step_columns(SKETCHES).index("again")] = 0.0

    control = damaged(bench.run(CONTROL), folder / "control" / "lab" / "control", ninth)
    cases = [
        ((0.0, 0.0, 0.5), "; begun after step 6, the last one worked out again, and right, before it"),
        ((0.0, 1e-6, 0.5), "; begun after step 1, the last one worked out again, and right, before it"),
        ((np.nan, np.nan, 0.5), "; begun at any step so far: none before it was worked out again, and right"),
    ]
    for number, (off, said) in enumerate(cases):
        arm = damaged(bench.run(SEEN), folder / str(number) / "lab" / "arm", again(*off))
        for other, known in ((control, ": "), (bench.run(AHEAD), BESIDES)):
            for pair in ((arm, other), (other, arm)):
                sentence = compare(*pair, sources=CLEAN).sentence
                if f"{known}at step 12, gradient worked out again" not in sentence or said not in sentence:
                    yield sentence


test_a_mutant_is_found = finds(
    "What a sentence claims",
    wrong_words="""
        a scale of anything: Said without captures
            parity.telling.wording.right_of: "" if resolution is None else =>
        every tensor: Of tensors that nobody followed
            parity.telling.wording._followed: 0 < count < known => False
    """,
    wrong_looks="""
        whatever was seen: Seen once is seen at every step
            parity.telling.wording._looked_at: == length] => > 0]
        of either run: Seen in one
            parity.judgement.Judgement._looked_at: left[name] & right[name] => left[name] | right[name]
        of what was not seen: What was not seen was right
            parity.alone.every_step.looked_at: = ~np.isnan(values) => = True
        worked out again or not: What is nowhere is anywhere
            parity.telling.wording._of_steps: at no step => at every step
    """,
    masked="""
        nothing besides: One failure is told
            parity.telling.wording.wrong_of: if more is None => if more or not more
        its own stage too: Any other
            parity.judgement.Judgement._besides: first.explains_itself and first.stage not in each.stages => True
        nothing explains itself: Of one run, the first alone
            parity.outcome.Finding.explains_itself: return self.note.endswith(AHEAD) => return False
        nothing is said of the rest: A known fault is taken for all that there may be
            parity.telling.wording._nothing_else: if not any( => if any(
    """,
    wrong_intervals="""
        begun for the first alone: What is besides has begun anywhere
            parity.telling.wording.wrong_of: + _since(more, findings, right(more)) =>
        of whoever was asked: Steps of the other run tell where a fault began
            parity.judgement.Judgement._right: else 1\\n => else 0\\n
        asked is right: What was in doubt when it was worked out again was right
            parity.alone.every_step.right_in: values <= bounds(column, run, run.stream, arithmetic)[0] => values >= 0
    """,
)
